"""The KV cache of `generate`, used again for prompts that begin alike: in a group, or in an episode's next turn."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from hfppo.models.actor_critic import ActorCritic
from hfppo.models.modes import is_sharded

ATTENTION = ("eager", "sdpa")  # the implementations whose passes over a part of the columns are tested

# The name of the KV cache, among the arguments of `generate` and in its output; transformers 5.24 renamed it.
CACHE = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


@dataclass(frozen=True)
class KeyValues:
    """The KV cache of C columns of B rows. The real tokens of a row follow each other.

    Single use; invalid once the weights change.
    """

    cache: DynamicCache
    ids: Tensor  # (B, C) int64
    mask: Tensor  # (B, C) bool, True on real tokens

    @classmethod
    def of(cls, cache: Cache | None, ids: Tensor, mask: Tensor) -> "KeyValues | None":
        """Return the KV cache of a batch; None if a layer does not cache all columns.

        Args:
            cache: the KV cache that `generate` returned.
            ids, mask: (B, P + T), at least the columns of the cache.
        """
        if type(cache) is not DynamicCache:  # a subclass may have a recurrent state, too
            return None
        layers = [layer for layer in cache.layers if type(layer) is DynamicLayer]
        widths = {layer.get_seq_length() for layer in layers}
        if len(layers) < len(cache.layers) or len(widths) != 1:
            return None
        (width,) = widths
        return cls(cache, ids[:, :width], mask[:, :width])

    def continued_by(self, prompt_ids: Tensor, prompt_mask: Tensor) -> DynamicCache | None:
        """Return the KV cache of the prompts' first columns, or None if a prompt begins otherwise.

        Args:
            prompt_ids, prompt_mask: (A, P), padded on the left: some of the rows, in their order, with more tokens.
        """
        prompts, kept = (
            [ids[real].tolist() for ids, real in zip(*x, strict=True)]
            for x in ((prompt_ids, prompt_mask), (self.ids, self.mask))
        )
        rows = find_continued(kept, prompts)
        return None if rows is None else self.lay_out(rows, prompt_ids, prompt_mask)

    def lay_out(self, rows: list[int], prompt_ids: Tensor, prompt_mask: Tensor) -> DynamicCache | None:
        """Return the KV cache of the prompts' first columns, or None if the prompts have only one column.

        The columns have the layout of the prompts, so that `generate` works as on whole prompts. It reads the last
        columns, as many as the row with the most new tokens has.

        Args:
            rows: the A rows that the prompts begin with.
            prompt_ids, prompt_mask: (A, P), padded on the left.
        """
        known, lengths = self.mask[rows].sum(dim=1), prompt_mask.sum(dim=1)
        width = prompt_ids.shape[1] - max(1, int((lengths - known).max()))
        if width <= 0:
            return None
        padding, first = prompt_ids.shape[1] - lengths, self.mask[rows].long().argmax(dim=1)
        columns = torch.arange(width, device=prompt_ids.device) + (first - padding)[:, None]
        columns = columns.clamp(min=0)  # the mask hides the keys on padding
        index = torch.tensor(rows, device=prompt_ids.device)[:, None]
        for layer in self.cache.layers:  # one layer at a time, so that at most one of them is in memory twice
            assert isinstance(layer, DynamicLayer)
            layer.keys = layer.keys[index, :, columns].transpose(1, 2)
            layer.values = layer.values[index, :, columns].transpose(1, 2)
        return self.cache


def find_continued(kept: list[list[int]], prompts: list[list[int]]) -> list[int] | None:
    """Return the row that each prompt begins with, or None if one begins with no later row than the prompt before."""
    rows = iter(enumerate(kept))  # the search for a prompt continues after the row of the prompt before
    found = [next((row for row, ids in rows if prompt[: len(ids)] == ids), None) for prompt in prompts]
    return None if None in found else found


def may_keep(model: ActorCritic) -> bool:
    """Return whether passes over some of the columns are known to be right with this model."""
    return not is_sharded(model) and model.causal_lm.config._attn_implementation in ATTENTION
