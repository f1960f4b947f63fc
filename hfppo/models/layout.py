"""How rows of prompt and completion are laid out for a forward, so that little or no padding is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

PACKING_ATTENTION = "flash"  # found in the names of implementations that tell packed rows apart by their positions
CPU_TOKENS = 1024  # in a forward on a CPU; with more, activations leave the cache, and it takes 1.3 times as long
_packs: dict[tuple[type, str], bool] = {}  # by architecture and implementation, whether it does


@dataclass(frozen=True)
class Layout:
    """The inputs of a trunk, and where the states of the completions stand in what it gives."""

    inputs: dict[str, Tensor]  # of the trunk: (B, L) or (1, N) token ids, position ids where they are packed
    states: Tensor  # (B, T + 1) int64: the index of s_t among the flattened positions; after the last state, its index

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion_mask: Tensor,
        packed: bool,
        final: bool,
    ) -> "Layout":
        """Lay rows out without the gap between a left-padded prompt and a right-padded completion.

        A causal model's real tokens never see what comes after them, so padding on the right needs no mask, and
        attention can run its fastest kernel. Packed, there is no padding either: the rows follow each other in one.

        Args:
            input_ids: (B, P + T).
            attention_mask: (B, P + T), not 0 on real tokens.
            completion_mask: (B, T) bool, True on the real tokens of the completions.
            packed: for attention that tells rows apart by their position ids.
            final: with the state after the last token of a completion, for which that token has to be read.
        """
        real = attention_mask.bool()
        lengths = real.sum(dim=1)
        steps = torch.arange(completion_mask.shape[1] + 1, device=input_ids.device)
        first = lengths - completion_mask.sum(dim=1) - 1  # s_0 is read at the last token of the prompt
        if not final:
            from_last = real.long().cumsum(dim=1) == lengths[:, None]
            real = real & ~(from_last & completion_mask.any(dim=1, keepdim=True))
            lengths = real.sum(dim=1)
        states = torch.minimum(first[:, None] + steps, lengths[:, None] - 1)
        if packed:
            starts = lengths.cumsum(dim=0) - lengths
            positions = (real.long().cumsum(dim=1) - 1)[real]
            return cls({"input_ids": input_ids[real][None], "position_ids": positions[None]}, states + starts[:, None])
        width = int(lengths.max())
        order = (~real).byte().argsort(dim=1, stable=True)[:, :width]
        rows = torch.arange(len(real), device=input_ids.device)[:, None]
        return cls({"input_ids": input_ids.gather(1, order)}, states + rows * width)


@torch.no_grad()
def can_pack(model: Any) -> bool:
    """Whether a model keeps packed rows apart at no cost: its attention is made for that, and a trial bears it out."""
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    implementation = str(getattr(model.config, "_attn_implementation", ""))
    if PACKING_ATTENTION not in implementation:
        return False
    kind = (type(model), implementation)
    if kind not in _packs:
        ids = torch.arange(6, device=model.device).view(2, 3) % model.config.get_text_config().vocab_size
        mask = torch.ones_like(ids)
        padded, packed = (Layout.of(ids, mask, mask.bool()[:, 1:], packed, True) for packed in (False, True))
        trunk = model.base_model
        apart, together = (hidden_states(trunk, layout).float() for layout in (padded, packed))
        _packs[kind] = torch.allclose(apart, together, rtol=0.05, atol=0.05 * float(apart.abs().max()))
    return _packs[kind]


def rows_at_once(most: int, width: int, device: torch.device) -> int:
    """How many rows of `width` tokens a forward without gradient takes best: at most `most`."""
    return most if device.type != "cpu" else min(most, max(1, CPU_TOKENS // max(1, width)))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def hidden_states(trunk: nn.Module, layout: Layout) -> Tensor:
    """(N, H) hidden states of all positions of a layout, flattened."""
    return trunk(**layout.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
