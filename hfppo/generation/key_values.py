"""Reuse of the KV cache of `generate` for sequences with a prefix that was prefilled already."""

from copy import copy
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from hfppo.sample import Turn

ATTENTION = ("eager", "sdpa")  # the implementations whose passes over a part of the columns are tested
CALL = 256  # tokens that are read in the time of a call of `generate`: 50 to 80 on a CPU, more on a GPU

# The name of the KV cache, among the arguments of `generate` and in its output; transformers 5.24 renamed it.
CACHE = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


@dataclass(frozen=True)
class KeyValues:
    """The KV cache of a sequence's first tokens: some columns of a row. Invalid once the weights change."""

    cache: Any = None  # a DynamicCache, if there is any token
    start: int = 0  # row × columns + column of the first token
    count: int = 0  # of the tokens


@dataclass(eq=False)
class Row:
    """A prompt and its completion so far."""

    tokens: list[int]
    limit: int  # maximum number of tokens of the completion
    seed: int | None = None  # None: greedy
    key_values: KeyValues = KeyValues()
    logprobs: list[float] = field(default_factory=list)  # of the completion's tokens
    ended: bool = False  # by EOS or a stop

    @property
    def left(self) -> int:
        """The tokens up to the limit."""
        return self.limit - len(self.logprobs)

    @property
    def done(self) -> bool:
        """Whether the completion is as long as it gets."""
        return self.ended or not self.left

    def extend(self, tokens: list[int], logprobs: list[float], eos_ids: list[int], stop: int) -> None:
        """Append sampled tokens up to the limit, the first of `eos_ids` or the `stop`-th token, if it is positive."""
        turn = Turn.up_to_end(tokens[: self.left], logprobs[: self.left], eos_ids, stop)
        self.ended = not turn.truncated
        self.tokens += turn.ids
        self.logprobs += turn.logprobs


def can_lay_out(cache: Cache | None, columns: int, attention: str) -> bool:
    """Return whether all layers cache all columns, and nothing else, and passes over some of them are tested."""
    if type(cache) is not DynamicCache or attention not in ATTENTION:  # a subclass may have a recurrent state, too
        return False
    return all(type(layer) is DynamicLayer and layer.get_seq_length() == columns for layer in cache.layers)


def lay_out(*batches: list[Row]) -> None:
    """Move the key-values of each batch to a KV cache of its own, to the columns in which `pad_left` puts the tokens.

    `generate` then works as on whole prompts. It reads the last columns, as many as the row with the most new tokens
    has, and at least one. The old KV caches are emptied layer by layer, so that only one layer is in memory twice.
    """
    caches = list(dict.fromkeys(row.key_values.cache for rows in batches for row in rows))
    sizes = [cache.layers[0].keys[:, 0, :, 0].numel() for cache in caches]
    starts = dict(zip(caches, accumulate(sizes, initial=0), strict=False))
    moves = []
    for rows in filter(None, batches):
        width = max(len(row.tokens) for row in rows)
        count = width - max(1, *(len(row.tokens) - row.key_values.count for row in rows))
        begins = [starts[row.key_values.cache] + row.key_values.start - width + len(row.tokens) for row in rows]
        index = (torch.tensor(begins)[:, None] + torch.arange(count)).clamp(min=0)  # the mask hides the padding
        if len(caches) == 1 and index.flatten().equal(torch.arange(sizes[0])):
            return  # nothing moves
        moved = copy(caches[0])
        moved.layers = []
        moves.append((moved, index))
        for number, row in enumerate(rows):
            padding = width - len(row.tokens)
            row.key_values = KeyValues(moved, number * count + padding, count - padding)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for moved, _ in moves:
            moved.layers.append(copy(layers[0]))
        for name in ("keys", "values"):
            tokens = (getattr(layer, name).transpose(1, 2).flatten(0, 1) for layer in layers)
            old = reduce(lambda *two: torch.cat(two), tokens)
            for layer in (*layers, *(moved.layers[-1] for moved, _ in moves)):
                setattr(layer, name, None)
            for moved, index in moves:
                setattr(moved.layers[-1], name, old[index.to(old.device)].transpose(1, 2))


def shared_length(rows: list[Row]) -> int:
    """Return the length of the shared prefixes that are worth prefilling once; 0 if none are."""
    ordered = sorted(row.tokens for row in rows)
    alike = [common_length(*pair) for pair in pairwise(ordered)]
    longest = max(map(len, ordered), default=0)
    known = max((row.key_values.count for row in rows), default=0)

    def to_read(length: int) -> int:
        different = 1 + sum(n < min(length, len(ids)) for n, ids in zip(alike, ordered[1:], strict=True))
        return different * (length - known) + len(rows) * max(1, longest - length)

    best = min((length for length in alike if length > known), key=to_read, default=known)
    return best if to_read(known) - to_read(best) > CALL else 0


def common_length(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def continue_rows(before: list[Row], rows: list[Row]) -> None:
    """Give rows the key-values of the turn before, if each begins with one of that turn's rows, in their order."""
    ahead = ((row.tokens[: row.key_values.count], row.key_values) for row in before)
    found = [next((known for ids, known in ahead if row.tokens[: len(ids)] == ids), None) for row in rows]
    for row, known in zip(rows, found, strict=True):
        if known and None not in found:
            row.key_values = known
