"""Call reward functions, combine their scores, and place them on tokens."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hfppo.functional.kl import last_real_index
from hfppo.rewards.reward_func import (
    Log,
    Private,
    RewardFunc,
    check_output,
    columns_of,
    copy_values,
    is_async,
    merge_logs,
    plain_name,
    unwrap,
    with_private,
)
from hfppo.support.calls import awaited, in_background


@dataclass(frozen=True)
class Scored:
    """Scores of B completions by F reward functions."""

    per_function: Tensor  # (B, F) float32, NaN where a function is left out
    combined: Tensor  # (B,) float32, the weighted sum; 0 where no function scores
    per_token: Tensor | None  # (B, T) float32, where `combined` stands; None: on the last token
    scorable: Tensor  # (B,) bool, False where every function that counts is left out
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns from log_extra
    metrics: dict[str, list[float]] = field(default_factory=dict)  # numbers from log_metric
    failed: dict[str, list[bool]] = field(default_factory=dict)  # by function, of those that may fail


class RewardFunctions:
    """Several reward functions and their weights.

    Raises:
        TypeError: something that cannot be called.
        ValueError: no function, or a number of weights that differs from theirs.
    """

    def __init__(self, funcs: RewardFunc | Sequence[RewardFunc], weights: Sequence[float] | None = None):
        self.funcs = list(funcs) if isinstance(funcs, Sequence) and not isinstance(funcs, str) else [funcs]
        if not self.funcs:
            raise ValueError("reward_funcs is empty; give at least one function")
        for func in self.funcs:
            if not callable(func):
                raise TypeError(f"reward_funcs holds {func!r}, which is no function; give Python functions")
        self.names = number_repeated_names([plain_name(func) for func in self.funcs])  # as metrics and errors use them
        self.weights = check_weights(weights, self.names)

    @contextmanager
    def scoring(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        trainer_state: Any,
        mask: Tensor,
        episodes: Sequence[Any] = (),
        continuations: Sequence[Any] | None = None,
    ) -> Iterator[Callable[[], Scored]]:
        """Score B completions; `async def` functions run during the block, until the yielded function waits for them.

        Args:
            prompts, completions: B texts or conversations.
            completion_ids: B lists of token ids, unpadded, EOS and the tokens of tools and environments included.
            columns: the dataset's other columns, B entries each.
            trainer_state: `transformers.TrainerState`.
            mask: (B, T) bool, True on sampled tokens, which rewards may stand on.
            episodes: B, for the rewards that tools and environments give; empty without any.
            continuations: the completions as they continue their prompts, for functions that read both as one text.
        Raises:
            TypeError, ValueError: an output breaks the contract; names function and row.
        """
        logs = [Log() for _ in self.funcs]
        rows = {**columns, "prompts": prompts, "completions": completions}
        calls = [
            functools.partial(
                with_private(func, Private(continuations, episodes, log.failures)),
                **{name: copy_values(values) for name, values in rows.items()},
                completion_ids=[list(ids) for ids in completion_ids],
                trainer_state=trainer_state,
                log_extra=log.extra,
                log_metric=log.metric,
            )
            for func, log in zip(self.funcs, logs, strict=True)
        ]
        wait = [is_async(func) for func in self.funcs]
        with in_background([call for call, later in zip(calls, wait, strict=True) if later]) as results:
            given = [None if later else call() for call, later in zip(calls, wait, strict=True)]
            # Behind a decorator an `async def` function looks plain.
            late = [output for output in given if inspect.isawaitable(output)]
            with in_background([functools.partial(awaited, output) for output in late]) as late_results:

                def scored() -> Scored:
                    known, found = iter(results()), iter(late_results())
                    outputs = [
                        next(known) if later else next(found) if inspect.isawaitable(output) else output
                        for later, output in zip(wait, given, strict=True)
                    ]
                    return self._scored(outputs, [len(ids) for ids in completion_ids], mask, logs)

                yield scored

    @property
    def read_continuations(self) -> bool:
        """Whether a function reads prompt and completion as one text."""
        return any(getattr(unwrap(func), "reads_continuations", False) for func in self.funcs)

    def __call__(self, *args: Any, **kwargs: Any) -> Scored:
        """Score B completions and wait; the arguments are those of `scoring`."""
        with self.scoring(*args, **kwargs) as scored:
            return scored()

    def _scored(self, outputs: list[Any], lengths: list[int], mask: Tensor, logs: list["Log"]) -> Scored:
        """Check and combine the outputs of the functions."""
        rows = [check_output(name, out, lengths) for name, out in zip(self.names, outputs, strict=True)]
        scores = torch.tensor(
            [[math.fsum(x) if isinstance(x, list) else x for x in row] for row in rows], dtype=torch.float32
        ).T
        weights = torch.tensor(self.weights, dtype=torch.float32)
        per_token = any(isinstance(value, list) for row in rows for value in row)
        return Scored(
            per_function=scores,
            combined=(scores.nan_to_num(0.0) * weights).sum(dim=1),
            per_token=place_on_tokens(rows, self.names, self.weights, mask) if per_token else None,
            scorable=(~scores.isnan() & (weights != 0)).any(dim=1),
            extra=columns_of(dict(zip(self.names, logs, strict=True)), len(lengths)),
            metrics=merge_logs(log.numbers for log in logs),
            failed={n: log.failed for n, log in zip(self.names, logs, strict=True) if log.failed is not None},
        )


def number_repeated_names(names: list[str]) -> list[str]:
    """Number repeated names, without creating a name that exists already."""
    taken = {name for name in names if names.count(name) == 1}
    result = []
    for name in names:
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        result.append(name if name in taken and name not in result else next(n for n in numbered if n not in taken))
        taken.add(result[-1])
    return result


def check_weights(weights: Sequence[float] | None, names: list[str]) -> list[float]:
    """Return one finite weight per function; 1 each if `weights` is None."""
    weights = [1.0] * len(names) if weights is None else [float(weight) for weight in weights]
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {len(names)} reward functions ({', '.join(names)}); "
            "give one weight each"
        )
    if not any(weights) or not all(map(math.isfinite, weights)):
        raise ValueError(f"reward_weights={weights!r}: give finite numbers, 0 to only log, and at least one other")
    return weights


def place_on_tokens(
    rows: list[list[float | list[float]]], names: list[str], weights: list[float], mask: Tensor
) -> Tensor:
    """Return (B, T) weighted rewards: token rewards on their tokens, scores on the last sampled token.

    Args:
        mask: (B, T) bool, True on sampled tokens.
    Raises:
        ValueError: a reward stands on a token that the policy did not sample; names function, row and position.
    """
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    last = last_real_index(mask).tolist()
    for values, name, weight in zip(rows, names, weights, strict=True):
        for row, value in enumerate(values):
            if isinstance(value, list):
                rewards = torch.tensor(value, dtype=torch.float32)
                lost = (rewards.ne(0) & ~mask[row, : len(value)]).nonzero()
                if len(lost):
                    raise ValueError(
                        f"reward function {name!r}, row {row}: a reward stands on token {int(lost[0])}, which a tool "
                        "or environment wrote, where it would be lost; put it on a token that the model wrote"
                    )
                placed[row, : len(value)] += weight * rewards
            elif not math.isnan(value):
                placed[row, last[row]] += weight * value
    return placed
