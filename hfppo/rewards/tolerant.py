"""Reward functions that may fail for some rows: skip or replace those rows, and limit their share."""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Literal

from hfppo.rewards.reward_func import Log, RewardBatch, RewardWrapper, call_func, check_reward, is_async, rows_of
from hfppo.support.calls import call_in_thread, finish_within

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward function failed for more rows than `max_failed` allows; its cause is the first failure."""


@dataclass(frozen=True)
class TolerantReward(RewardWrapper):
    """A reward function that may fail for some rows.

    A row fails if its reward is not finite, not a number, or has the wrong number of token rewards. If the whole call
    fails (an exception, the time limit, a wrong type or count), the function is called again for each row, and only
    the rows that fail again are lost. So the reward of a row must not depend on the other rows.

    Args:
        func: a plain or `async def` function, a `RewardServer` or `RewardModel`, or the address, id or path of one.
        on_error: "skip" leaves the function out for the row, as None does; a number is the row's reward.
        timeout: seconds that a call may take, for all rows or for one; None for no limit.
        max_failed: share of a call's rows that may fail, rounded up to whole rows; if more fail, the run ends.

    Raises:
        ValueError: an argument outside its range.
    """

    func: Any
    on_error: Literal["skip"] | float = "skip"
    timeout: float | None = None
    max_failed: float = 0.1

    def __post_init__(self) -> None:
        if self.on_error != "skip" and not (isinstance(self.on_error, Real) and math.isfinite(self.on_error)):
            raise ValueError(f"on_error={self.on_error!r} must be 'skip' or a finite number")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout={self.timeout} must be above 0 seconds, or None")
        if not 0 <= self.max_failed <= 1:
            raise ValueError(f"max_failed={self.max_failed} must be in [0, 1]")

    def score_batch(self, batch: RewardBatch, log: Log) -> object:
        """Return the rewards, or a coroutine of them if the function is asynchronous.

        Raises:
            RewardError: more rows failed than `max_failed` allows.
        """
        score = partial(self._score, batch, log)
        return call_in_thread(score) if is_async(self.func) else score()

    def _score(self, batch: RewardBatch, log: Log) -> list[object]:
        try:
            rewards = self._call(batch, log)
        except Exception as error:
            log.columns, log.numbers = {}, {}
            rewards = self._row_by_row(batch, error)
        self._check_share(rewards, len(batch.samples))
        log.failed = [isinstance(reward, Exception) for reward in rewards]
        if any(log.failed):
            count, first = sum(log.failed), log.failed.index(True)
            where = f"failed for {count} of {len(log.failed)} completions; the first is row {first}"
            logger.warning("reward function %r %s: %r", self.name, where, rewards[first])
        fallback = None if self.on_error == "skip" else self.on_error
        return [fallback if lost else reward for lost, reward in zip(log.failed, rewards, strict=True)]

    def _row_by_row(self, batch: RewardBatch, error: Exception) -> list[object]:
        """Call the function for each row, until more rows have failed than may. These calls log nothing."""
        logger.warning("reward function %r failed and is called again for each row: %r", self.name, error)
        rewards: list[object] = []
        for row, sample in enumerate(batch.samples):
            try:
                rewards += self._call(replace(batch, samples=[sample]), Log(), row)
            except Exception as failure:
                rewards.append(failure)
            self._check_share(rewards, len(batch.samples))
        return rewards

    def _call(self, batch: RewardBatch, log: Log, first: int = 0) -> list[object]:
        """Call the function once, and return a reward or an error for each row; errors number the rows from `first`.

        Raises:
            TimeoutError: it took longer than `timeout`.
        """
        late = f"reward function {self.name!r} gave no answer within {self.timeout} s; raise timeout, or correct it"
        output = finish_within(self.timeout, late, partial(call_func, self.func, batch, log))
        lengths = [len(ids) for ids in batch.completion_ids]
        rewards = rows_of(self.name, output, lengths)
        for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            try:
                check_reward(self.name, first + row, reward, length)
            except (TypeError, ValueError) as error:
                rewards[row] = error
        return rewards

    def _check_share(self, rewards: list[object], rows: int) -> None:
        """Raise if more rows than allowed have failed so far."""
        failures = [reward for reward in rewards if isinstance(reward, Exception)]
        if len(failures) > (allowed := math.ceil(self.max_failed * rows)):
            raise RewardError(
                f"reward function {self.name!r} failed for more than {allowed} of {rows} completions, which is "
                f"what max_failed={self.max_failed} allows; the first: {failures[0]!r}"
            ) from failures[0]
