"""Texts that end a completion."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria


@dataclass(frozen=True)
class StopStrings:
    """Texts that end a completion. Its last token completes the first of them.

    That token stays in the completion, with all its characters: the policy has sampled it.
    """

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    @property
    def window(self) -> int:
        """Maximum number of tokens of a text, and of the part of a character before it, at one byte per token."""
        return 4 * max(map(len, self.strings)) + 4

    @cached_property
    def lead(self) -> list[int]:
        """A token to decode before a completion: some decoders strip the space at the start of a text."""
        return self.tokenizer("1", add_special_tokens=False)["input_ids"][-1:]

    def found(self, ids: list[int]) -> bool:
        """Return whether the text has one of the stop strings."""
        lead, text = self.tokenizer.batch_decode([self.lead, self.lead + ids], clean_up_tokenization_spaces=False)
        return any(string in text.removeprefix(lead) for string in self.strings)

    def end(self, ids: list[int]) -> int:
        """Return the number of tokens up to the end of the first stop string; 0 if there is none."""
        if not self.found(ids):
            return 0
        return bisect_left(range(1, len(ids)), True, key=lambda count: self.found(ids[:count])) + 1


class StopStringCriterion(StoppingCriteria):
    """Ends the rows of `generate` whose completion has a stop string.

    transformers' own criterion also finds a text that begins in the prompt.

    Args:
        starts: the column where each row's completion begins.
    """

    def __init__(self, stops: StopStrings, starts: list[int]):
        self.stops, self.starts = stops, starts
        self.ends = [0] * len(starts)  # columns up to the token that completes a text; 0: none does

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # type: ignore[override]
        """Return (B,) bool, True for rows that are done."""
        first = max(0, input_ids.shape[1] - self.stops.window)
        for row, ids in enumerate(input_ids[:, first:].tolist()):
            if not self.ends[row] and self.stops.found(ids[max(0, self.starts[row] - first) :]):
                self.ends[row] = input_ids.shape[1]
        return torch.tensor(self.ends, device=input_ids.device) > 0
