"""An attention that runs under a condition only, as the kernels for GPUs do."""

from collections.abc import Callable

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def register_attention(name: str, runs: Callable[[Tensor], bool]) -> list[str]:
    """Let models have an `attn_implementation` of this name.

    Args:
        runs: whether it takes a query; otherwise it raises.
    Returns:
        a list that each query's device is added to.
    """
    seen: list[str] = []

    def attend(module, query: Tensor, *args, **kwargs):
        if not runs(query):
            raise RuntimeError(f"{name} takes no {query.dtype} on {query.device}")
        seen.append(str(query.device))
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return seen
