"""Lay out rows of prompt and completion for a forward pass, with little padding and common beginnings only once."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfppo.models.tree_attention import SDPA
from hfppo.support.devices import copy_to

# Part of the name of each attention implementation that separates packed rows by their position ids.
PACKING_ATTENTION = "flash"
CPU_TOKENS = 1024  # most tokens per forward on a CPU; with more, activations exceed its cache: 1.3 times as long
SHARING_ATTENTION = SDPA
# A tree costs a gather in every layer, so it must save enough.
SHORTEST = 16  # tokens of a shared prefix, at least
WORTHWHILE = 0.25  # share of all tokens that are shared, at least
# Results of `try_layout` by trunk, as configurations choose positions and layers; by attention, and whether packed.
_tried: MutableMapping[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Rows:
    """B rows of prompt and completion, and which of their tokens a forward pass reads."""

    ids: Tensor  # (B, P + T)
    read: Tensor  # (B, P + T) bool
    lengths: Tensor  # (B,) tokens that are read
    columns: Tensor  # (B, P + T) number of each read token in its row
    states: Tensor  # (B, T + 1) number of the token at which s_t is read; the last one is repeated

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, width: int, final: bool) -> "Rows":
        """Find the tokens that are read.

        Args:
            input_ids: (B, P + T).
            attention_mask: (B, P + T), not 0 on real tokens.
            width: T, the columns of the completions.
            final: also read the last completion token, for the state after it; this adds one token per row.
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
        return cls(input_ids, real, lengths, real.long().cumsum(dim=1) - 1, states)

    def without_gap(self) -> Tensor:
        """Return (B, L) token ids with the padding on the right."""
        order = (~self.read).byte().argsort(dim=1, stable=True)[:, : int(self.lengths.max())]
        return self.ids.gather(1, order)


