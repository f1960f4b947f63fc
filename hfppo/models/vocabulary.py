"""The size of a model's vocabulary, which added tokens change.

PEFT writes resized embeddings into the adapter's file; the base in its own folder keeps the old size.
"""

from torch import Tensor
from transformers import PreTrainedModel


def saved_vocabulary(model: PreTrainedModel, weights: dict[str, Tensor]) -> int | None:
    """Return the vocabulary size of the embeddings in an adapter's file; None if the file has none.

    Args:
        model: the adapter's base, or a classifier on it.
        weights: the file's tensors by name.
    """
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    modules = {name for name, module in model.named_modules() if any(module is layer for layer in embeddings)}
    begins = tuple(f"base_model.model.{name}." for name in modules)
    own = (x for x in weights if x.startswith(begins) and x.endswith(".weight") and ".lora_" not in x)
    return next((weights[name].shape[0] for name in own), None)


def is_resized(model: PreTrainedModel, revision: str | None) -> bool:
    """Return whether a model's vocabulary has another size than in the folder or repository it was loaded from.

    False for a model without a folder or repository.
    """
    if not (name := model.config.name_or_path):
        return False
    try:
        saved = type(model.config).from_pretrained(name, revision=revision)
    except (OSError, ValueError):
        return False
    return saved.get_text_config().vocab_size != model.config.get_text_config().vocab_size
