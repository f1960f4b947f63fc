"""Reward functions, after the contract of TRL's GRPOTrainer.

    func(prompts=…, completions=…, completion_ids=…, **dataset_columns, trainer_state=…, log_extra=…, log_metric=…)
        -> list[float | None] | list[list[float]]

All arguments are passed by keyword. For text prompts the completions are strings, for conversations lists of one
message. One number per completion is its score; None leaves the function out for that row. A list of numbers per
completion, as long as its `completion_ids`, rewards each token. `async def` functions run concurrently.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfppo.background import in_background

RewardFunc = Callable[..., Any]


@dataclass(frozen=True)
class Scored:
    """What the reward functions say about B completions."""

    per_function: Tensor  # (B, F) float32, NaN where a function is left out
    combined: Tensor  # (B,) float32, the weighted sum; 0 where no function scores
    per_token: Tensor | None  # (B, T) float32, where `combined` stands; None: on the last token
    scorable: Tensor  # (B,) bool, False where every function is left out
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns from log_extra
    metrics: dict[str, list[float]] = field(default_factory=dict)  # numbers from log_metric


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
            if not callable(func) or isinstance(func, nn.Module):
                raise TypeError(f"reward_funcs holds {describe(func)}, which is no function; give Python functions")
        self.weights = check_weights(weights, self.names)

    @property
    def names(self) -> list[str]:
        """The functions' names, as metrics and errors use them; repeated ones get numbers."""
        plain = [plain_name(func) for func in self.funcs]
        names = [name for name in plain if plain.count(name) == 1]
        result = []
        for name in plain:
            unique = (
                name if name in names else next(n for i in itertools.count(1) if (n := f"{name}_{i}") not in names)
            )
            names.append(unique)
            result.append(unique)
        return result

    @contextmanager
    def scoring(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        trainer_state: Any,
        width: int,
    ) -> Iterator[Callable[[], Scored]]:
        """Score B completions; inside, `async def` functions go on until the yielded function waits for them.

        Args:
            prompts, completions: B texts or conversations.
            completion_ids: B lists of token ids, unpadded, EOS included.
            columns: the dataset's other columns, B entries each.
            trainer_state: `transformers.TrainerState`.
            width: T, the columns of token rewards.
        Raises:
            TypeError, ValueError: a function gave something else than the contract says; names function and row.
        """
        logs = [Log() for _ in self.funcs]
        shared = {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
        }
        calls = [
            functools.partial(func, **shared, log_extra=log.extra, log_metric=log.metric)
            for func, log in zip(self.funcs, logs, strict=True)
        ]
        with in_background([call for call in calls if is_async(call)]) as awaited:
            given = [None if is_async(call) else call() for call in calls]

            def scored() -> Scored:
                late = iter(awaited())
                outputs = [next(late) if is_async(call) else out for call, out in zip(calls, given, strict=True)]
                return self._scored(outputs, [len(ids) for ids in completion_ids], width, logs)

            yield scored

    def __call__(self, *args: Any, **kwargs: Any) -> Scored:
        """Score B completions and wait; the arguments are those of `scoring`."""
        with self.scoring(*args, **kwargs) as scored:
            return scored()

    def _scored(self, outputs: list[Any], lengths: list[int], width: int, logs: list["Log"]) -> Scored:
        """What the functions returned, checked and combined."""
        rows = [check_output(name, out, lengths) for name, out in zip(self.names, outputs, strict=True)]
        scores = torch.tensor(
            [[math.fsum(x) if isinstance(x, list) else x for x in row] for row in rows], dtype=torch.float32
        ).T
        weights = torch.tensor(self.weights, dtype=torch.float32)
        return Scored(
            per_function=scores,
            combined=(scores.nan_to_num(0.0) * weights).sum(dim=1),
            per_token=place(rows, self.weights, lengths, width) if any_per_token(rows) else None,
            scorable=~scores.isnan().all(dim=1),
            extra=merged(log.columns for log in logs),
            metrics=merged(log.numbers for log in logs),
        )


