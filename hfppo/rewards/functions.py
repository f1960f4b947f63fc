"""Call reward functions, combine their scores, and place them on tokens."""

import inspect
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hfppo.functional.kl import last_real_index
from hfppo.rewards.reward_func import (
    BatchReward,
    Log,
    RewardBatch,
    call_func,
    check_output,
    columns_of,
    is_async,
    merge_logs,
    plain_name,
)
from hfppo.support.calls import schedule, wait_briefly


@dataclass(frozen=True)
class Scored:
    """Scores of B completions by F reward functions."""

    per_function: Tensor  # (B, F) float32, NaN where a function is left out
    combined: Tensor  # (B,) float32, the weighted sum; 0 where no function scores
    per_token: Tensor | None  # (B, T) float32, `combined` by token; None: it belongs to the last token
    scorable: Tensor  # (B,) bool, False where every function that counts is left out, or the episode failed
    extra: dict[str, list[object]] = field(default_factory=dict)  # columns from log_extra
    metrics: dict[str, list[float]] = field(default_factory=dict)  # numbers from log_metric
    failed: dict[str, list[bool]] = field(default_factory=dict)  # rows with a fallback reward, by function

    def at(self, rows: Tensor) -> "Scored":
        """Return some rows, (N,); `metrics` stay those of all."""
        return Scored(
            self.per_function[rows],
            self.combined[rows],
            None if self.per_token is None else self.per_token[rows],
            self.scorable[rows],
            {name: [column[i] for i in rows.tolist()] for name, column in self.extra.items()},
            self.metrics,
            {name: [column[i] for i in rows.tolist()] for name, column in self.failed.items()},
        )


class RewardFunctions:
    """Several reward functions and their weights.

    Raises:
        TypeError: a function cannot be called.
        ValueError: no function, or a number of weights that differs from theirs.
    """

    def __init__(self, funcs: Sequence[Any], weights: Sequence[float] | None = None):
        self.funcs = list(funcs)
        if not self.funcs:
            raise ValueError(
                "reward_funcs is empty; give at least one function. None is for tools, for environments, and for a "
                "ref_model with a kl_coef or kl_loss_coef above 0: docs/distillation.md"
            )
        for func in self.funcs:
            if not callable(func) and not isinstance(func, BatchReward):
                raise TypeError(f"reward_funcs has {func!r}, which is not a function; give Python functions")
        self.names = number_repeated_names([plain_name(func) for func in self.funcs])  # names in metrics and errors
        self.weights = check_weights(weights, self.names)

    def start(self, batch: RewardBatch) -> "PendingScores":
        """Call the functions. Plain ones return first; asynchronous ones continue in the background."""
        pending = PendingScores(self, batch, [None] * len(self.funcs), [Log() for _ in self.funcs])
        try:
            # Asynchronous functions are called first, so that they run during the plain ones.
            for i in sorted(range(len(self.funcs)), key=lambda i: not is_async(self.funcs[i])):
                output = call_func(self.funcs[i], batch, pending.logs[i])
                # A decorator may hide that a function is asynchronous.
                pending.outputs[i] = schedule(output) if inspect.isawaitable(output) else output
        except BaseException:
            pending.__exit__()
            raise
        return pending

    def __call__(self, batch: RewardBatch) -> Scored:
        """Score a batch.

        Raises:
            TypeError, ValueError: an output breaks the contract.
        """
        with self.start(batch) as pending:
            return pending.result()

    def combine(self, outputs: list[object], batch: RewardBatch, logs: list[Log]) -> Scored:
        """Check and combine the outputs of the functions."""
        lengths = [len(ids) for ids in batch.completion_ids]
        rows = [check_output(name, out, lengths) for name, out in zip(self.names, outputs, strict=True)]
        scores = torch.tensor(
            [[math.fsum(x) if isinstance(x, list) else x for x in row] for row in rows], dtype=torch.float32
        ).T
        weights = torch.tensor(self.weights, dtype=torch.float32)
        per_token = any(isinstance(value, list) for row in rows for value in row)
        failed = torch.tensor([episode.failed for episode in batch.episodes] or [False])
        return Scored(
            per_function=scores,
            combined=(scores.nan_to_num(0.0) * weights).sum(dim=1),
            per_token=place_on_tokens(rows, self.names, self.weights, batch.mask) if per_token else None,
            scorable=(~scores.isnan() & (weights != 0)).any(dim=1) & ~failed,
            extra=columns_of(dict(zip(self.names, logs, strict=True)), len(lengths)),
            metrics=merge_logs(log.numbers for log in logs),
            failed={n: log.failed for n, log in zip(self.names, logs, strict=True) if log.failed is not None},
        )


@dataclass(frozen=True)
class PendingScores:
    """Scores that asynchronous functions may still compute; leaving the `with` block by an error cancels them."""

    rewards: RewardFunctions
    batch: RewardBatch
    outputs: list[object]  # a Future for each asynchronous function
    logs: list[Log]

    def __enter__(self) -> "PendingScores":
        return self

    def __exit__(self, *error: Any) -> None:
        for output in self.outputs:
            if isinstance(output, Future):
                output.cancel()

    def result(self) -> Scored:
        """Wait for all functions and combine their scores; the first error is raised without waiting for the rest.

        Raises:
            TypeError, ValueError: an output breaks the contract.
        """
        running = [output for output in self.outputs if isinstance(output, Future)]
        for finished in wait_briefly(running):
            finished.result()
        outputs = [output.result() if isinstance(output, Future) else output for output in self.outputs]
        return self.rewards.combine(outputs, self.batch, self.logs)


def number_repeated_names(names: list[str]) -> list[str]:
    """Number the names that are not unique."""
    return [name if names.count(name) == 1 else f"{name}_{names[: i + 1].count(name)}" for i, name in enumerate(names)]


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
        ValueError: a reward for a token that the policy did not sample.
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
                        f"reward function {name!r}, row {row}: a reward for token {int(lost[0])}, which a tool or "
                        "environment wrote; give it to a token that the model wrote"
                    )
                placed[row, : len(value)] += weight * rewards
            elif not math.isnan(value):
                placed[row, last[row]] += weight * value
    return placed
