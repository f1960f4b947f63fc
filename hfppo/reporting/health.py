"""Warn of a run that goes wrong: a function per problem, with its limit, and a section of docs/health.md for each."""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import takewhile

from transformers import TrainerCallback

from hfppo.config import PPOConfig
from hfppo.functional import estimator_needs

IMPROVEMENT = 0.2  # gain over the first reward that is more than noise, in standard deviations of the first scores


class HealthWarning(UserWarning):
    """A metric shows that training goes wrong. Python's warning filters silence it, or make it an error."""


@dataclass(frozen=True)
class Run:
    """The log of a run up to a step, and its configuration. A metric that was not logged is a KeyError."""

    logs: list[dict[str, float]]
    args: PPOConfig

    @property
    def step(self) -> int:
        return int(self.logs[-1]["step"])

    def mean(self, metric: str) -> float:
        """Return the mean over the logs of the last rollout: a single step, such as the first, tells little."""
        before = self.step - self.args.updates_per_rollout
        recent = takewhile(lambda log: log["step"] > before, reversed(self.logs))
        values = [log[metric] for log in recent if metric in log]
        if not values:
            raise KeyError(metric)
        return sum(values) / len(values)

    def now(self, metric: str) -> float:
        """Return the mean of a metric that the last log has."""
        if metric not in self.logs[-1]:
            raise KeyError(metric)
        return self.mean(metric)

    def first(self, metric: str) -> float:
        """Return the metric's first value."""
        for log in self.logs:
            if metric in log:
                return log[metric]
        raise KeyError(metric)

    @property
    def improved(self) -> bool:
        """Whether the reward has risen by more than noise."""
        return self.mean("reward") - self.first("reward") > IMPROVEMENT * self.first("reward_std")

    def above(self, metric: str, limit: float) -> str | None:
        """Return as text that a metric of the last log is above a limit, or NaN; None if it is not."""
        value = self.now(metric)
        return None if value <= limit else f"{metric} is {value:.3g}, above {limit:.3g}"

    def below(self, metric: str, limit: float) -> str | None:
        """Return as text that a metric of the last log is at a limit, below it, or NaN; None if it is not."""
        value = self.now(metric)
        return None if value > limit else f"{metric} is {value:.3g}, at or below {limit:.3g}"

    def explain(self, fact: str | None, meaning: str, causes: str, change: str, excuse: bool = False) -> str | None:
        """Return the text of a warning, with the values of the fields in braces; None without a fact, or excused."""
        if fact is None or excuse:
            return None
        change = re.sub(r"{(\w+)}", lambda name: f"{name[1]} (now {getattr(self.args, name[1])})", change)
        return f"{fact}: {meaning}. Likely causes, in order: {causes}. To change: {change}"


def clip_fraction(run: Run, limit: float = 0.3) -> str | None:
    return run.explain(
        run.above("policy/clip_frac", limit),
        "many tokens are clipped and teach nothing",
        "steps that are too large; too many steps on one rollout",
        "lower {learning_rate}, or {num_ppo_epochs}",
    )


def approximate_kl(run: Run, limit: float = 0.1) -> str | None:
    """Nats per token that a rollout's updates may move the policy."""
    return run.explain(
        run.above("policy/approx_kl", limit),
        "each rollout's updates move the policy far from the one that sampled",
        "steps that are too large; too many steps on one rollout",
        "lower {learning_rate}, or {num_ppo_epochs}; or let a ClipMetricsCallback end rollouts early",
    )


def first_ratio(run: Run, limit: float = 0.05) -> str | None:
    return run.explain(
        run.above("policy/first_ratio_deviation", limit),
        "before a rollout's first update the ratio must be 1, but its pass and the update's pass disagree",
        "noise in the model, such as dropout in a module of its own; half precision; a sampler with other numerics",
        "take the noise out; load the base in float32 by {model_init_kwargs}; {policy_mode} must not be 'bypass'",
    )


def sampler_mismatch(run: Run, limit: float = 0.1) -> str | None:
    return run.explain(
        run.above("mismatch/mean", limit),
        "the completions were drawn from another policy than the one that scores them",
        "with vLLM another dtype or quantization, or an old adapter on the server; without it noise in the model, or "
        "an architecture that computes otherwise with a cache",
        "give vLLM the base's dtype; take the noise out; set {policy_mode} to 'corrected'",
    )


