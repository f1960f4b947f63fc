"""Metrics: sums and counts over micro-batches and ranks, divided once. No metric averages over padding."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hfppo.functional.shape_checks import require_same_shape

# Every metric: how its parts become one number, and what it means. `docs/reference.md` is made from this table.
METRICS: dict[str, tuple[str, str]] = {
    "loss": ("mean", "The scalar that an optimizer step minimizes."),
    "reward": ("mean", "Score of a completion: weighted sum of the reward functions, penalties included."),
    "reward_std": ("std", "Standard deviation of the score over the rollout's completions."),
    "rlhf_reward": ("mean", "Sum of a completion's token rewards, KL penalty included (TRL: objective/rlhf_reward)."),
    "rewards/{function}/mean": ("mean", "What one reward function gives, over the completions that it scores."),
    "rewards/{function}/std": ("std", "Standard deviation of the same."),
    "frac_reward_zero_std": (
        "mean",
        "Share of prompts whose completions all score alike, or count in no loss; with num_generations above 1.",
    ),
    "rewards/{function}/failed": ("mean", "Share of completions for which a TolerantReward failed."),
    "unscorable_frac": ("mean", "Share of completions for which every reward function with a weight returned None."),
    "completions/mean_length": ("mean", "Tokens of a completion, EOS included."),
    "completions/max_length": ("max", "Tokens of the longest completion."),
    "completions/truncated_frac": ("mean", "Share of completions that a limit ended; see also `turns/…_frac`."),
    "completions/mean_context_length": ("mean", "Tokens of tools and environments in a completion."),
    "turns/mean": ("mean", "Turns of the model in a completion, with tools or environments."),
    "turns/max": ("max", "Turns of the longest completion."),
    "turns/reward": ("mean", "Reward of a turn that got one from a tool or an environment."),
    "turns/cut_frac": ("mean", "Share of completions that max_completion_length cut within a turn."),
    "turns/unfinished_frac": (
        "mean",
        "Share of completions that max_tool_calling_iterations or the environment cut after a turn.",
    ),
    "turns/dropped_result_frac": (
        "mean",
        "Share of completions that ended because an answer did not fit into max_completion_length.",
    ),
    "tools/call_frequency": ("mean", "Tool calls per completion (TRL)."),
    "tools/failure_frequency": ("mean", "Share of tool calls that failed (TRL)."),
    "tools/unknown_frac": ("mean", "Share of tool calls that name no tool."),
    "tools/timeout_frac": ("mean", "Share of tool calls that took longer than tool_timeout."),
    "tools/malformed_frac": ("mean", "Share of turns with a tool call that could not be read."),
    "kl": ("mean", "KL of π_old to the reference per token, nats, by `kl_estimator`; k1 may be negative."),
    "kl_k3": ("mean", "The same by k3, which is never negative, nats per token."),
    "kl_coef": ("last", "β with which the rollout was collected."),
    "advantage_mean": ("mean", "The advantage per token before whitening; with a critic and one λ, return − value."),
    "advantage_std": ("std", "Standard deviation of the advantage per token before whitening."),
    "value/mean": ("mean", "The critic's value per token at the start of the update."),
    "value/std": ("std", "Standard deviation of the same."),
    "value/return": ("mean", "The return per token that the values are fitted to."),
    "value/return_std": ("std", "Standard deviation of the same."),
    "value/explained_variance": (
        "mean",
        "1 − Var(R − V)/Var(R) over the rollout: 1 perfect, 0 no better than constant.",
    ),
    "value/turn_explained_variance": ("mean", "The same over the first tokens of turns: the critic's view of states."),
    "value/loss": ("mean", "½·squared error of the value per token, clipped."),
    "value/clip_frac": ("mean", "Share of tokens whose value is held by the clip."),
    "value/grad_norm": ("mean", "Gradient norm of the critic before clipping."),
    "critic_learning_rate": ("last", "Learning rate of the critic."),
    "critic_pretraining/epoch": ("last", "Epochs of critic pretraining that are done."),
    "critic_pretraining/loss": (
        "mean",
        "½·squared error of the value per token, over an epoch of its pretraining.",
    ),
    "critic_pretraining/r2": (
        "mean",
        "R² = 1 − mean (V − R)²/Var(R) on the held-out completions of critic pretraining.",
    ),
    "critic_pretraining/r2_start": ("mean", "The same over the first third of each completion."),
    "critic_pretraining/r2_middle": ("mean", "The same over the second third."),
    "critic_pretraining/r2_end": ("mean", "The same over the last third."),
    "policy/loss": ("mean", "The policy surrogate per token, without KL and entropy terms."),
    "policy/clip_frac": ("mean", "Share of tokens on which the policy clip is active."),
    "policy/clip_frac_low": ("mean", "Share of tokens with A < 0 and a ratio below 1 − ε_low."),
    "policy/clip_frac_high": ("mean", "Share of tokens with A > 0 and a ratio above 1 + ε_high."),
    "policy/dual_clip_frac": ("mean", "Share of tokens on which the dual clip holds."),
    "policy/approx_kl": ("mean", "KL of π_old to π_θ per token by k3, nats: how far the update has moved."),
    "policy/ratio": ("mean", "π_θ/π_old per token."),
    "policy/ratio_max": ("max", "The largest π_θ/π_old."),
    "policy/first_ratio_deviation": (
        "max",
        "Largest |π_θ/π_old − 1| on a rollout's first mini-batch; must be about 0.",
    ),
    "policy/entropy": ("mean", "Entropy of π_θ per token at the sampling temperature, nats."),
    "policy/kl_loss": (
        "mean",
        "KL of π_θ to the reference per token by `kl_loss_estimator`, nats; with kl_loss_coef.",
    ),
    "loss/{name}": ("mean", "A loss term that a subclass adds in `loss_terms`, per token."),
    "mismatch/mean": ("mean", "|log π_old − log π_rollout| per token, nats: sampler against training model."),
    "mismatch/max": ("max", "The largest of the same."),
    "mismatch/weight_mean": ("mean", "Weight of the policy loss, π_old/π_rollout after its bounds; about 1."),
    "mismatch/weight_max": ("max", "The largest of the same."),
    "mismatch/ess": ("mean", "Effective sample size of the weights, as a share of the tokens; 1 is all."),
    "mismatch/rejected_frac": ("mean", "Share of tokens whose weight left the band: masked or rejected."),
    "mismatch/kl": ("mean", "KL of π_rollout to π_old per token by k3, nats."),
    "nonfinite/rollout_frac": ("mean", "Share of rollouts left out because a number was not finite."),
    "nonfinite/step_frac": ("mean", "Share of optimizer steps left out because a loss or gradient was not finite."),
    "time/rollout": ("mean", "Seconds to collect a rollout."),
    "time/generation": ("mean", "Seconds of it spent sampling."),
    "time/environments": ("mean", "Seconds of it spent in tools and environments, which `time/generation` includes."),
    "time/passes": ("mean", "Seconds of it spent in the passes of actor, reference and critic."),
    "time/rewards": ("mean", "Seconds of it spent in the reward functions."),
    "time/update": ("mean", "Seconds of the optimizer steps that follow a rollout: of one, times their number."),
    "time/update_tflops": ("mean", "10¹² floating-point operations per second of the update, on each process."),
    "time/update_mfu": ("mean", "The same as a share of `peak_tflops`, the model FLOPs utilization."),
    "time/critic_pretraining": (
        "mean",
        "Seconds of an epoch of critic pretraining; in its first log, of collecting the completions.",
    ),
    "time/tokens_per_second": ("mean", "Tokens sampled per second of generation on each process."),
    "custom/{name}": ("mean", "What a reward function passed to log_metric."),
}


@dataclass
class Sums:
    """Parts of one metric; those of two places add up to those of both."""

    reduction: str
    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    largest: float = -math.inf

    def add(self, other: "Sums") -> None:
        """Take the parts of another place in."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.largest = other.largest if math.isnan(other.largest) else max(self.largest, other.largest)

    def value(self) -> float:
        """Return the metric by its reduction; NaN without any part."""
        if not self.count:
            return math.nan
        mean = self.total / self.count
        if self.reduction == "max":
            return self.largest
        return math.sqrt(max(self.squares / self.count - mean**2, 0.0)) if self.reduction == "std" else mean