class Log:
    """What one reward function logs; each has its own, so that the order does not depend on who is faster."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.numbers: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """`log_extra`: one value per completion."""
        self.columns.setdefault(column, []).extend(values)

    def metric(self, name: str, value: float) -> None:
        """`log_metric`."""
        self.numbers.setdefault(name, []).append(float(value))


def merged(logs: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Lists of the same name, one after the other."""
    result: dict[str, list[Any]] = {}
    for log in logs:
        for name, values in log.items():
            result.setdefault(name, []).extend(values)
    return result


def unwrapped(func: RewardFunc) -> RewardFunc:
    """What a `functools.partial`, or several around each other, call."""
    while isinstance(func, functools.partial):
        func = func.func
    return func


def plain_name(func: RewardFunc) -> str:
    """A function's name, or the class of an object that can be called."""
    func = unwrapped(func)
    return getattr(func, "__name__", type(func).__name__)


def describe(thing: Any) -> str:
    return type(thing).__name__ if isinstance(thing, nn.Module) else repr(thing)


def check_weights(weights: Sequence[float] | None, names: list[str]) -> list[float]:
    """One finite weight for each function; 1 each where none are given."""
    if weights is None:
        return [1.0] * len(names)
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise TypeError(f"reward_weights={weights!r} is no list; give one weight for each reward function")
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {len(names)} reward functions ({', '.join(names)}); "
            "give one weight each"
        )
    for weight in weights:
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"reward_weights={weights!r} holds {weight!r}; give finite numbers, 0 to only log")
    return [float(weight) for weight in weights]


def is_async(func: RewardFunc) -> bool:
    """Whether calling it gives a coroutine; objects with an async `__call__` included."""
    func = unwrapped(func)
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def check_output(name: str, output: Any, lengths: list[int]) -> list[float | list[float]]:
    """A reward function's output with NaN for None; anything else than numbers is an error.

    Args:
        name: the function, for the error.
        lengths: tokens of each completion.
    """
    if isinstance(output, Tensor | np.ndarray):
        output = output.tolist()
    is_list = isinstance(output, Sequence)
    if not is_list or isinstance(output, str):
        raise TypeError(f"reward function {name!r} returned {type(output).__name__}; return a list of numbers")
    values = list(output)
    if len(values) != len(lengths):
        raise ValueError(
            f"reward function {name!r} returned {len(values)} rewards for {len(lengths)} completions; return one each"
        )
    return [check_reward(name, row, value, lengths[row]) for row, value in enumerate(values)]


def check_reward(name: str, row: int, value: Any, length: int) -> float | list[float]:
    """One reward as a float, or as a list of them with one per token."""
    if value is None:
        return math.nan
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != length:
            raise ValueError(
                f"reward function {name!r}, row {row}: {len(value)} token rewards for {length} completion tokens; "
                "return one per entry of completion_ids"
            )
        return [check_number(name, row, x) for x in value]
    return check_number(name, row, value)


def check_number(name: str, row: int, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"reward function {name!r}, row {row}: {value!r} is not a number; return a float or None")
    if not abs(float(value)) <= torch.finfo(torch.float32).max:
        raise ValueError(f"reward function {name!r}, row {row}: {value} is not finite; return None to skip a row")
    return float(value)


def any_per_token(rows: list[list[float | list[float]]]) -> bool:
    return any(isinstance(value, list) for row in rows for value in row)


def place(rows: list[list[float | list[float]]], weights: list[float], lengths: list[int], width: int) -> Tensor:
    """(B, T) weighted rewards: token rewards on their tokens, scores on the last one."""
    placed = torch.zeros(len(lengths), width)
    for values, weight in zip(rows, weights, strict=True):
        for row, value in enumerate(values):
            if isinstance(value, list):
                placed[row, : lengths[row]] += weight * torch.tensor(value)
            elif not math.isnan(value):
                placed[row, lengths[row] - 1] += weight * value
    return placed