@dataclass(frozen=True)
class Layout:
    """The inputs of a trunk, and the positions of the completions' states in its output."""

    # (B, L) token ids; or packed (1, N) token ids and position ids, and as a tree a (1, 1, 1, 1) mask. With them are
    # keywords of attention, such as flash attention's: where packed rows begin and end, which each layer would search.
    inputs: dict[str, Any]
    states: Tensor  # (B, T + 1) int64: index of s_t in the flattened output; the last state's index is repeated
    tokens: Tensor  # (B, P + T) int64: index of each token in the flattened output; −1 where it is not read

    @classmethod
    def of(cls, rows: "Rows", packed: bool) -> "Layout":
        """Lay rows out without the gap between a left-padded prompt and a right-padded completion.

        A causal model's real tokens never see what comes after them, so padding on the right needs no mask, and
        attention can use its fastest kernel.

        Args:
            packed: whether rows follow each other in one row without padding, for attention that separates them by
                their position ids.
        """
        if packed:
            starts = rows.lengths.cumsum(dim=0) - rows.lengths
            packed_ids = {"input_ids": rows.ids[rows.read][None], "position_ids": rows.columns[rows.read][None]}
            inputs = packed_ids | bounds_of(rows.lengths)
        else:
            ids = rows.without_gap()
            starts = torch.arange(len(ids), device=ids.device) * ids.shape[1]
            inputs = {"input_ids": ids}
        tokens = (rows.columns + starts[:, None]).where(rows.read, -1)
        return cls(inputs, rows.states + starts[:, None], tokens)

    @classmethod
    def as_tree(cls, rows: "Rows", order: Tensor, shared: Tensor, start: int) -> "Layout":
        """Lay out, one after another, the tokens that no row before has at the same place after the same tokens.

        A token's position id is its place in its row. `tree_attention`'s keywords say which tokens a row reads.

        Args:
            order, shared: from `find_beginnings`.
            start: column from which on attention is computed for rows that share as many tokens.
        """
        ids, lengths = rows.without_gap()[order], rows.lengths[order]
        row, column = (torch.arange(n, device=ids.device) for n in ids.shape)
        added = lengths - shared
        new = column >= shared[:, None]
        owner = (row[:, None] * new).cummax(dim=0).values  # the row whose token at this column is laid out
        place = (added.cumsum(dim=0) - lengths)[owner] + column  # row i begins its own tokens after those before it
        at = (new & (column < lengths[:, None])).nonzero(as_tuple=True)
        width, whole = len(column), shared < start
        first = (~whole).byte().argsort(stable=True)  # whole rows come first
        ends = (width - start * ~whole)[first].cumsum(dim=0)
        inputs = {
            "input_ids": ids[at][None],
            "position_ids": at[1][None],
            # transformers hands a mask of four dimensions on, and would build one from the positions otherwise.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
            "row_tokens": place.where(column < lengths[:, None], 0)[first],
            "row_outputs": (ends - width)[first.argsort()][at[0]] + at[1],
            "whole_rows": int(whole.sum()),
            "row_start": start,
        }
        place = place[order.argsort()]
        tokens = place.gather(1, rows.columns.clamp(0, width - 1)).where(rows.read, -1)
        return cls(inputs, place.gather(1, rows.states), tokens)

    def to(self, device: torch.device) -> "Layout":
        """Return a copy on the device."""
        inputs = {name: copy_to(x, device) if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        return Layout(inputs, copy_to(self.states, device), copy_to(self.tokens, device))

    def take(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the (N, H) states of all real tokens, row after row, from (…, H) states of all positions.

        Every token must be read, as with `final`.
        """
        return hidden.flatten(0, -2)[self.tokens[attention_mask.bool()]]

    def place(self, packed: Tensor, attention_mask: Tensor) -> Tensor:
        """Return states in the form of the trunk's output, (…, H), from what `take` returned for the same rows.

        Of several rows with one prompt the first one's states are used. Padding gets states of no meaning.
        """
        rows, width = self.inputs["input_ids"].shape
        found = self.tokens[attention_mask.bool()]
        source = found.new_zeros(rows * width + 1)  # the last entry is for tokens that are not read
        number = torch.arange(len(found), device=found.device)
        source.scatter_reduce_(0, found % (rows * width + 1), number, "amin", include_self=False)
        return packed[source[:-1]].view(rows, width, -1)


def find_beginnings(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return an order with equal beginnings together, and how many tokens each row shares with the row before it."""
    ids, lengths = rows.without_gap(), rows.lengths
    ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None], -1)
    order = ids.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    alike = (ids[order][1:] == ids[order][:-1]).long().cumprod(dim=1).sum(dim=1)
    shared = nn.functional.pad(alike, (1, 0)).minimum(lengths[order])
    return order, shared.where(shared >= SHORTEST, 0)


