"""Warnings of a run that goes wrong: a table of checks on the log, with a section of docs/health.md each."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter

from transformers import TrainerCallback

from hfppo.config import PPOConfig
from hfppo.functional import estimator_needs

TRUE_METRIC = "true metric"  # stands in the table for the metric that `HealthCallback.true_metric` names


class HealthWarning(UserWarning):
    """A metric says that training goes wrong. Python's warning filters silence it, or make it an error."""


@dataclass(eq=False, kw_only=True)
class HealthCallback(TrainerCallback):
    """Warns when the log shows a run that goes wrong: what, since when, why, and what to change. On by default.

    It reads Trainer's log history alone, which is in every checkpoint, so a resumed run judges as a straight one
    would. An illness is told once, and again when it comes back after `recovery` rollouts, by the main process.

    Args:
        max_clip_frac: share of clipped tokens above which an update is too large.
        max_approx_kl: nats per token that a rollout's updates may move the policy; `target_kl` where that is set.
        max_first_ratio_deviation: |ratio − 1| before the first update above which the passes disagree.
        max_mismatch: nats per token between the sampler's and the training model's log-probs.
        max_kl: nats per token to the reference; twice an AdaptiveKLCallback's target where one is in `callbacks`.
        min_kl: nats per token below which a k1 estimate is more than noise.
        min_entropy_frac: share of the first entropy below which the policy no longer explores.
        max_length_growth: mean length as a multiple of the first.
        max_truncated_frac: share of completions cut by the length limit.
        min_reward_std: standard deviation of the scores, as a share of their mean's size, that counts as none.
        max_frac_reward_zero_std: share of prompts without a signal, for estimators that compare within a prompt.
        max_unscorable_frac: share of completions without a score.
        max_value_loss: the critic's loss as a multiple of what the best constant would have.
        min_explained_variance: of the critic; below 0 it is worse than a constant.
        max_grad_norm_factor: gradient norms as a multiple of `max_grad_norm`, or of 1 where nothing is clipped.
        true_metric: name in the log of what the reward stands for, higher is better; None: `metric_for_best_model`
            where greater is better, else "eval_reward".
        max_true_drop: share of its best by which that metric may fall while the reward rises.
        improvement: what counts as a better reward than the first: standard deviations of the first scores.
        patience: rollouts that most illnesses must last before they are told.
        critic_patience: the same for the critic, which begins as a constant and needs time.
        recovery: rollouts after which an illness that returns is told again.
    """

    max_clip_frac: float = 0.3
    max_approx_kl: float = 0.1
    max_first_ratio_deviation: float = 0.05
    max_mismatch: float = 0.1
    max_kl: float = 0.3
    min_kl: float = -0.05
    min_entropy_frac: float = 0.1
    max_length_growth: float = 3.0
    max_truncated_frac: float = 0.5
    min_reward_std: float = 1e-3
    max_frac_reward_zero_std: float = 0.95
    max_unscorable_frac: float = 0.5
    max_value_loss: float = 1.5
    min_explained_variance: float = -0.2
    max_grad_norm_factor: float = 20.0
    true_metric: str | None = None
    max_true_drop: float = 0.1
    improvement: float = 0.2
    patience: int = 3
    critic_patience: int = 10
    recovery: int = 10
    _last_ill: dict["Check", int] = field(init=False, default_factory=dict)  # step, of what was told

    def on_train_begin(self, args, state, control, **kwargs):
        self._last_ill.clear()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        run = Run(state.log_history, args, self)
        for check in CHECKS:
            if check.is_ill(run):
                self._tell(check, run)

    def on_train_end(self, args, state, control, **kwargs):
        name = self.true_metric
        if name is not None and state.is_world_process_zero and not any(name in log for log in state.log_history):
            message = (
                f"true_metric={name!r} was in no log, so nothing was compared with it; metrics.jsonl has the names"
            )
            warnings.warn_explicit(f"{message}. See docs/health.md", HealthWarning, "hfppo", 1)

    def _tell(self, check: "Check", run: "Run") -> None:
        """Warn, unless the illness has been told and is still there, or has not yet lasted."""
        last = self._last_ill.get(check)
        if last is None or run.rollouts_since(last) > self.recovery:
            first_step, rollouts = check.spell(run)
            if rollouts < check.patience(self):
                return
            # `warn` would add a line of source, and be silent about the same words in a second run of the process.
            warnings.warn_explicit(check.message(run, first_step), HealthWarning, "hfppo", 1)
        self._last_ill[check] = run.step


