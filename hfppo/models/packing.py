"""Lay rows of prompt and completion out for a forward pass with little or no padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

# In the names of the attention implementations that separate packed rows by their position ids.
PACKING_ATTENTION = "flash"
CPU_TOKENS = 1024  # per forward on a CPU; beyond them activations leave the cache, and it takes 1.3 times as long
_packs: dict[tuple[type, str], bool] = {}  # the result of `can_pack` by architecture and implementation


@dataclass(frozen=True)
class Layout:
    """The inputs of a trunk, and the positions of the completions' states in its output."""

    inputs: dict[str, Tensor]  # (B, L) token ids, or packed (1, N) token ids and position ids
    states: Tensor  # (B, T + 1) int64: index of s_t in the flattened output; the last state's index is repeated

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        width: int,
        packed: bool,
        final: bool,
    ) -> "Layout":
        """Lay rows out without the gap between a left-padded prompt and a right-padded completion.

        A causal model's real tokens never see what comes after them, so padding on the right needs no mask, and
        attention can use its fastest kernel. Packed rows follow each other in one row without padding.

        Args:
            input_ids: (B, P + T).
            attention_mask: (B, P + T), not 0 on real tokens.
            width: T, the columns of the completions.
            packed: for attention that separates rows by their position ids.
            final: include the state after the last token of a completion, which costs reading that token.
        """
        real = attention_mask.bool()
        lengths = real.sum(dim=1)
        completed = real[:, -width:]
        steps = torch.arange(width + 1, device=input_ids.device)
        first = lengths - completed.sum(dim=1) - 1  # s_0 is read at the last token of the prompt
        if not final:
            from_last = real.long().cumsum(dim=1) == lengths[:, None]
            real = real & ~(from_last & completed.any(dim=1, keepdim=True))
            lengths = real.sum(dim=1)
        states = torch.minimum(first[:, None] + steps, lengths[:, None] - 1)
        if packed:
            starts = lengths.cumsum(dim=0) - lengths
            positions = (real.long().cumsum(dim=1) - 1)[real]
            return cls({"input_ids": input_ids[real][None], "position_ids": positions[None]}, states + starts[:, None])
        longest = int(lengths.max())
        order = (~real).byte().argsort(dim=1, stable=True)[:, :longest]
        rows = torch.arange(len(real), device=input_ids.device)[:, None]
        return cls({"input_ids": input_ids.gather(1, order)}, states + rows * longest)


@torch.no_grad()
def can_pack(model: Any) -> bool:
    """Return whether a model's attention separates packed rows, which a trial with two rows confirms."""
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    implementation = str(getattr(model.config, "_attn_implementation", ""))
    if PACKING_ATTENTION not in implementation:
        return False
    kind = (type(model), implementation)
    if kind not in _packs:
        ids = torch.arange(6, device=model.device).view(2, 3) % model.config.get_text_config().vocab_size
        padded, packed = (Layout.of(ids, torch.ones_like(ids), 2, packed, True) for packed in (False, True))
        trunk = model.base_model
        apart, together = (hidden_states(trunk, layout).float() for layout in (padded, packed))
        _packs[kind] = torch.allclose(apart, together, rtol=0.05, atol=0.05 * float(apart.abs().max()))
    return _packs[kind]


def rows_at_once(most: int, width: int, device: torch.device) -> int:
    """Return how many rows of `width` tokens to pass at once without gradient, at most `most`."""
    return most if device.type != "cpu" else min(most, max(1, CPU_TOKENS // max(1, width)))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode for the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def hidden_states(trunk: nn.Module, layout: Layout) -> Tensor:
    """Return the (N, H) hidden states of all positions of a layout, flattened."""
    return trunk(**layout.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
