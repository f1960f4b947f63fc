"""Warn of a run that goes wrong.

Each problem has a function with its limit, and a section of docs/troubleshooting.md. The function's docstring is the
text of the warning; `{field}` in it is a field of the configuration, which is shown with its value.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any

import torch
from transformers import TrainerCallback

from hfppo.config import PPOConfig
from hfppo.functional import estimator_needs
from hfppo.support.log_entries import numbers_of

LARGE = 10**9  # parameters of a base for which published runs with LoRA use lower learning rates
IMPROVEMENT = 0.2  # gain over the first reward that is more than noise, in standard deviations of the first scores


class HealthWarning(UserWarning):
    """A metric shows that training goes wrong. Python's warning filters silence it, or make it an error."""


@dataclass(frozen=True)
class RecentLogs:
    """A run's metrics and its configuration. A metric that was not logged is a KeyError."""

    first: dict[str, float]  # the first value of each metric
    now: dict[str, float]  # the mean over the logs of the last rollout, since single steps are noisy
    args: PPOConfig
    dtype: torch.dtype = torch.float32  # the policy's dtype in its passes
    num_parameters: int = 0  # of the base

    def above(self, metric: str, limit: float) -> str | None:
        """Return a statement if a metric is above a limit or NaN, else None."""
        value = self.now[metric]
        return None if value <= limit else f"{metric} is {value:.3g}, above {limit:.3g}"

    def below(self, metric: str, limit: float) -> str | None:
        """Return a statement if a metric is at a limit, below it, or NaN, else None."""
        value = self.now[metric]
        return None if value > limit else f"{metric} is {value:.3g}, at or below {limit:.3g}"

    def unless_improved(self, fact: str | None) -> str | None:
        """Return a statement unless the reward has risen by more than noise."""
        gain = self.now["reward"] - self.first["reward"]
        return None if gain > IMPROVEMENT * self.first["reward_std"] else fact


def learning_rate(run: RecentLogs, limit: float = 5e-5) -> str | None:
    """Published LoRA runs on a base of more than 1B parameters use 1e-5 to 5e-5; a higher rate may ruin the policy.

    Likely cause: the default, which was measured on 135M parameters. To change: lower {learning_rate}; set
    {critic_learning_rate} if the critic, whose default is the same, learns slowly.
    """
    return run.above("learning_rate", limit) if run.num_parameters > LARGE else None


def clip_fraction(run: RecentLogs, limit: float = 0.3) -> str | None:
    """Many tokens are clipped and teach nothing.

    Likely causes, in order: steps that are too large; too many steps on one rollout. To change: lower {learning_rate},
    or {num_ppo_epochs}.
    """
    return run.above("policy/clip_frac", limit)


def first_ratio(run: RecentLogs, limit: float = 0.05) -> str | None:
    """Before a rollout's first update the ratio must be 1, but its pass and the update's pass disagree.

    Likely causes, in order: noise in the model, such as dropout in a module of its own; half precision; a sampler with
    other numerics. To change: take the noise out; load the base in float32 by {model_init_kwargs}; {policy_mode} must
    not be 'bypass'.
    """
    if run.args.policy_mode == "bypass" and run.args.rollouts_ahead:  # the sampler's policy is an older one
        return None
    # The limit is bfloat16's. Logits of SmolLM2 rounded to bfloat16 move its log-probs by 0.023 nats in the mean and
    # by up to 0.16, so two passes that round apart differ by √2 · 0.023 = 0.033 in the mean. Eight times finer,
    # float16 and TF32 give 0.004.
    return run.above("policy/first_ratio_deviation_mean", limit if run.dtype == torch.bfloat16 else limit / 5)


def sampler_mismatch(run: RecentLogs, limit: float = 0.1) -> str | None:
    """Sampler and training model give the same tokens different log-probs.

    Likely causes, in order: with vLLM another dtype or quantization, or an old adapter on the server; without it noise
    in the model, or an architecture that computes otherwise with a cache; with rollouts_ahead updates that move the
    policy far. To change: give vLLM the base's dtype; take the noise out; set {policy_mode} to 'token_truncate'; with
    rollouts_ahead lower {learning_rate}.
    """
    return run.above("mismatch/mean", limit)


