"""Every metric's name and meaning, and sums and counts over micro-batches and ranks, divided once.

No metric averages over padding.
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

# Every metric: how its parts become one number, and what it means. `docs/reference.md` is made from this table.
METRICS: dict[str, tuple[str, str]] = {
    "loss": ("mean", "The scalar that an optimizer step minimizes."),
    "reward": ("mean", "Score of a completion: weighted sum of the reward functions, penalties included."),
    "reward_std": ("std", "Standard deviation of the score over the rollout's completions."),
    "rlhf_reward": ("mean", "Sum of a completion's token rewards, KL penalty included (TRL: objective/rlhf_reward)."),
    "rewards/{function}/mean": ("mean", "What one reward function gives, over the completions that it scores."),
    "rewards/{function}/std": ("std", "Standard deviation of the same."),
    "frac_reward_zero_std": ("mean", "Share of prompts whose completions have equal scores, or are in no loss."),
    "rewards/{function}/failed": ("mean", "Share of completions for which a TolerantReward failed."),
    "unscorable_frac": ("mean", "Share of completions for which every reward function with a weight returned None."),
    "completions/mean_length": ("mean", "Tokens of a completion, EOS included."),
    "completions/max_length": ("max", "Tokens of the longest completion."),
    "completions/truncated_frac": ("mean", "Share of completions that a limit ended; see also `turns/…_frac`."),
    "completions/mean_context_length": ("mean", "Tokens of tools and environments in a completion."),
    "candidates/explained": ("last", "Share of the scores' variance that V(s₀) explains, on prompts drawn uniformly."),
    "candidates/chosen": ("mean", "Expected score, by V(s₀), of the prompts that the critic chose."),
    "candidates/passed_over": ("mean", "The same of the prompts that were passed over."),
    "candidates/signal_chosen": ("mean", "Share of completions to them whose score is not the expected one."),
    "candidates/signal_uniform": ("mean", "The same of completions to prompts drawn uniformly."),
    "candidates/spread": ("mean", "Share of sampled groups with spread, without a critic."),
    "candidates/completions": ("mean", "Completions sampled for a rollout without a critic, those left out included."),
    "turns/mean": ("mean", "Turns of the model in a completion, with tools or environments."),
    "turns/max": ("max", "Turns of the longest completion."),
    "turns/reward": ("mean", "Reward of a turn that got one from a tool or an environment."),
    "turns/cut_frac": ("mean", "Share of completions that a length limit cut within a turn."),
    "turns/unfinished_frac": ("mean", "Share that max_tool_calling_iterations or the environment cut after a turn."),
    "turns/dropped_result_frac": ("mean", "Share that ended because an answer did not fit into the length limit."),
    "tools/call_frequency": ("mean", "Tool calls per completion (TRL)."),
    "tools/failure_frequency": ("mean", "Share of tool calls that failed (TRL)."),
    "tools/unknown_frac": ("mean", "Share of tool calls that name no tool."),
    "tools/timeout_frac": ("mean", "Share of tool calls that took longer than tool_timeout."),
    "agent/failed_frac": ("mean", "Share of episodes in which the agent failed."),
    "agent/conversations": ("mean", "Conversations of an agent's episode."),
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
        "1 − Var(R − V)/Var(R), R: all later rewards. 1 perfect, 0 as a constant.",
    ),
    "value/explained_variance_{third}": ("mean", "The same over the first, middle or last third of the tokens."),
    "value/turn_explained_variance": ("mean", "The same over the first tokens of turns: the critic's view of states."),
    "value/outside_frac": ("mean", "Share of tokens whose return is outside `value_range`."),
    "value/loss": ("mean", "½·squared error of the value per token, or its cross-entropy."),
    "value/ratio_mean": ("mean", "π_new/π_rollout per token before the critic's steps, with policy_aligned."),
    "value/rejected_frac": ("mean", "Share of tokens that these steps leave out: the ratio is above 6."),
    "value/grad_norm": ("mean", "Gradient norm of the critic before clipping."),
    "learning_rate": ("last", "Learning rate of the actor in the last step."),
    "critic_learning_rate": ("last", "Learning rate of the critic in the last step."),
    "critic_pretraining/epoch": ("last", "Epochs of critic pretraining that are done."),
    "critic_pretraining/loss": ("mean", "`value/loss` over an epoch of critic pretraining."),
    "critic_pretraining/r2": ("mean", "R² = 1 − mean (V − R)²/Var(R) on the rollouts that pretraining holds out."),
    "policy/loss": ("mean", "The policy surrogate per token, without KL and entropy terms."),
    "policy/clip_frac": ("mean", "Share of tokens on which the policy clip is active."),
    "policy/clip_frac_low": ("mean", "Share of tokens clipped with A < 0; with `ppo`, at a ratio below 1 − ε_low."),
    "policy/clip_frac_high": ("mean", "Share of tokens clipped with A > 0; with `ppo`, at a ratio above 1 + ε_high."),
    "policy/dual_clip_frac": ("mean", "Share of tokens whose loss the dual clip bounds."),
    "policy/approx_kl": ("mean", "KL of π_old to π_θ per token by k3, nats: how far the update has moved."),
    "policy/ratio": ("mean", "π_θ/π_old per token."),
    "policy/ratio_max": ("max", "The largest π_θ/π_old."),
    "policy/first_ratio_deviation": ("max", "Largest |π_θ/π_old − 1| on a rollout's first mini-batch; about 0."),
    "policy/first_ratio_deviation_mean": ("mean", "The mean of the same per token, by which HealthCallback judges."),
    "policy/entropy": ("mean", "Entropy of π_θ per token at the sampling temperature, nats."),
    "policy/kl_loss": ("mean", "KL of π_θ to the reference per token by `kl_estimator`, nats."),
    "loss/{name}": ("mean", "A loss term that a subclass adds in `loss_terms`, per token."),
    "mismatch/mean": ("mean", "|log π_old − log π_rollout| per token, nats: sampler against training model."),
    "mismatch/max": ("max", "The largest of the same."),
    "mismatch/weight_mean": ("mean", "Weight of the policy loss, π_old/π_rollout after its bounds; about 1."),
    "mismatch/weight_max": ("max", "The largest of the same."),
    "mismatch/ess": ("mean", "Effective sample size of the weights, as a share of the tokens; 1 is all."),
    "mismatch/cut_frac": ("mean", "Share of tokens whose weight a bound changes: capped, masked or rejected."),
    "mismatch/kl": ("mean", "KL of π_rollout to π_old per token by k3, nats."),
    "ahead/age": ("mean", "Optimizer steps between the policy that sampled the rollout ahead and its use."),
    "time/trainer_waited": ("mean", "Seconds that training waited for the rollout ahead."),
    "time/sampler_waited": ("mean", "Seconds that the finished rollout ahead waited for training."),
    "time/candidates": ("mean", "Seconds of the critic's pass over the candidates, before the rollout."),
    "time/rollout": ("mean", "Seconds to collect a rollout."),
    "time/generation": ("mean", "Seconds of it spent sampling."),
    "time/environments": ("mean", "Seconds of it spent waiting for tools and environments, within `time/generation`."),
    "time/passes": ("mean", "Seconds of it spent in the passes of actor, reference and critic."),
    "time/rewards": ("mean", "Seconds of it spent in the reward functions."),
    "time/straggler": ("lag", "Seconds of it that the slowest of several processes takes longer than the mean."),
    "time/update": ("mean", "Seconds of the optimizer steps on a rollout: seconds of one step, times their number."),
    "time/update_tflops": ("mean", "10¹² floating-point operations per second of the update, on each process."),
    "time/tokens_per_second": ("mean", "Tokens sampled per second of generation on each process."),
    "clip/{part}/frac": ("last", "Share of clipped tokens in a PPO epoch or mini-batch, by ClipMetricsCallback."),
    "clip/{part}/frac_low": ("last", "The same of tokens with A < 0."),
    "clip/{part}/frac_high": ("last", "The same of tokens with A > 0."),
    "clip/{part}/frac_dual": ("last", "The same of tokens whose loss the dual clip bounds."),
    "clip/{part}/ratio": ("last", "Mean π_θ/π_old of the tokens."),
    "clip/{part}/approx_kl": ("last", "KL of π_old to π_θ per token by k3, nats."),
    "clip/learning_rate_factor": ("last", "Factor of the actor's scheduled learning rate from the next step on."),
    "custom/{name}": ("mean", "What a reward function passed to log_metric."),
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
        return METRICS[name][0]
    for pattern, (reduction, _) in METRICS.items():
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