class Meter:
    """Collects metrics on one process until they are read, once, for all processes."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}
        self._pending: dict[torch.device, list[tuple[str, str, Tensor]]] = defaultdict(list)
        self._seconds: dict[str, float] = {}

    def add(self, name: str, values: Tensor, mask: Tensor | None = None, pattern: str | None = None) -> None:
        """Add numbers to a metric.

        Args:
            name: a key of `METRICS`, or made from one.
            values: any shape; with `mask`, a bool of that shape, only the entries where it is True.
            pattern: the key that the name was made from.
        """
        if mask is not None:
            require_same_shape(values=values, mask=mask)
        # In float64, or the deviation of equal numbers would be what is left of two large ones. MPS has none.
        x = values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
        given = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        largest = x.where(given, -math.inf).amax() if x.numel() else x.new_tensor(-math.inf)
        x = x.where(given, 0.0)
        # Nothing here makes the device wait, neither a selection by the mask nor a float.
        parts = torch.stack([given.sum(dtype=x.dtype), x.sum(), x.square().sum(), largest])
        self._pending[x.device].append((name, METRICS[pattern or name][0], parts))

    def add_number(self, name: str, value: float) -> None:
        """Add one number to a metric."""
        number = float(value)
        merge(self._sums, name, Sums(METRICS[name][0], 1.0, number, number * number, number))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to a metric; all stretches between two reads make up one number."""
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self, name: str) -> float:
        """Return the seconds that `timed` has added to a metric since the last read."""
        return self._seconds[name]

    def read(self) -> dict[str, float]:
        """Every metric over all processes, and start anew. A collective call: every process must make it."""
        merged: dict[str, Sums] = {}
        for state in gather_object([self.state_dict()]):
            for name, parts in state.items():
                merge(merged, name, Sums(**parts))
        self._sums.clear()
        return {name: sums.value() for name, sums in merged.items() if sums.count}

    def take_from(self, other: "Meter") -> None:
        """Add what another meter of this process has collected."""
        self._flush()
        for name, parts in other.state_dict().items():
            merge(self._sums, name, Sums(**parts))

    def state_dict(self) -> dict[str, dict]:
        """Return the metrics that are not read yet, as plain numbers."""
        self._flush()
        return {name: asdict(sums) for name, sums in self._sums.items()}

    def _flush(self) -> None:
        for name, seconds in self._seconds.items():
            self.add_number(name, seconds)
        self._seconds.clear()
        for pending in self._pending.values():
            together = torch.stack([parts for *_, parts in pending]).tolist()  # the one wait of a device
            for (name, reduction, _), parts in zip(pending, together, strict=True):
                merge(self._sums, name, Sums(reduction, *parts))
        self._pending.clear()

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """Continue from what `state_dict` gave."""
        self._pending.clear()
        self._seconds.clear()
        self._sums = {name: Sums(**parts) for name, parts in state.items()}


def merge(into: dict[str, Sums], name: str, sums: Sums) -> None:
    if name in into and sums.reduction != "last":
        into[name].add(sums)
    else:
        into[name] = sums