def kl_to_the_reference(run: RecentLogs, limit: float = 0.3) -> str | None:
    """The policy is far from its reference, where the reward may mean something else.

    Likely causes, in order: a KL penalty that is small compared with the scores; a high learning rate; a reward that
    can be gamed. To change: raise {kl_coef}, lower {learning_rate}, or use AdaptiveKLCallback with a shorter horizon.
    """
    return run.above("kl", limit)


def entropy_collapse(run: RecentLogs, limit: float = 0.1) -> str | None:
    """The policy has stopped exploring, and the reward is no better than at the start.

    Likely causes, in order: steps that are too large; advantages that are noise; a reward that wants one answer to
    everything. To change: lower {learning_rate}; raise {entropy_coef}, {kl_coef} or {cliprange_high}.
    """
    return run.unless_improved(run.below("policy/entropy", limit * run.first["policy/entropy"]))


def truncation(run: RecentLogs, limit: float = 0.5) -> str | None:
    """A limit ends most completions, so unfinished text is scored.

    Likely causes, in order: an EOS that the policy never samples; a limit below the length of answers; a reward that
    grows with length. To change: raise {max_completion_length}, or with tools {max_turn_length} or
    {max_tool_calling_iterations}; set {missing_eos_penalty} or {mask_truncated_completions}; check the EOS.
    """
    return run.above("completions/truncated_frac", limit)


def dropped_answers(run: RecentLogs, limit: float = 0.5) -> str | None:
    """Most episodes end at an answer that has no room, which the model never reads.

    Likely causes, in order: answers of tools or the environment that are long compared with the limit; too many turns
    for it. To change: shorten the answers; raise {max_completion_length}; lower {max_turn_length},
    {max_tool_calling_iterations}.
    """
    return run.above("turns/dropped_result_frac", limit)


def no_signal(run: RecentLogs, limit: float = 1e-3) -> str | None:
    """All completions score alike, so there is nothing to learn from.

    Likely causes, in order: a reward function that always gives the same; tools that the model never calls; prompts
    that are all too hard or too easy; a collapsed policy. To change: check the reward function on a few completions;
    show a call in the prompt; take other prompts; raise {temperature}, {num_mini_batches}.
    """
    return run.unless_improved(run.below("reward_std", limit * abs(run.now["reward"])))


def no_signal_within_prompts(run: RecentLogs, limit: float = 0.95) -> str | None:
    """The completions of nearly every prompt score alike, and this estimator compares nothing else.

    Likely causes, in order: too few completions per prompt; prompts that are too hard or too easy; a collapsed policy.
    To change: raise {num_generations} or {temperature}; take other prompts; set {advantage_estimator} to 'gae'.
    """
    compares = estimator_needs(run.args.advantage_estimator, "groups")
    return run.unless_improved(run.above("frac_reward_zero_std", limit)) if compares else None


def unscorable(run: RecentLogs, limit: float = 0.5) -> str | None:
    """The reward functions return None for most completions, which are left out of training.

    Likely causes, in order: a parser that does not know the model's format; completions that are cut before their
    answer. To change: return a low score for a wrong answer, not None; raise {max_completion_length}; check the
    prompt.
    """
    return run.above("unscorable_frac", limit)


def explained_variance(run: RecentLogs, limit: float = -0.2) -> str | None:
    """The critic is worse than a constant, so it adds noise to the advantages.

    Likely causes, in order: a learning rate of the critic that is too high; rollouts so small that the critic
    memorizes them. To change: lower {critic_learning_rate}, None being the actor's, or {num_ppo_epochs}; raise
    {num_mini_batches}.
    """
    return run.below("value/explained_variance", limit)


