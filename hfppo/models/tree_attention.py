"""Attention for inputs that have the common beginnings of rows only once: each layer gathers the rows' keys.

It replaces transformers' `sdpa`, and does the same unless a forward has its keywords. So models keep their
configuration, and a layer that activation checkpointing computes again does what it did before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

SDPA = "sdpa"
sdpa_attention = AttentionInterface()[SDPA]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_tokens: Tensor | None = None,
    row_outputs: Tensor | None = None,
    whole_rows: int = 0,
    row_start: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention of (1, H, N, D) tokens in their rows, (1, N, H, D); without `row_tokens`, what `sdpa` returns.

    The first rows are computed whole, the others from the first column in which they have a token of their own.

    Args:
        row_tokens: (B, W) numbers of the rows' tokens, padded on the right.
        row_outputs: (N,) number of each token among the computed columns, row after row.
        whole_rows: number of rows that are computed whole.
        row_start: first column that is computed of the others.
    """
    if row_tokens is None:
        return sdpa_attention(module, query, key, value, attention_mask, **kwargs)
    whole, rest, width = row_tokens[:whole_rows], row_tokens[whole_rows:], row_tokens.shape[1]
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = [(whole, whole, None)]
    if len(rest):
        mask = torch.ones(width - row_start, width, dtype=torch.bool, device=query.device).tril(row_start)
        parts.append((rest[:, row_start:], rest, mask[None, None]))
    outputs = [
        sdpa_attention(module, take(query, read), take(key, rows), take(value, rows), mask, **kwargs)[0].flatten(0, 1)
        for read, rows, mask in parts
    ]
    return torch.cat(outputs).index_select(0, row_outputs)[None], None


def take(states: Tensor, tokens: Tensor) -> Tensor:
    """Return (B, H, W, D) states of (B, W) tokens, from (1, H, N, D)."""
    return states[0].transpose(0, 1).index_select(0, tokens.flatten()).unflatten(0, tokens.shape).transpose(1, 2)


AttentionInterface.register(SDPA, tree_attention)
