"""Reward functions that may fail for some rows: skip or replace those rows, and limit their share."""

import functools
import logging
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from hfppo.rewards.reward_func import (
    Log,
    Private,
    RewardWrapper,
    check_reward,
    columns_of,
    copy_values,
    is_async,
    merge_logs,
    plain_name,
    rows_of,
    with_private,
)
from hfppo.support.calls import awaited_within, finish_within

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward function failed for more rows than `max_failed` allows; its cause is the first failure."""


@dataclass(frozen=True)
class CallResult:
    """The outcome of one call: a reward or an exception for each row, and the log."""

    rewards: list[Any]
    log: Log


@dataclass(frozen=True)
class TolerantReward(RewardWrapper):
    """A reward function that may fail for some rows, as a reward function.

    A row fails if its reward is not finite, not a number, or has the wrong number of token rewards. If the whole call
    fails (an exception, the time limit, a wrong type or count), the function is called again for each row alone, and
    only the rows that fail again are lost. So the reward of a row must not depend on the other rows.

    Args:
        func: a plain or `async def` function, a `RewardServer` or `RewardModel`, or the address, id or path of one.
        on_error: "skip" leaves the function out for the row, as None does; a number is the row's reward; "raise" ends
            the run at the first failure.
        timeout: seconds that a call may take, for all rows or for one; None for no limit.
        max_failed: share of a call's rows that may fail, rounded up to whole rows; more end the run.

    Raises:
        ValueError: an argument outside its range.
    """

    func: Any
    on_error: Literal["skip", "raise"] | float = "skip"
    timeout: float | None = None
    max_failed: float = 0.1

    def __post_init__(self) -> None:
        number = isinstance(self.on_error, Real) and math.isfinite(self.on_error)
        if not number and self.on_error not in ("skip", "raise"):
            raise ValueError(f"on_error={self.on_error!r} must be 'skip', 'raise' or a finite number")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout={self.timeout} must be above 0 seconds, or None")
        if not 0 <= self.max_failed <= 1:
            raise ValueError(f"max_failed={self.max_failed} must be in [0, 1]")

    @property
    def name(self) -> str:
        """The name in metrics and errors."""
        return plain_name(self.func)

    def __call__(self, /, **arguments: Any) -> Any:
        """Return the rewards, or a coroutine of them if the function is asynchronous.

        Raises:
            RewardError: more rows failed than `max_failed` allows.
        """
        return self.call_privately(Private(), **arguments)

    def call_privately(self, private: Private, /, **arguments: Any) -> Any:
        """See `Private` and `__call__`."""
        scoring = self._score(private, **arguments)
        return scoring if is_async(self.func) else run_without_waiting(scoring)

    async def _score(
        self, private: Private, /, log_extra: Any = None, log_metric: Any = None, **columns: Any
    ) -> list[Any]:
        # A plain function never suspends this coroutine, so `run_without_waiting` can run it to its end.
        try:
            scores = await self._call(columns, private, 0, len(columns["completions"]))
        except Exception as error:
            if self.on_error == "raise":
                raise
            scores = await self._row_by_row(columns, private, error)
        self._check_share(scores.rewards, len(scores.rewards))
        failed = [isinstance(reward, Exception) for reward in scores.rewards]
        if any(failed):
            self._warn(scores.rewards, failed)
        for column, values in scores.log.columns.items() if log_extra else ():
            log_extra(column, values)
        for metric, numbers in scores.log.numbers.items() if log_metric else ():
            for number in numbers:
                log_metric(metric, number)
        if private.log_failures:
            private.log_failures(failed)
        fallback = None if self.on_error == "skip" else self.on_error
        return [fallback if lost else reward for lost, reward in zip(failed, scores.rewards, strict=True)]

    async def _row_by_row(self, columns: dict[str, Any], private: Private, error: Exception) -> CallResult:
        """Call the function for each row alone, until more rows have failed than may."""
        logger.warning("reward function %r failed and is called again for each row: %r", self.name, error)
        rewards: list[Any] = []
        logs: list[Log] = []
        for row in range(len(columns["completions"])):
            try:
                scores = await self._call(columns, private, row, row + 1)
            except Exception as failure:
                scores = CallResult([failure], Log())
            rewards += scores.rewards
            logs.append(scores.log)
            columns_of({self.name: scores.log}, 1)  # refuses a column without exactly one value for this row
            self._check_share(rewards, len(columns["completions"]))
        log = Log()
        for column in dict.fromkeys(name for one in logs for name in one.columns):
            log.extra(column, [one.columns.get(column, [None])[0] for one in logs])
        log.numbers = merge_logs(one.numbers for one in logs)
        return CallResult(rewards, log)

    async def _call(self, columns: dict[str, Any], private: Private, start: int, stop: int) -> CallResult:
        """Call the function once for the rows from start to stop; lists among the columns have one entry per row."""
        log = Log()
        # Copies: a call that fails may have changed its arguments.
        some = {
            name: copy_values(rows[start:stop]) if isinstance(rows, list) else rows for name, rows in columns.items()
        }
        lengths = [len(ids) for ids in columns["completion_ids"][start:stop]]
        given = rows_of(self.name, await self._answer(some, private.rows(slice(start, stop)), log), lengths)
        rewards: list[Any] = []
        for row, (reward, length) in enumerate(zip(given, lengths, strict=True), start):
            try:
                check_reward(self.name, row, reward, length)
                rewards.append(reward)
            except (TypeError, ValueError) as error:
                if self.on_error == "raise":
                    raise
                rewards.append(error)
        return CallResult(rewards, log)

    async def _answer(self, columns: dict[str, Any], private: Private, log: Log) -> Any:
        """Return the function's output, or raise a TimeoutError after `timeout` seconds."""
        late = f"reward function {self.name!r} gave no answer within {self.timeout} s; raise timeout, or correct it"
        func = with_private(self.func, private)
        call = functools.partial(func, **columns, log_extra=log.extra, log_metric=log.metric)
        if not is_async(self.func):
            return finish_within(self.timeout, late, call)
        return await awaited_within(self.timeout, late, call())

    def _check_share(self, rewards: list[Any], rows: int) -> None:
        """End the run if more rows than allowed have failed so far."""
        failures = [reward for reward in rewards if isinstance(reward, Exception)]
        if len(failures) > (allowed := math.ceil(self.max_failed * rows)):
            raise RewardError(
                f"reward function {self.name!r} failed for more than {allowed} of {rows} completions, which is what "
                f"max_failed={self.max_failed} allows; the first: {failures[0]!r}"
            ) from failures[0]

    def _warn(self, rewards: list[Any], failed: list[bool]) -> None:
        """Log the number of failed rows and the first failure."""
        first = failed.index(True)
        logger.warning(
            "reward function %r failed for %d of %d completions; the first is row %d: %r",
            self.name,
            sum(failed),
            len(failed),
            first,
            rewards[first],
        )


def run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a plain reward function returned an awaitable; write it as async def")
