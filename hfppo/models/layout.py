"""Lay rows of prompt and completion out for a forward pass: little padding, and a common prompt only once."""

import inspect
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

# Part of the name of each attention implementation that separates packed rows by their position ids.
PACKING_ATTENTION = "flash"
CPU_TOKENS = 1024  # most tokens per forward on a CPU; with more, activations exceed its cache: 1.3 times as long
SHARING_ATTENTION = "sdpa"  # the attention implementation that takes any mask
# Results by model: two of one class may differ, for their configurations choose positions and layers.
_packs: MutableMapping[nn.Module, dict[str, bool]] = WeakKeyDictionary()  # `can_pack`, by attention implementation
_shares: MutableMapping[nn.Module, bool] = WeakKeyDictionary()  # `can_share_prompts`


@dataclass(frozen=True)
class Layout:
    """The inputs of a trunk, and the positions of the completions' states in its output."""

    # (B, L) token ids; or packed (1, N) token ids and position ids; or, with G shared prompts, (G, L) token ids and
    # position ids, and a (G, 1, L, L) mask.
    inputs: dict[str, Tensor]
    states: Tensor  # (B, T + 1) int64: index of s_t in the flattened output; the last state's index is repeated
    tokens: Tensor  # (B, P + T) int64: index of each token in the flattened output; −1 where it is not read
    # Keywords of flash attention: where packed rows begin and end. Without them, each layer searches for it.
    bounds: dict[str, Tensor | int] = field(default_factory=dict)

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
            packed: whether to pack the rows, for attention that separates them by their position ids.
            final: also compute the state after the last completion token; this adds one token per row to the forward
                pass.
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
        columns = real.long().cumsum(dim=1) - 1
        if packed:
            starts = lengths.cumsum(dim=0) - lengths
            inputs = {"input_ids": input_ids[real][None], "position_ids": columns[real][None]}
            bounds = bounds_of(lengths)
        else:
            longest = int(lengths.max())
            starts = torch.arange(len(real), device=input_ids.device) * longest
            order = (~real).byte().argsort(dim=1, stable=True)[:, :longest]
            inputs, bounds = {"input_ids": input_ids.gather(1, order)}, {}
        return cls(inputs, states + starts[:, None], (columns + starts[:, None]).where(real, -1), bounds)

    @classmethod
    def sharing_prompts(
        cls, prompts: Tensor, place: Tensor, completion_ids: Tensor, completed: Tensor, final: bool
    ) -> "Layout":
        """Lay each different prompt out once, and the completions of all its rows after it.

        The mask shows each completion its prompt and itself, and its position ids go on from the prompt's: every token
        is computed as in a row of its own.

        Args:
            prompts, place: (G, P) and (B,), from `distinct_prompts`.
            completion_ids: (B, T).
            completed: (B, T) bool, True on the real tokens of the completions.
            final: see `of`.
        """
        device, (num_rows, size) = completion_ids.device, completion_ids.shape
        read = completed if final else nn.functional.pad(completed[:, 1:], (0, 1))
        prompt_lengths, lengths = (prompts >= 0).sum(dim=1), read.sum(dim=1)
        earlier = (place[:, None] == place).tril(-1)  # the rows that stand between a row and its prompt
        starts = prompt_lengths[place] + (earlier * lengths).sum(dim=1)
        width = int((starts + lengths).max())
        ids, positions = torch.zeros(2, len(prompts), width, dtype=torch.long, device=device)
        owners = torch.full_like(ids, -1)  # the row that a token belongs to; B for a prompt's, −1 for padding

        real = (prompts >= 0).nonzero(as_tuple=True)
        in_prompt = ((prompts >= 0).cumsum(dim=1) - 1).where(prompts >= 0, -1)
        columns = in_prompt[real]
        ids[real[0], columns], positions[real[0], columns] = prompts[real], columns
        owners[real[0], columns] = num_rows
        rows, steps = read.nonzero(as_tuple=True)
        at = (place[rows], starts[rows] + steps)
        ids[at], positions[at] = completion_ids[rows, steps], prompt_lengths[place][rows] + steps
        owners[at] = rows

        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        seen = (owners[:, :, None] == owners[:, None]) | (owners[:, None] == num_rows)
        mask = (causal & seen)[:, None]
        taken = torch.arange(size + 1, device=device).minimum(lengths[:, None])  # completion tokens before each state
        last = torch.where(taken > 0, starts[:, None] + taken, prompt_lengths[place][:, None]) - 1
        in_completion = (starts[:, None] + torch.arange(size, device=device)).where(read, -1)
        columns = torch.cat([in_prompt[place], in_completion], dim=1)
        tokens = (place[:, None] * width + columns).where(columns >= 0, -1)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        return cls(inputs, place[:, None] * width + last, tokens)

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

    def cost(self, hidden_size: int) -> int:
        """Return a number in proportion to the multiplications of a layer.

        With H the hidden size, linear layers take about 24·H² for a token, and attention 4·H for each pair in a row.
        """
        rows, width = self.inputs["input_ids"].shape
        return rows * width * (6 * hidden_size + width)


def distinct_prompts(input_ids: Tensor, attention_mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (G, P) different prompts, −1 on padding, and the (B,) index among them of each row's prompt."""
    padding = ~attention_mask[:, :-width].bool()
    return input_ids[:, :-width].masked_fill(padding, -1).unique(dim=0, return_inverse=True)


def lay_out(
    model: PreTrainedModel | PeftModel, input_ids: Tensor, attention_mask: Tensor, width: int, final: bool
) -> Layout:
    """Return the layout with the least work that a model's attention can take.

    Args:
        model: the causal language model or trunk that the layout is for.
        input_ids, attention_mask, width, final: see `Layout.of`.
    """
    packed = can_pack(model)
    apart = Layout.of(input_ids, attention_mask, width, packed, final)
    if packed:
        return apart
    prompts, place = distinct_prompts(input_ids, attention_mask, width)
    if len(prompts) == len(input_ids) or not can_share_prompts(model):
        return apart
    hidden_size = model.config.get_text_config().hidden_size
    completions = input_ids[:, -width:], attention_mask[:, -width:].bool()
    shared = Layout.sharing_prompts(prompts, place, *completions, final)
    return min(apart, shared, key=lambda layout: layout.cost(hidden_size))


def fits(layout: Layout, model: PreTrainedModel | PeftModel) -> bool:
    """Return whether a layout that was made for another model suits this one as well."""
    packed, masked = ("position_ids" in layout.inputs, "attention_mask" in layout.inputs)
    return can_share_prompts(model) if masked else can_pack(model) == packed


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
        padded, packed = (Layout.of(ids, torch.ones_like(ids), 2, packed, True) for packed in (False, True))
        apart, together = (hidden_states(trunk_of(model), layout).float() for layout in (padded, packed))
        known[implementation] = torch.allclose(apart, together, rtol=0.05, atol=0.05 * float(apart.abs().max()))
    return known[implementation]


@torch.no_grad()
def can_share_prompts(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether a model's attention takes a mask of any form, which a trial with two rows confirms.

    Layers that look back a limited number of positions count columns, which a shared prompt moves.
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
        attended = torch.ones_like(ids)
        both = attended[:, 2:].bool()
        try:
            layouts = (
                Layout.of(ids, attended, 2, False, True),
                Layout.sharing_prompts(*distinct_prompts(ids, attended, 2), ids[:, 2:], both, True),
            )
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