def kl_to_the_reference(run: Run, limit: float = 0.3) -> str | None:
    return run.explain(
        run.above("kl", limit),
        "the policy is far from its reference, where the reward may mean something else",
        "a KL penalty that is small compared with the scores; a high learning rate; a reward that can be gamed",
        "raise {kl_coef}, lower {learning_rate}, or use AdaptiveKLCallback with a shorter horizon",
    )


def entropy_collapse(run: Run, limit: float = 0.1) -> str | None:
    """Share of the first entropy. A better reward excuses it."""
    return run.explain(
        run.below("policy/entropy", limit * run.first("policy/entropy")),
        "the policy has stopped exploring, and the reward is no better than at the start",
        "steps that are too large; advantages that are noise; a reward that wants one answer to everything",
        "lower {learning_rate}; raise {entropy_coef}, {kl_coef} or {cliprange_high}",
        excuse=run.improved,
    )


def length_explosion(run: Run, limit: float = 3.0) -> str | None:
    """Multiple of the first mean length."""
    return run.explain(
        run.above("completions/mean_length", limit * run.first("completions/mean_length")),
        "completions are several times as long as at the start",
        "a reward that grows with length; a penalty per token that is smaller than a token's gain",
        "fix the reward; set {missing_eos_penalty}; raise {kl_coef}; HealthCallback(length_explosion=None) allows it",
    )


def truncation(run: Run, limit: float = 0.5) -> str | None:
    return run.explain(
        run.above("completions/truncated_frac", limit),
        "the length limit ends most completions, so unfinished text is scored",
        "an EOS that the policy never samples; a limit below the length of answers; a reward that grows with length",
        "raise {max_completion_length}; set {missing_eos_penalty} or {mask_truncated_completions}; check the EOS",
    )


def no_signal(run: Run, limit: float = 1e-3) -> str | None:
    """Standard deviation of the scores as a share of their mean's size. A better reward excuses it."""
    return run.explain(
        run.below("reward_std", limit * abs(run.mean("reward"))),
        "all completions score alike, so there is nothing to learn from",
        "a reward function that always gives the same; prompts that are all too hard or too easy; a collapsed policy",
        "check the reward function on a few completions; take other prompts; raise {temperature}, {num_mini_batches}",
        excuse=run.improved,
    )


def no_signal_within_prompts(run: Run, limit: float = 0.95) -> str | None:
    """Share of prompts, for estimators that compare within a prompt. A better reward excuses it."""
    return run.explain(
        run.above("frac_reward_zero_std", limit),
        "the completions of nearly every prompt score alike, and this estimator compares nothing else",
        "too few completions per prompt; prompts that are too hard or too easy; a collapsed policy",
        "raise {num_generations} or {temperature}; take other prompts; set {advantage_estimator} to 'gae'",
        excuse=run.improved or not estimator_needs(run.args.advantage_estimator, "groups"),
    )


def unscorable(run: Run, limit: float = 0.5) -> str | None:
    return run.explain(
        run.above("unscorable_frac", limit),
        "the reward functions return None for most completions, which are left out of training",
        "a parser that does not know the model's format; completions that are cut before their answer",
        "return a low score for a wrong answer, not None; raise {max_completion_length}; check the prompt",
    )


def value_loss(run: Run, limit: float = 1.5) -> str | None:
    """Multiple of the best constant's loss. Returns that hardly vary count as varying by a tenth of their mean."""
    variance = max(run.mean("value/return_std") ** 2, (0.1 * run.mean("value/return")) ** 2)
    return run.explain(
        run.above("value/loss", limit / 2 * variance),
        "the critic predicts worse than the returns' mean would",
        "a value clip that is small compared with the scores; a critic that learns too slowly; one that diverges",
        "set {cliprange_value} to None or scale the scores; change {critic_learning_rate}, None being the actor's",
    )


def explained_variance(run: Run, limit: float = -0.2) -> str | None:
    return run.explain(
        run.below("value/explained_variance", limit),
        "the critic is worse than a constant, so it adds noise to the advantages",
        "a learning rate of the critic that is too high; rollouts so small that the critic memorizes them",
        "lower {critic_learning_rate}, None being the actor's, or {num_ppo_epochs}; raise {num_mini_batches}",
    )


