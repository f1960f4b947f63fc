"""Lay rows of prompt and completion out for a forward pass: little padding, and what rows have in common only once."""

import inspect
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfppo.support.devices import copy_to

# Part of the name of each attention implementation that separates packed rows by their position ids.
PACKING_ATTENTION = "flash"
CPU_TOKENS = 1024  # most tokens per forward on a CPU; with more, activations exceed its cache: 1.3 times as long
SHARING_ATTENTION = "sdpa"  # the attention implementation that takes any mask
# Masks cost something, too, so rows are laid out in trees only for
SHORTEST = 16  # common beginnings of as many tokens, which
WORTHWHILE = 0.25  # are at least this share of all tokens.
# Results by model: two of one class may differ, for their configurations choose positions and layers.
_packs: MutableMapping[nn.Module, dict[str, bool]] = WeakKeyDictionary()  # `can_pack`, by attention implementation
_shares: MutableMapping[nn.Module, bool] = WeakKeyDictionary()  # `can_share`


@dataclass(frozen=True)
class Rows:
    """What a forward pass reads of B rows of prompt and completion."""

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

    # (B, L) token ids; or packed (1, N) token ids and position ids; or, as G trees, (G, L) token ids and position ids,
    # and a (G, 1, L, L) mask.
    inputs: dict[str, Tensor]
    states: Tensor  # (B, T + 1) int64: index of s_t in the flattened output; the last state's index is repeated
    tokens: Tensor  # (B, P + T) int64: index of each token in the flattened output; −1 where it is not read
    # Keywords of flash attention: where packed rows begin and end. Without them, each layer searches for it.
    bounds: dict[str, Tensor | int] = field(default_factory=dict)

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
            inputs = {"input_ids": rows.ids[rows.read][None], "position_ids": rows.columns[rows.read][None]}
            bounds = bounds_of(rows.lengths)
        else:
            ids = rows.without_gap()
            starts = torch.arange(len(ids), device=ids.device) * ids.shape[1]
            inputs, bounds = {"input_ids": ids}, {}
        tokens = (rows.columns + starts[:, None]).where(rows.read, -1)
        return cls(inputs, rows.states + starts[:, None], tokens, bounds)

    @classmethod
    def as_trees(cls, rows: "Rows", order: Tensor, shared: Tensor, size: int) -> "Layout":
        """Lay rows out in trees, whose branches are what the rows do not have in common.

        A tree is one row of tokens. The mask shows each token the tokens of its own row up to it, and its position id
        is its place in that row: every token is computed as in a row of its own.

        Args:
            order, shared: from `find_beginnings`.
            size: rows per tree, in that order.
        """
        ids = rows.without_gap()[order]
        row, column = (torch.arange(n, device=ids.device) for n in ids.shape)
        tree = row // size
        known = shared * (row % size > 0)  # tokens that an earlier row of the tree has
        lengths = rows.lengths[order]
        added = lengths - known
        before = added.cumsum(dim=0) - added
        starts = before - before[tree * size]
        width = int((starts + added).max())
        new = column >= known[:, None]
        owner = (row[:, None] * new).cummax(dim=0).values  # the row whose token at this column is laid out
        place = (tree * width + starts - known)[owner] + column

        at = (new & (column < lengths[:, None])).nonzero(as_tuple=True)
        shape = int(tree[-1]) + 1, width
        laid, positions, owners = ids.new_zeros(3, shape[0] * width)
        laid[place[at]], positions[place[at]] = ids[at], at[1]
        owners = owners.fill_(-1).index_put_((place[at],), at[0]).view(shape)
        positions = positions.view(shape)
        # Padding sees the first token of its tree: attention over nothing would not be finite.
        reader = owners.where(owners >= 0, tree.unique_consecutive()[:, None] * size)
        seen = owner.short()[reader[:, :, None], positions[:, None]] == owners[:, None]
        mask = seen & (positions[:, None] <= positions[:, :, None])
        inputs = {"input_ids": laid.view(shape), "position_ids": positions, "attention_mask": mask[:, None]}
        place = place[order.argsort()]
        tokens = place.gather(1, rows.columns.clamp(0, len(column) - 1)).where(rows.read, -1)
        return cls(inputs, place.gather(1, rows.states), tokens)

    def to(self, device: torch.device) -> "Layout":
        """Return a copy on the device."""
        inputs = {name: copy_to(x, device) for name, x in self.inputs.items()}
        bounds = {name: copy_to(x, device) if isinstance(x, Tensor) else x for name, x in self.bounds.items()}
        return Layout(inputs, copy_to(self.states, device), copy_to(self.tokens, device), bounds)

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
    """Return an order in which rows that begin alike are neighbours, and how many tokens each shares with the last."""
    ids, lengths = rows.without_gap(), rows.lengths
    ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None], -1)
    order = ids.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    alike = (ids[order][1:] == ids[order][:-1]).long().cumprod(dim=1).sum(dim=1)
    shared = nn.functional.pad(alike, (1, 0)).minimum(lengths[order])
    return order, shared.where(shared >= SHORTEST, 0)


