"""Whether a loaded model is what lies under its name, by which all that is trained on it refers to it."""

import json
import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

logger = logging.getLogger(__name__)

TYPES = (torch.float32, torch.float16, torch.bfloat16)
WAY_OUT = "save it by save_pretrained, and give that folder"


def warn_of_origin(what: str, model: PreTrainedModel) -> None:
    """Warn of a model whose adapter or critic could not be loaded again with it: merged, changed, or from scratch.

    Args:
        what: how the warning calls it: "model", "critic".
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
    """The name of a weight that differs from the saved one; None: none does, or what is saved is not at hand.

    It is looked for in the folder, or in the cache of the Hub. The first row of each weight that both have in one
    shape is compared. What is quantised on loading is not.
    """
    revision = getattr(model.config, "_commit_hash", None)
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    try:
        found = name if Path(name).is_dir() else snapshot_download(name, revision=revision, local_files_only=True)
        weights = {key: weight for key, weight in model.state_dict().items() if weight.dtype in TYPES}
        for file in files_in(Path(found)):
            with safe_open(file, "pt") as saved:
                for key in saved.keys() & weights.keys():
                    there, here = saved.get_slice(key), weights[key]
                    comparable = here.dim() and not here.is_meta and list(here.shape) == there.get_shape()
                    if comparable and not same(there[:1], here[:1].cpu()):
                        return key
    except (OSError, ValueError, SafetensorError):
        return None
    return None


def files_in(folder: Path) -> list[Path]:
    """The files that hold a model's weights, none of another variant or of an earlier save."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / SAFE_WEIGHTS_NAME] if (folder / SAFE_WEIGHTS_NAME).is_file() else []


def same(saved: Tensor, loaded: Tensor) -> bool:
    """Whether a weight is what was saved, but for the rounding of the types that it may have passed through."""
    return torch.allclose(saved.float(), loaded.float(), rtol=0.01, atol=1e-6)
