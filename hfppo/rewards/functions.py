"""Call reward functions, combine their scores, and place them on tokens."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import fsum, isfinite, isnan
from typing import Any

import torch
from torch import Tensor

from hfppo.rewards.reward_func import Log, Numbers, RewardBatch, call_func, check_output, is_async, plain_name
from hfppo.sample import Ended, Sample
from hfppo.support.calls import schedule, wait_briefly


class RewardFunctions:
    """Several reward functions and their weights.

    Args:
        penalty: subtracted from the score of a completion that a limit of tokens ended.
    Raises:
        ValueError: no function, or a number of weights that differs from theirs.
    """

    def __init__(self, funcs: Sequence[Any], weights: Sequence[float] | None = None, penalty: float | None = None):
        self.funcs, self.penalty = list(funcs), penalty or 0.0
        if not self.funcs:
            raise ValueError(
                "reward_funcs is empty; give at least one function. None is for tools, for environments, and for a "
                "ref_model with a kl_coef or kl_loss_coef above 0: docs/distillation.md"
            )
        self.names = number_repeated_names([plain_name(func) for func in self.funcs])  # names in metrics and errors
        self.weights = check_weights(weights, self.names)

    def start(self, batch: RewardBatch) -> "PendingScores":
        """Call the functions. Plain ones return first; asynchronous ones continue in the background."""
        pending = PendingScores(self, batch, [Future() for _ in self.funcs], [Log() for _ in self.funcs])
        # Asynchronous functions are called first, so that they run during the plain ones.
        for i in sorted(range(len(self.funcs)), key=lambda i: not is_async(self.funcs[i])):
            # Every output is scheduled: a decorator may hide that a function is asynchronous.
            pending.outputs[i] = schedule(call_func(self.funcs[i], batch, pending.logs[i]))
        return pending

    def __call__(self, batch: RewardBatch) -> Numbers:
        """Score a batch; see `PendingScores.result`."""
        with self.start(batch) as pending:
            return pending.result()

    def write(self, outputs: list[object], batch: RewardBatch, logs: list[Log]) -> Numbers:
        """Check the outputs of the functions, and write scores and rewards on the samples."""
        lengths = [len(ids) for ids in batch.completion_ids]
        by_name = dict(zip(self.names, logs, strict=True))
        columns = columns_of(by_name, len(lengths))
        by_function = [check_output(*given, lengths) for given in zip(self.names, outputs, strict=True)]
        for i, sample in enumerate(batch.samples):
            sample.scores = {name: rewards[i] for name, rewards in zip(self.names, by_function, strict=True)}
            sample.extra = {name: column[i] for name, column in columns.items()}
            sample.fallbacks = {name: log.failed[i] for name, log in by_name.items() if log.failed is not None}
        weights, scores = torch.tensor(self.weights, dtype=torch.float32), score_table(batch.samples)
        cut = torch.tensor([sample.ended is Ended.CUT for sample in batch.samples], dtype=torch.float32)
        totals = (scores.nan_to_num(0.0) * weights).sum(dim=1) - self.penalty * cut
        scored = (~scores.isnan() & (weights != 0)).any(dim=1)
        for row, sample in enumerate(batch.samples):
            sample.score, sample.scored = float(totals[row]), bool(scored[row]) and not sample.failed
            sample.token_rewards = self.place(sample, row)
        numbers: Numbers = {}
        for log in logs:
            for name, values in log.numbers.items():
                numbers.setdefault(name, []).extend(values)
        return numbers

    def place(self, sample: Sample, row: int) -> list[float]:
        """Return the rewards of a sample by token: token rewards on their tokens, everything else on the last.

        Args:
            row: the sample's place in its batch, for errors.
        Raises:
            ValueError: a reward for a token that the policy did not sample.
        """
        rewards = [0.0] * len(sample.ids)
        by_token = {name: values for name, values in sample.scores.items() if isinstance(values, list)}
        if not by_token:
            rewards[sample.last_sampled] = sample.score
            return rewards
        weights = dict(zip(self.names, self.weights, strict=True))
        for name, values in by_token.items():
            lost = next((t for t, x in enumerate(values) if x and not sample.sampled[t]), None)
            if lost is not None:
                raise ValueError(
                    f"reward function {name!r}, row {row}: a reward for token {lost}, which a tool or environment "
                    "wrote; give it to a token that the model wrote"
                )
            rewards = [reward + weights[name] * x for reward, x in zip(rewards, values, strict=True)]
        others = (weights[name] * x for name, x in sample.scores.items() if not isinstance(x, list) and not isnan(x))
        rewards[sample.last_sampled] += sum(others) - self.penalty * (sample.ended is Ended.CUT)
        return rewards


@dataclass(frozen=True)
class PendingScores:
    """Scores that asynchronous functions may still compute; leaving the `with` block by an error cancels them."""

    rewards: RewardFunctions
    batch: RewardBatch
    outputs: list[Future]
    logs: list[Log]

    def __enter__(self) -> "PendingScores":
        return self

    def __exit__(self, *error: Any) -> None:
        for output in self.outputs:
            output.cancel()

    def result(self) -> Numbers:
        """Wait for all functions, write their scores on the samples, and return the numbers of log_metric by name.

        The first error is raised without waiting for the other functions.

        Raises:
            TypeError, ValueError: an output breaks the contract.
        """
        for finished in wait_briefly(self.outputs):
            finished.result()
        return self.rewards.write([output.result() for output in self.outputs], self.batch, self.logs)


def columns_of(logs: dict[str, Log], rows: int) -> dict[str, list[object]]:
    """Return the columns of all logs; where two functions use one name, the function's name is added.

    Raises:
        ValueError: a column has more or fewer values than there are completions.
    """
    uses = Counter(column for log in logs.values() for column in log.columns)
    columns = {}
    for name, log in logs.items():
        for column, values in log.columns.items():
            if len(values) != rows:
                raise ValueError(
                    f"reward function {name!r} passed {len(values)} values for {rows} completions to log_extra as "
                    f"{column!r}; pass one each"
                )
            columns[column if uses[column] == 1 else f"{column} ({name})"] = values
    return columns


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
    if not any(weights) or not all(map(isfinite, weights)):
        raise ValueError(f"reward_weights={weights!r}: give finite numbers, 0 to only log, and at least one other")
    return weights


def score_table(samples: Sequence[Sample]) -> Tensor:
    """Return the scores of B samples by F functions, (B, F) float32; NaN where a function is left out."""
    rows = [[fsum(x) if isinstance(x, list) else x for x in sample.scores.values()] for sample in samples]
    return torch.tensor(rows, dtype=torch.float32)
