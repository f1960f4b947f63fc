"""The name of every metric, and sums and counts over micro-batches and ranks, divided once.

A new metric has its name here. Functions in collect/rollout_metrics.py measure rollouts and evaluations, those in
learn/loss.py updates. No metric averages over padding.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hfppo.functional.shape_checks import require_same_shape

# Every metric, by the way in which its parts become one number; docs/metrics.md says what each means.
MEANS = (
    "loss", "loss/{name}", "custom/{name}",
    "reward", "rlhf_reward", "rewards/{function}/mean", "rewards/{function}/failed", "frac_reward_zero_std",
    "unscorable_frac", "completions/mean_length", "completions/truncated_frac", "completions/mean_context_length",
    "candidates/chosen", "candidates/passed_over", "candidates/signal_chosen", "candidates/signal_uniform",
    "candidates/spread", "candidates/completions",
    "turns/mean", "turns/reward", "turns/cut_frac", "turns/unfinished_frac", "turns/dropped_result_frac",
    "tools/call_frequency", "tools/failure_frequency", "tools/unknown_frac", "tools/timeout_frac",
    "tools/malformed_frac", "agent/failed_frac", "agent/conversations",
    "kl", "kl_k3", "advantage_mean",
    "value/mean", "value/return", "value/explained_variance", "value/explained_variance_{third}",
    "value/turn_explained_variance", "value/outside_frac", "value/loss", "value/ratio_mean", "value/rejected_frac",
    "value/grad_norm", "critic_pretraining/loss", "critic_pretraining/r2",
    "policy/loss", "policy/kl_loss", "policy/entropy", "policy/approx_kl", "policy/ratio",
    "policy/first_ratio_deviation_mean", "policy/clip_frac", "policy/clip_frac_low", "policy/clip_frac_high",
    "policy/dual_clip_frac",
    "mismatch/mean", "mismatch/kl", "mismatch/weight_mean", "mismatch/ess", "mismatch/cut_frac",
    "ahead/age", "time/trainer_waited", "time/sampler_waited", "time/candidates", "time/rollout", "time/generation",
    "time/environments", "time/passes", "time/rewards", "time/update", "time/update_tflops", "time/tokens_per_second",
)  # fmt: skip
DEVIATIONS = ("reward_std", "rewards/{function}/std", "advantage_std", "value/std", "value/return_std")
MAXIMA = (
    "completions/max_length", "turns/max", "policy/ratio_max", "policy/first_ratio_deviation", "mismatch/max",
    "mismatch/weight_max",
)  # fmt: skip
LAST = (
    "kl_coef", "learning_rate", "critic_learning_rate", "critic_pretraining/epoch", "candidates/explained",
    "clip/{part}/frac", "clip/{part}/frac_low", "clip/{part}/frac_high", "clip/{part}/frac_dual", "clip/{part}/ratio",
    "clip/{part}/approx_kl", "clip/learning_rate_factor",
)  # fmt: skip
METRICS = {
    **dict.fromkeys(MEANS, "mean"),
    **dict.fromkeys(DEVIATIONS, "std"),
    **dict.fromkeys(MAXIMA, "max"),
    **dict.fromkeys(LAST, "last"),
    "time/straggler": "lag",  # of the slowest process behind the mean
}

# Parts by the name of the metric, each (4,) float64 as `parts` returns them.
Measures = dict[str, Tensor]
# The same as numbers, added up over micro-batches, steps or processes.
Sums = dict[str, list[float]]


def parts(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return count, sum, sum of squares and maximum of numbers, (4,) float64, without making the device wait.

    Args:
        values: any shape; with `mask`, a bool of that shape, only the entries where it is True.
    """
    if mask is not None:
        require_same_shape(values=values, mask=mask)
    # In float64: the deviation of equal numbers is the small difference of two large ones. MPS has no float64.
    x = values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
    given = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    largest = x.where(given, -math.inf).amax() if x.numel() else x.new_tensor(-math.inf)
    x = x.where(given, 0.0)
    return torch.stack([given.sum(dtype=x.dtype), x.sum(), x.square().sum(), largest])


def parts_of(number: float) -> Tensor:
    """Return the parts of one number."""
    return parts(torch.tensor([number], dtype=torch.float64))


@cache
def reduction_of(name: str) -> str:
    """Return how the parts of a metric become one number.

    Args:
        name: a key of `METRICS`, with a name for the part in braces, if any.
    Raises:
        ValueError: there is no such metric.
    """
    if name in METRICS:
        return METRICS[name]
    for pattern, reduction in METRICS.items():
        before, brace, after = pattern.partition("{")
        if brace and name.startswith(before) and name.endswith(after.partition("}")[2]):
            return reduction
    raise ValueError(f"{name!r} is not a metric; use 'custom/{name}'")


class Meter:
    """Adds up the measures of one process until they are read, once, for all processes."""

    def __init__(self, measures: Measures | None = None) -> None:
        self._sums: Sums = {}
        self._pending: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
        self.update(measures or {})

    def update(self, measures: Measures) -> None:
        """Add measures; they stay on their device until they are needed."""
        for name, x in measures.items():
            reduction_of(name)  # an unknown name is an error where it is measured
            self._pending[x.device].append((name, x))

    def read(self) -> dict[str, float]:
        """Return every metric over all processes, and reset. A collective call: every process must make it."""
        return values_of(self.gather())

    def gather(self) -> Sums:
        """Return the parts of every metric over all processes, and reset. A collective call."""
        states = gather_object([self.state_dict()])
        self._sums = {}
        return merge(states)

    def state_dict(self) -> Sums:
        """Return the metrics that are not read yet, as plain numbers."""
        for pending in self._pending.values():
            together = torch.stack([x for _, x in pending]).tolist()  # the one wait of a device
            self._sums = merge([self._sums, *({name: x} for (name, _), x in zip(pending, together, strict=True))])
        self._pending.clear()
        return self._sums

    def load_state_dict(self, state: Sums) -> None:
        """Continue from the metrics that `state_dict` returned."""
        self._pending.clear()
        self._sums = state


def merge(each: Iterable[Sums]) -> Sums:
    """Return the parts of several processes or steps together; of a "last" metric those of the last one."""
    merged: Sums = {}
    for sums in each:
        for name, new in sums.items():
            if name in merged and reduction_of(name) != "last":
                *totals, largest = merged[name]
                totals = [before + more for before, more in zip(totals, new, strict=False)]
                new = [*totals, new[3] if math.isnan(new[3]) else max(largest, new[3])]
            merged[name] = new
    return merged


def values_of(sums: Sums) -> dict[str, float]:
    """Return the metrics that have a part, each by its reduction."""
    return {name: reduced(reduction_of(name), *x) for name, x in sums.items() if x[0]}


def reduced(reduction: str, count: float, total: float, squares: float, largest: float) -> float:
    """Return a metric from its parts."""
    mean = total / count
    if reduction == "max":
        return largest
    if reduction == "lag":
        return largest - mean
    return math.sqrt(max(squares / count - mean**2, 0.0)) if reduction == "std" else mean


@dataclass(frozen=True)
class UpdateStep:
    """One optimizer step on a rollout."""

    epoch: int  # PPO epoch, from 0
    mini_batch: int  # number within the epoch, from 0
    sums: Sums  # over all processes

    @property
    def metrics(self) -> dict[str, float]:
        """The step's metrics over all processes, by the names of METRICS."""
        return values_of(self.sums)


def metrics_of(steps: Iterable[UpdateStep]) -> dict[str, float]:
    """Return the metrics of several steps together: each counts by its tokens."""
    return values_of(merge(step.sums for step in steps))
