"""Whether a loaded model is what lies under its name, by which all that is trained on it refers to it."""

import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

WEIGHTS = "model*.safetensors"
WAY_OUT = "save it by save_pretrained, and give that folder"


def check_origin(what: str, model: PreTrainedModel) -> None:
    """Warn of a model whose adapter or critic could not be loaded again with it: merged, changed, or from scratch.

    Args:
        what: it is for, as the warning calls it.
    """
    if not (name := model.config.name_or_path):
        logger.warning(
            "%s has no name_or_path, so what is saved will not say what it was trained on; %s", what, WAY_OUT
        )
    elif (key := changed_weight(model, name)) is not None:
        logger.warning(
            "%s is called %r, by which it will be loaded again, but that has another %s; %s", what, name, key, WAY_OUT
        )


def changed_weight(model: PreTrainedModel, name: str) -> str | None:
    """The name of a weight that is not the one in a folder or in the cache of the Hub; None: none, or it is not known.

    The first row of each weight that both have in one shape is compared; quantised ones have another.
    """
    revision = getattr(model.config, "_commit_hash", None)
    try:
        found = name if Path(name).is_dir() else snapshot_download(name, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    weights = model.state_dict()
    for file in sorted(Path(found).glob(WEIGHTS)):
        with safe_open(file, "pt") as saved:
            for key in saved.keys() & weights.keys():
                there, here = saved.get_slice(key), weights[key]
                comparable = here.is_floating_point() and here.dim() and list(here.shape) == there.get_shape()
                if comparable and not same(there[:1], here[:1].cpu()):
                    return key
    return None


def same(saved: Tensor, loaded: Tensor) -> bool:
    """Whether a weight is what was saved, in the type that it was loaded in or in half precision."""
    return torch.equal(saved.to(loaded.dtype), loaded) or torch.equal(saved.bfloat16(), loaded.bfloat16())