@dataclass(frozen=True)
class Run:
    """What a check sees of a run: the log up to a step, the configuration and the limits."""

    logs: list[dict[str, float]]
    args: PPOConfig
    limits: HealthCallback

    @property
    def step(self) -> int:
        return int(self.logs[-1]["step"])

    def rollouts_since(self, step: int) -> int:
        """Rollouts from a step to now, a begun one included."""
        return -(-(self.step - step) // self.args.updates_per_rollout)

    def name(self, metric: str) -> str:
        """The metric's name in the log."""
        if metric != TRUE_METRIC:
            return metric
        best = self.args.metric_for_best_model if self.args.greater_is_better else None
        best = f"eval_{best}" if best and not best.startswith("eval_") else best  # as Trainer reads it
        return self.limits.true_metric or best or "eval_reward"

    def now(self, metric: str) -> float:
        """The mean over the logs of the last rollout: a single step of it, such as the first, says little.

        Raises:
            KeyError: none of them has the metric.
        """
        name = self.name(metric)
        before = self.step - self.args.updates_per_rollout
        recent = takewhile(lambda log: log["step"] > before, reversed(self.logs))
        values = [log[name] for log in recent if name in log]
        if not values:
            raise KeyError(name)
        return sum(values) / len(values)

    def first(self, metric: str) -> float:
        """The metric's first value. Raises KeyError where there is none."""
        for log in self.logs:
            if metric in log:
                return log[metric]
        raise KeyError(metric)

    @property
    def improved(self) -> bool:
        """Whether the reward has risen by more than the noise of a rollout's mean."""
        gain = self.now("reward") - self.first("reward")
        return gain > self.limits.improvement * self.first("reward_std")

    @property
    def true_limit(self) -> float:
        """What the true metric may fall to, from its best. Raises KeyError where there is none."""
        best = self.logs[self._best_evaluation()][self.name(TRUE_METRIC)]
        return best - self.limits.max_true_drop * abs(best)

    @property
    def gamed(self) -> bool:
        """Whether the reward has risen since the best evaluation, and the last two evaluations are below the limit."""
        name = self.name(TRUE_METRIC)
        last_two = [log[name] for log in self.logs if name in log][-2:]
        at_best = replace(self, logs=self.logs[: self._best_evaluation() + 1])
        return self.now("reward") > at_best.now("reward") and all(value <= self.true_limit for value in last_two)

    def _best_evaluation(self) -> int:
        name = self.name(TRUE_METRIC)
        evaluations = [i for i, log in enumerate(self.logs) if name in log]
        if not evaluations:
            raise KeyError(name)
        return max(evaluations, key=lambda i: self.logs[i][name])


def at_once(limits: HealthCallback) -> int:
    """For what a single rollout proves."""
    return 1


@dataclass(frozen=True)
class Check:
    """One illness: when a run has it, and what to say.

    In `change`, a field of the configuration in braces is shown with its present value.
    """

    anchor: str  # the section of docs/health.md
    metric: str
    limit: Callable[[Run], float]
    meaning: str
    causes: str  # the likeliest first
    change: str
    below: bool = False  # ill at or below the limit instead of above it
    only: Callable[[Run], bool] = lambda run: True  # what must hold as well
    patience: Callable[[HealthCallback], int] = attrgetter("patience")

    def is_ill(self, run: Run) -> bool | None:
        """Whether the last log shows the illness; None where it lacks what it takes to know."""
        if run.name(self.metric) not in run.logs[-1]:
            return None
        try:
            value, limit = run.now(self.metric), self.limit(run)
            well = value > limit if self.below else value <= limit  # False for NaN
            return not well and self.only(run)
        except KeyError:
            return None

    def spell(self, run: Run) -> tuple[int, int]:
        """The first step of the illness that the last log shows, and how many rollouts it has lasted."""
        first_step = run.step
        last_well = 0
        for end in range(len(run.logs), 0, -1):
            earlier = replace(run, logs=run.logs[:end])
            ill = self.is_ill(earlier)
            if ill is False:
                last_well = earlier.step
                break
            if ill:
                first_step = earlier.step
        return first_step, run.rollouts_since(last_well)

    def message(self, run: Run, first_step: int) -> str:
        """One line: what, since when, why, what to do, and where to read on."""
        change = re.sub(r"{(\w+)}", lambda name: f"{name[1]} (now {getattr(run.args, name[1])})", self.change)
        side = "at or below" if self.below else "above"
        return (
            f"{run.name(self.metric)} is {run.now(self.metric):.3g}, {side} {self.limit(run):.3g}, since step "
            f"{first_step}: {self.meaning}. Likely causes, in order: {self.causes}. To change: {change}. "
            f"See docs/health.md#{self.anchor}"
        )


CHECKS = (
    Check(
        "clip-fraction",
        "policy/clip_frac",
        lambda run: run.limits.max_clip_frac,
        "many tokens are clipped and teach nothing",
        "steps that are too large; too many steps on one rollout",
        "lower {learning_rate}, or {num_ppo_epochs}",
        patience=at_once,
    ),
    Check(
        "approximate-kl",
        "policy/approx_kl",
        lambda run: run.limits.max_approx_kl if run.args.target_kl is None else run.args.target_kl,
        "each rollout's updates move the policy far from the one that sampled",
        "steps that are too large; too many steps on one rollout",
        "lower {learning_rate}, or {num_ppo_epochs}; or let {target_kl} end rollouts early",
    ),
    Check(
        "first-ratio",
        "policy/first_ratio_deviation",
        lambda run: run.limits.max_first_ratio_deviation,
        "before a rollout's first update the ratio must be 1, but its pass and the update's pass disagree",
        "noise in the model, such as dropout in a module of its own; half precision; a sampler with other numerics",
        "take the noise out; load the base in float32 by {model_init_kwargs}; {policy_mode} must not be 'bypass'",
        patience=at_once,
    ),
    Check(
        "sampler-mismatch",
        "mismatch/mean",
        lambda run: run.limits.max_mismatch,
        "the completions were drawn from another policy than the one that scores them",
        "a sampler of another dtype or quantisation; an old adapter on the server; noise or a mask in one pass alone",
        "give the sampler the base's dtype; set {policy_mode} to 'corrected'",
        patience=at_once,
    ),
    Check(
        "kl-to-the-reference",
        "kl",
        lambda run: run.limits.max_kl,
        "the policy has gone far from its reference, where the reward may mean something else",
        "a KL penalty that is small beside the scores; a learning rate that is too high; a reward that can be gamed",
        "raise {kl_coef}, lower {learning_rate}, or steer with AdaptiveKLCallback and a shorter horizon",
    ),
    Check(
        "negative-kl",
        "kl",
        lambda run: run.limits.min_kl,
        "a KL is never negative, and its estimate only by noise",
        "completions that were not drawn from the policy that scores them, see mismatch/mean; too few tokens",
        "mend the sampler; with few completions raise {num_mini_batches}; another {kl_estimator} only hides it",
        below=True,
        patience=at_once,
    ),
    Check(
        "entropy-collapse",
        "policy/entropy",
        lambda run: run.limits.min_entropy_frac * run.first("policy/entropy"),
        "the policy has stopped exploring, and the reward is no better than at the start",
        "steps that are too large; advantages that are noise; a reward that wants one answer to everything",
        "lower {learning_rate}; raise {entropy_coef}, {kl_coef} or {cliprange_high}",
        below=True,
        only=lambda run: not run.improved,
    ),
    Check(
        "length-explosion",
        "completions/mean_length",
        lambda run: run.limits.max_length_growth * run.first("completions/mean_length"),
        "completions are several times as long as at the start",
        "a reward that grows with length; a penalty per token that is smaller than what a token earns",
        "mend the reward; set {missing_eos_penalty}; raise {kl_coef}; if the length is meant, raise max_length_growth",
    ),
    Check(
        "truncation",
        "completions/truncated_frac",
        lambda run: run.limits.max_truncated_frac,
        "the length limit ends most completions, so scores are of unfinished text",
        "an EOS that the policy never samples; a limit below what answers need; a reward that grows with length",
        "raise {max_completion_length}; set {missing_eos_penalty} or {mask_truncated_completions}; check the EOS",
    ),
    Check(
        "no-signal",
        "reward_std",
        lambda run: run.limits.min_reward_std * abs(run.now("reward")),
        "all completions score alike, so there is nothing to learn from",
        "a reward function that always gives the same; prompts that are all too hard or too easy; a collapsed policy",
        "check the reward function on a few completions; take other prompts; raise {temperature}, {num_mini_batches}",
        below=True,
        only=lambda run: not run.improved,
    ),
    Check(
        "no-signal-within-prompts",
        "frac_reward_zero_std",
        lambda run: run.limits.max_frac_reward_zero_std,
        "the completions of nearly every prompt score alike, and this estimator compares nothing else",
        "too few completions per prompt; prompts that are too hard or too easy; a collapsed policy",
        "raise {num_generations} or {temperature}; take other prompts; set {advantage_estimator} to 'gae'",
        only=lambda run: estimator_needs(run.args.advantage_estimator, "groups") and not run.improved,
    ),
    Check(
        "unscorable",
        "unscorable_frac",
        lambda run: run.limits.max_unscorable_frac,
        "the reward functions return None for most completions, which are left out of training",
        "a parser that does not know what the model writes; completions that are cut before their answer",
        "return a low score where an answer is wrong, not None; raise {max_completion_length}; check the prompt",
    ),
    Check(
        "value-loss",
        "value/loss",
        lambda run: run.limits.max_value_loss / 2 * spread(run),
        "the critic has not learnt as much as the returns' mean",
        "a value clip that is small beside the scores; a critic that learns too slowly; or so fast that it diverges",
        "set {cliprange_value} to None or scale the scores; change {critic_learning_rate}, None being the actor's",
        patience=attrgetter("critic_patience"),
    ),
    Check(
        "explained-variance",
        "value/explained_variance",
        lambda run: run.limits.min_explained_variance,
        "the critic is worse than a constant, so it adds noise to the advantages",
        "a learning rate of the critic that is too high; rollouts so small that it learns them by heart",
        "lower {critic_learning_rate}, None being the actor's, or {num_ppo_epochs}; raise {num_mini_batches}",
        below=True,
        patience=attrgetter("critic_patience"),
    ),
    Check(
        "gradient-norm",
        "grad_norm",
        lambda run: run.limits.max_grad_norm_factor * (run.args.max_grad_norm or 1.0),
        "the actor's gradient is far larger than its clip",
        "scores far from ±1 without whitened advantages; a run that diverges; a term of the loss with a large weight",
        "scale the scores, or set {whiten_advantages} or {normalize_scores} to True; lower {learning_rate}",
    ),
    Check(
        "critic-gradient-norm",
        "value/grad_norm",
        lambda run: run.limits.max_grad_norm_factor * (run.args.max_grad_norm or 1.0),
        "the critic's gradient is far larger than its clip",
        "scores far from ±1; a critic that diverges; a value loss with a large weight",
        "scale the scores, or set {normalize_scores} to True; lower {vf_coef} or {critic_learning_rate}",
    ),
    Check(
        "reward-hacking",
        TRUE_METRIC,
        lambda run: run.true_limit,
        "it falls while the reward rises, so the policy games the reward",
        "a reward that misses part of what is wanted; a KL penalty that is small beside the scores; training too long",
        "raise {kl_coef}; mend the reward; keep the best model with {metric_for_best_model}, {load_best_model_at_end}",
        below=True,
        only=lambda run: run.gamed,
        patience=at_once,
    ),
)


def spread(run: Run) -> float:
    """Variance of the returns, or of a tenth of their mean where they hardly vary: then any error would be large."""
    return max(run.now("value/return_std") ** 2, (0.1 * run.now("value/return")) ** 2)