def outside_range(run: RecentLogs, limit: float = 0.0) -> str | None:
    """The critic cannot reach some returns, and their advantages are biased.

    Likely causes, in order: scores or penalties outside the range; a range of the score where several rewards add up.
    To change: widen {value_range} to the least and the largest sum of all rewards that follow.
    """
    return run.above("value/outside_frac", limit)


# Consecutive rollouts with a problem before its warning. A critic starts as a constant, so it gets ten.
AT_ONCE = (learning_rate, clip_fraction, first_ratio, sampler_mismatch, unscorable, dropped_answers, outside_range)
LASTING = (kl_to_the_reference, entropy_collapse, truncation, no_signal, no_signal_within_prompts)
CHECKS = {**dict.fromkeys(AT_ONCE, 1), **dict.fromkeys(LASTING, 3), explained_variance: 10}


def describe(check: Callable[..., str | None], args: PPOConfig) -> str:
    """Return the text of a check's warning."""
    text = " ".join((check.__doc__ or "").split())
    return re.sub(r"{(\w+)}", lambda name: f"{name[1]} (now {getattr(args, name[1])})", text)


class HealthCallback(TrainerCallback):
    """Warn when the log shows a run that goes wrong: metric, since when, why, and what to change. On by default.

    The main process warns once per problem in a training.

    Args:
        limits: one per check in docs/troubleshooting.md, by its name, such as `clip_fraction=0.5`; None turns it off.
    """

    def __init__(self, **limits: float | None):
        own = {check.__name__: signature(check).parameters["limit"].default for check in CHECKS}
        if unknown := sorted(limits.keys() - own.keys()):
            raise TypeError(f"HealthCallback has no check {', '.join(unknown)}; choose from {', '.join(own)}")
        self.limits = own | limits
        self._forget()

    def _forget(self) -> None:
        """Forget an earlier training."""
        self.found: dict[str, str] = {}  # the warnings so far, by the names of their checks
        self._since: dict[str, float] = {}  # the step at which a check began to fail
        self._first: dict[str, float] = {}  # the first value of each metric
        self._recent: list[dict[str, float]] = []  # the logs of the last rollout

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Judge the logs up to the checkpoint that is resumed, whose warnings were shown before."""
        self._forget()
        for log in state.log_history:
            self._judge(log, args, model)

    def on_log(self, args, state, control, model=None, **kwargs):
        """Judge the last rollout, and warn."""
        if state.is_world_process_zero:
            for message in self._judge(state.log_history[-1], args, model):
                # `warnings.warn` adds a line of source, and drops equal words in a second run of the process.
                warnings.warn_explicit(message, HealthWarning, "hfppo", 1)

    def _read(self, log: dict[str, float], args: PPOConfig, model: Any) -> RecentLogs:
        """Add an entry of the log history."""
        self._first = log | self._first
        before = log["step"] - args.updates_per_rollout
        self._recent = [entry for entry in [*self._recent, log] if entry["step"] > before]
        values = {name: [entry[name] for entry in self._recent if name in entry] for name in {*chain(*self._recent)}}
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else getattr(model, "dtype", torch.float32)
        now = {name: sum(x) / len(x) for name, x in values.items()}
        return RecentLogs(self._first, now, args, dtype, model.num_parameters() if model else 0)

    def _judge(self, log: dict[str, float], args: PPOConfig, model: Any) -> list[str]:
        """Return the warnings that an entry of the log history brings."""
        run, step = self._read(numbers_of(log), args, model), log["step"]
        before = len(self.found)
        for check, patience in CHECKS.items():
            name = check.__name__
            limit = self.limits[name]
            if name in self.found or limit is None:
                continue
            try:
                fact = check(run, limit)
            except KeyError:  # no log of the rollout has the metric
                continue
            if fact is None:
                self._since.pop(name, None)
            elif step - self._since.setdefault(name, step) >= (patience - 1) * args.updates_per_rollout:
                place = f"docs/troubleshooting.md#{name.replace('_', '-')}"
                self.found[name] = f"since step {self._since[name]}, {fact}. {describe(check, args)} See {place}"
        return list(self.found.values())[before:]
