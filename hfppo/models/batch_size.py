"""How many rows a model reads at once without gradient: the given number, or on a GPU by tokens and free memory.

Deterministic algorithms and sharded models never go by memory: the number of rows changes the last digits, and the
number of forwards, which must be equal on all processes.
"""

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hfppo.models.actor_critic import ActorCritic
from hfppo.models.layout import rows_at_once
from hfppo.models.modes import is_sharded

ROWS = 64  # default batch size (TRL)
GPU_TOKENS = 2**16  # maximum number of tokens of a pass on a GPU; more tokens are not faster
SHARE = 0.5  # share of the free memory to plan for: the estimates are rough, and the allocator leaves gaps
LARGER = 4  # times as many tokens in a pass on a CPU if rows share some: up to 4608 were as fast, and more are shared
OF_LOGITS = 6 * 4  # bytes per row and token of the vocabulary: what `SeededChoice` computes in float32


def pass_rows(
    model: ActorCritic,
    given: int | None,
    lengths: Tensor,
    device: torch.device,
    shared: Tensor | None = None,
    free: int | None = None,
) -> int:
    """Return how many rows to pass at once.

    Args:
        given: `local_rollout_forward_batch_size`.
        lengths: (B,) tokens of the rows.
        shared: (B,) tokens of each row that another one begins with, from `order_rows`; None: none.
        free: bytes of memory to plan for; None: the free ones of the device.
    """
    width = int(lengths.max())
    if given is not None or not by_memory(model, device):
        if shared is not None and shared.any():
            width = int((lengths.sum() - shared.sum()) / (len(lengths) * LARGER))
        return rows_at_once(given or ROWS, width, device)
    return max(1, min(GPU_TOKENS // width, rows_that_fit(width * bytes_per_token(model), device, free)))


def sampler_rows(
    model: ActorCritic, given: int | None, prompt: int, completion: int, device: torch.device, free: int | None = None
) -> int:
    """Return how many rows to sample at once: their KV cache and the reading of their prompts fill the memory.

    Args:
        given: `local_rollout_forward_batch_size`.
        prompt, completion: the maximum number of tokens of each.
        free: see `pass_rows`.
    """
    if given is not None or not by_memory(model, device):
        return given or ROWS
    key_values = (prompt + completion) * key_value_bytes(model)
    logits = model.causal_lm.config.get_text_config().vocab_size * OF_LOGITS
    return rows_that_fit(key_values + prompt * bytes_per_token(model) + logits, device, free)


def by_memory(model: ActorCritic, device: torch.device) -> bool:
    """Return whether the free memory decides."""
    return device.type == "cuda" and not torch.are_deterministic_algorithms_enabled() and not is_sharded(model)


def rows_that_fit(bytes_per_row: int, device: torch.device, free: int | None) -> int:
    """Return the largest power of two of rows in the free memory, so that small differences do not change it; or 1."""
    rows = int(SHARE * (free_bytes(device) if free is None else free) / bytes_per_row)
    return 1 << max(0, rows.bit_length() - 1)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can still allocate on a GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # and torch's cached bytes


def key_value_bytes(model: ActorCritic) -> int:
    """Return the bytes of a token's KV cache: 2 × layers × key-value width × bytes of a number."""
    config = model.causal_lm.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return 2 * config.num_hidden_layers * width * model.dtype.itemsize


def bytes_per_token(model: ActorCritic) -> int:
    """Return the bytes of a token in the largest layer: 8 hidden states and 4 states of the MLP.

    The estimate is within a tenth of the measured peak for Qwen2.5 with 0.5, 1.5 and 7 billion weights.
    """
    config: PretrainedConfig = model.causal_lm.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return (8 * config.hidden_size + 4 * inner) * model.dtype.itemsize
