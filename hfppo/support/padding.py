"""Rows of several lengths as one tensor."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad_left(rows: Sequence[Sequence[float]], padding: float) -> tuple[Tensor, Tensor]:
    """Return (B, P) int64 rows padded on the left, and a (B, P) bool mask, True on real entries."""
    return pad_rows(rows, torch.int64, padding, "left")


def pad_right(rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float = 0) -> tuple[Tensor, Tensor]:
    """Return (B, T) rows padded on the right, and a (B, T) bool mask, True on real entries."""
    return pad_rows(rows, dtype, padding, "right")


def pad_rows(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    """Return the rows padded on a side, and their mask."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in tensors]
    return pad_sequence(tensors, True, padding, side), pad_sequence(masks, True, False, side)