def order_rows(model: PreTrainedModel | PeftModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the order in which to cut rows into forward passes: those that begin alike together, or longest first.

    Rows of similar length need little padding, and the first pass shows whether memory suffices.
    """
    rows = Rows.of(input_ids, attention_mask, width=1, final=True)
    if len(input_ids) > 1 and not can_pack(model) and can_share(model):
        order, shared = find_beginnings(rows)
        if shared.sum() >= WORTHWHILE * rows.lengths.sum():
            return order
    return rows.lengths.argsort(descending=True, stable=True)


def lay_out(
    model: PreTrainedModel | PeftModel, input_ids: Tensor, attention_mask: Tensor, width: int, final: bool
) -> Layout:
    """Return the layout with the least work that a model's attention can take.

    Args:
        model: the causal language model or trunk that the layout is for.
        input_ids, attention_mask, width, final: see `Rows.of`.
    """
    packed = can_pack(model)
    ids, attended = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu()  # the device waits only here
    rows = Rows.of(ids, attended, width, final)
    return find_layout(model, rows, packed).to(input_ids.device)


def find_layout(model: PreTrainedModel | PeftModel, rows: Rows, packed: bool) -> Layout:
    """Return a layout in trees where that is less work, and another one otherwise."""
    apart = Layout.of(rows, packed)
    if packed or len(rows.ids) == 1 or not can_share(model):
        return apart
    order, shared = find_beginnings(rows)
    if shared.sum() < WORTHWHILE * rows.lengths.sum():
        return apart
    lengths, known = rows.lengths[order].tolist(), shared.tolist()
    hidden_size = model.config.get_text_config().hidden_size

    def cost_of_trees(size: int) -> int:
        added = [length - known[i] * (i % size > 0) for i, length in enumerate(lengths)]
        widths = [sum(added[i : i + size]) for i in range(0, len(added), size)]
        return layer_cost(len(widths), max(widths), hidden_size)

    size = min((2**k for k in range(1, len(lengths).bit_length() + 1)), key=cost_of_trees)
    least = layer_cost(len(lengths), max(lengths), hidden_size)
    return apart if least <= cost_of_trees(size) else Layout.as_trees(rows, order, shared, size)


def layer_cost(rows: int, width: int, hidden_size: int) -> int:
    """Return a number in proportion to the multiplications of a layer.

    With H the hidden size, linear layers take about 24·H² for a token, and attention 4·H for each pair in a row.
    """
    return rows * width * (6 * hidden_size + width)


def fits(layout: Layout, model: PreTrainedModel | PeftModel) -> bool:
    """Return whether a layout that was made for another model suits this one as well."""
    packed, masked = ("position_ids" in layout.inputs, "attention_mask" in layout.inputs)
    return can_share(model) if masked else can_pack(model) == packed


@torch.no_grad()
def can_pack(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether a model's attention separates packed rows, which a trial with two rows confirms."""
    model = cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model
    implementation = str(getattr(model.config, "_attn_implementation", ""))
    if PACKING_ATTENTION not in implementation:
        return False
    known = _packs.setdefault(model, {})
    if implementation not in known:
        ids = torch.arange(6, device=model.device).view(2, 3) % model.config.get_text_config().vocab_size
        rows = Rows.of(ids, torch.ones_like(ids), width=2, final=True)
        padded, packed = (Layout.of(rows, packed) for packed in (False, True))
        apart, together = (hidden_states(trunk_of(model), layout).float() for layout in (padded, packed))
        known[implementation] = torch.allclose(apart, together, rtol=0.05, atol=0.05 * float(apart.abs().max()))
    return known[implementation]


@torch.no_grad()
def can_share(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether a model's attention takes a mask of any form, which a trial with two rows confirms.

    Layers that look back a limited number of positions count columns, which a tree moves.
    """
    model = cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model
    config, trunk = model.config.get_text_config(), trunk_of(model)
    kinds = {"full_attention", *(getattr(config, "layer_types", None) or ())}
    if len(kinds) > 1 or getattr(config, "sliding_window", None) is not None:
        return False
    implementation = str(getattr(model.config, "_attn_implementation", ""))
    if implementation != SHARING_ATTENTION or "position_ids" not in inspect.signature(trunk.forward).parameters:
        return False
    if model not in _shares:
        ids = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], device=model.device) % config.vocab_size
        order, shared = torch.tensor([[0, 1], [0, 2]], device=model.device)
        rows = Rows.of(ids, torch.ones_like(ids), width=2, final=True)
        try:
            layouts = Layout.of(rows, packed=False), Layout.as_trees(rows, order, shared, size=2)
            apart, shared = (hidden_states(trunk, layout).float()[layout.states] for layout in layouts)
            # Measured by how much two completions differ: states may be large in places where all are alike.
            _shares[model] = bool((shared - apart).norm() < 0.1 * (apart[0] - apart[1]).norm())
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it reads the mask as a flat one
            _shares[model] = False
    return _shares[model]


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
    bounds = layout.bounds if takes_keywords(trunk) else {}
    return trunk(**layout.inputs, **bounds, use_cache=False).last_hidden_state.flatten(0, 1)


def bounds_of(lengths: Tensor) -> dict[str, Tensor | int]:
    """Return where packed rows of (B,) lengths begin and end, as flash attention takes it."""
    ends = nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def takes_keywords(trunk: nn.Module) -> bool:
    """Return whether a trunk passes keywords that it does not know on to its attention."""
    inner = trunk.get_base_model() if isinstance(trunk, PeftModel) else trunk
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