def order_rows(model: PreTrainedModel | PeftModel, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order in which to cut rows into forward passes: equal beginnings together, or longest first.

    Rows of similar length need little padding, and the first pass shows whether memory suffices. Also return how
    many tokens each row shares with the row before it, in the first of these orders.
    """
    rows = Rows.of(input_ids, attention_mask, width=1, final=True)
    if len(input_ids) > 1 and not can_pack(model) and can_share(model):
        order, shared = find_beginnings(rows)
        if shared.sum() >= WORTHWHILE * rows.lengths.sum():
            return order, shared
    return rows.lengths.argsort(descending=True, stable=True), torch.zeros_like(rows.lengths)


def lay_out(
    model: PreTrainedModel | PeftModel, input_ids: Tensor, attention_mask: Tensor, width: int, final: bool
) -> Layout:
    """Return the cheapest layout that a model's attention supports.

    Args:
        model: the causal language model or trunk that the layout is for.
        input_ids, attention_mask, width, final: see `Rows.of`.
    """
    packed = can_pack(model)
    ids, attended = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu()  # the device waits only here
    rows = Rows.of(ids, attended, width, final)
    layout = Layout.of(rows, packed)
    if not packed and len(rows.ids) > 1 and can_share(model):
        order, shared = find_beginnings(rows)
        if shared.any():
            layout = Layout.as_tree(rows, order, shared, first_column(shared, int(rows.lengths.max())))
    return layout.to(input_ids.device)


def first_column(shared: Tensor, width: int) -> int:
    """Return the column from which attention is computed for rows that share as many tokens: with the fewest pairs.

    Attention over whole rows is causal and skips half of its pairs; the rest needs a mask and skips none.
    """

    def pairs(start: int) -> int:
        whole = int((shared < start).sum())
        return whole * width // 2 + (len(shared) - whole) * (width - start)

    starts = shared[shared > 0].clamp(max=width - 1).unique().tolist()
    return min((*starts, width + 1), key=pairs)


def can_pack(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether a model's attention separates packed rows, which a trial with two rows confirms."""
    return PACKING_ATTENTION in attention_of(model) and try_layout(model, packed=True)


def can_share(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether a model's attention is computed by rows of a tree, which a trial with two rows confirms.

    Layers that look back a limited number of positions would need another mask.
    """
    config = model.config.get_text_config()
    kinds = {"full_attention", *(getattr(config, "layer_types", None) or ())}
    is_limited = len(kinds) > 1 or getattr(config, "sliding_window", None) is not None
    return attention_of(model) == SHARING_ATTENTION and not is_limited and try_layout(model, packed=False)


def attention_of(model: PreTrainedModel | PeftModel) -> str:
    """Return the name of a model's attention implementation."""
    return str(getattr(model.config, "_attn_implementation", ""))


@torch.no_grad()
def try_layout(model: PreTrainedModel | PeftModel, packed: bool) -> bool:
    """Return whether two rows have the states that they have apart when they are packed, or else as a tree."""
    trunk = trunk_of(model)
    known, kind = _tried.setdefault(trunk, {}), (attention_of(model), packed)
    if kind not in known:
        size = model.config.get_text_config().vocab_size
        ids = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], device=model.device) % size
        rows = Rows.of(ids, torch.ones_like(ids), width=2, final=True)
        order, shared = torch.tensor([[0, 1], [0, 2]], device=model.device)
        try:
            tried = Layout.of(rows, packed) if packed else Layout.as_tree(rows, order, shared, start=2)
            apart, found = (hidden_states(trunk, x).float()[x.states] for x in (Layout.of(rows, packed=False), tried))
            # Measured by how much two completions differ: states may be large in places where all are alike.
            known[kind] = bool((found - apart).norm() < 0.1 * (apart[0] - apart[1]).norm())
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it reads the mask, or no keywords
            known[kind] = False
    return known[kind]


def rows_at_once(most: int, width: int, device: torch.device) -> int:
    """Return how many rows of `width` tokens to pass at once without gradient, at most `most`."""
    return most if device.type != "cpu" else min(most, max(1, CPU_TOKENS // max(1, width)))


def trunk_of(model: PreTrainedModel | PeftModel) -> nn.Module:
    """Return the part of a language model, with its adapters, that computes hidden states; a trunk as it is.

    Raises:
        ValueError: there is no such part.
    """
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if inner.base_model is not inner or inner.get_output_embeddings() is None:
        return inner.base_model
    # Llama 4's and Mllama's language models have no part of the name that their classes give.
    parts = [part for part in inner.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ValueError(
            f"{type(inner).__name__} has no part that computes the hidden states before the output head, from which "
            "log-probs and values are computed; use another architecture"
        )
    return parts[0]


def hidden_states(trunk: nn.Module, layout: Layout) -> Tensor:
    """Return the (N, H) hidden states of all positions of a layout, flattened."""
    return run_trunk(trunk, layout).last_hidden_state.flatten(0, 1)


def run_trunk(trunk: nn.Module, layout: Layout) -> Any:
    """Return a trunk's outputs for a layout."""
    return trunk(**layout.inputs, use_cache=False)


def bounds_of(lengths: Tensor) -> dict[str, Tensor | int]:
    """Return where packed rows of (B,) lengths begin and end, as flash attention takes it."""
    ends = nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