def gradient_norm(run: Run, limit: float = 20.0) -> str | None:
    """Multiple of `max_grad_norm`, or of 1 where nothing is clipped, for the actor and the critic."""
    clip = run.args.max_grad_norm if math.isfinite(run.args.max_grad_norm) else 1.0
    facts = [run.above(name, limit * clip) for name in ("grad_norm", "value/grad_norm") if name in run.logs[-1]]
    return run.explain(
        next(filter(None, facts), None),
        "the gradient is far larger than its clip",
        "scores far from ±1; a run that diverges; a loss term with a large weight",
        "scale the scores, or set {whiten_advantages} to True; lower {learning_rate} or {vf_coef}",
    )


def reward_hacking(run: Run, limit: float = 0.1) -> str | None:
    """Share of its best by which the evaluated metric may fall, in two evaluations, while the reward rises."""
    metric = "eval_reward"
    if run.args.metric_for_best_model and run.args.greater_is_better:
        metric = f"eval_{run.args.metric_for_best_model.removeprefix('eval_')}"
    values = {i: log[metric] for i, log in enumerate(run.logs) if metric in log}
    best = max(values, key=lambda i: values[i], default=0)
    lowest = run.logs[best][metric] - limit * abs(run.logs[best][metric])
    rises = run.mean("reward") > replace(run, logs=run.logs[: best + 1]).mean("reward")
    return run.explain(
        run.below(metric, lowest),
        "it falls while the reward rises, so the policy games the reward",
        "a reward that misses part of the goal; a KL penalty that is small compared with the scores; long training",
        "raise {kl_coef}; fix the reward; keep the best model with {metric_for_best_model}, {load_best_model_at_end}",
        excuse=not rises or any(value > lowest for value in list(values.values())[-2:]),
    )


# For how many rollouts in a row a problem must last before the warning.
AT_ONCE = (clip_fraction, first_ratio, sampler_mismatch, reward_hacking)
COLLAPSES = (approximate_kl, kl_to_the_reference, entropy_collapse, length_explosion, truncation, gradient_norm)
SCORES = (no_signal, no_signal_within_prompts, unscorable)
CRITIC = (value_loss, explained_variance)  # a critic begins as a constant and needs time
CHECKS = dict.fromkeys(AT_ONCE, 1) | dict.fromkeys(COLLAPSES + SCORES, 3) | dict.fromkeys(CRITIC, 10)


class HealthCallback(TrainerCallback):
    """Warn when the log shows a run that goes wrong: metric, since when, why, and what to change. On by default.

    The main process warns once per problem. A resumed run judges by the log history of its checkpoint too.

    Args:
        limits: by the names of the checks in docs/health.md, such as `clip_fraction=0.5`; None turns a check off.
    """

    def __init__(self, **limits: float | None):
        own = {check.__name__: signature(check).parameters["limit"].default for check in CHECKS}
        if unknown := sorted(limits.keys() - own.keys()):
            raise TypeError(f"HealthCallback has no check {', '.join(unknown)}; choose from {', '.join(own)}")
        self.limits = own | limits
        self._warned: set[str] = set()  # names of checks

    def on_train_begin(self, args, state, control, **kwargs):
        """Forget the warnings of an earlier training."""
        self._warned.clear()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Judge the latest log."""
        if not state.is_world_process_zero:
            return
        for check, patience in CHECKS.items():
            name = check.__name__
            if name in self._warned or self.limits[name] is None:
                continue
            message, since, passed = judge(partial(check, limit=self.limits[name]), state.log_history, args)
            steps = state.log_history[-1]["step"] - passed
            if message and -(-steps // args.updates_per_rollout) >= patience:  # a rollout that has begun counts
                self._warned.add(name)
                message = f"since step {since}, {message}. See docs/health.md#{name.replace('_', '-')}"
                # `warnings.warn` would add a line of source, and drop equal words in a second run of the process.
                warnings.warn_explicit(message, HealthWarning, "hfppo", 1)


def judge(check: Callable[[Run], str | None], logs: list[dict[str, float]], args: PPOConfig) -> tuple[str, int, int]:
    """Return the problem that the last log shows, "" for none, its first step, and the last step without it."""
    message, since = "", 0
    for end in range(len(logs), 0, -1):
        run = Run(logs[:end], args)
        try:
            found = check(run)
        except KeyError:  # a log without the metric
            if not message:
                break
            continue
        if found is None:
            return message, since, run.step
        message, since = message or found, run.step
    return message, since, 0
