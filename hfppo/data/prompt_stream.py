"""Prompts from a dataset that is read during the run."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import TypeAlias

from datasets import Dataset, IterableDataset

from hfppo.data.prompts import Prompt, Prompts

AnyDataset: TypeAlias = Dataset | IterableDataset
# Evaluation datasets as PPOTrainer takes them; a stream is read whole.
EvalDataset: TypeAlias = AnyDataset | dict[str, AnyDataset] | None

CHUNK = 256  # rows that are read, checked and tokenized at once


class PromptStream:
    """The prompts of a `datasets.IterableDataset` in its order, from its start again when it ends.

    The prompt at a position depends only on the dataset, so no state is saved: a resumed run reads up to its position.
    Each process reads all rows and keeps its own.

    Args:
        dataset: the same in every process, shuffled by its own `shuffle(seed=...)`; each pass is an epoch of its
            `set_epoch`.
        prepare: makes prompts of some rows, possibly none; its second argument names the rows in errors.
        longest: the maximum number of tokens of a prompt.

    Raises:
        ValueError: raised by `prepare`, or a pass over the dataset yields no prompt.
    """

    def __init__(self, dataset: IterableDataset, prepare: Callable[[Dataset, str], Prompts], longest: int):
        self.dataset, self.prepare, self.longest = dataset, prepare, longest
        self._restart()
        self.head = next(self._read())

    def _restart(self) -> None:
        self._prompts = (prompts[i] for prompts in self._read() for i in range(len(prompts)))
        self._held: list[Prompt] = []  # read already, from position `_passed` on
        self._passed = 0

    def at(self, positions: range, seed: int) -> list[Prompt]:
        """Return rows and token ids at positions; `seed` is unused, since a stream shuffles itself."""
        if positions.start < self._passed:
            self._restart()
        skipped = positions.start - self._passed
        for _ in range(skipped - len(self._held)):
            next(self._prompts)
        held = self._held[skipped:]
        held += islice(self._prompts, max(0, len(positions) - len(held)))
        self._held, self._passed = held, positions.start
        return held[: len(positions)]

    def _read(self) -> Iterator[Prompts]:
        """Yield chunks of prepared prompts endlessly, epoch after epoch."""
        for epoch in count():
            self.dataset.set_epoch(epoch)
            rows = found = 0
            for batch in self.dataset.iter(CHUNK):
                chunk = Dataset.from_dict(batch, features=self.dataset.features)
                prompts = self.prepare(chunk, f"train_dataset, from row {rows},")
                rows += len(next(iter(batch.values())))
                found += len(prompts)
                if len(prompts):
                    yield prompts
            if not found:
                raise ValueError(
                    f"train_dataset yielded {rows} rows, and every prompt has more than {self.longest} tokens; add "
                    "shorter prompts, or raise max_prompt_length"
                )
