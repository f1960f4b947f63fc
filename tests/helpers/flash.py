"""Where flash attention is."""

import torch
from transformers.utils import import_utils


def flash_attention() -> str | None:
    """Return the name of an attention implementation that separates packed rows and runs here, or None."""
    for version in (2, 3, 4):
        available = getattr(import_utils, f"is_flash_attn_{version}_available", lambda: False)
        if torch.cuda.is_available() and available():
            return f"flash_attention_{version}"
    return None
