"""Warn of a run that goes wrong: a table of checks on the log, each with a section of docs/health.md."""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from transformers import TrainerCallback

from hfppo.config import PPOConfig
from hfppo.functional import estimator_needs

TRUE_METRIC = "true metric"  # in the table for the metric that `HealthCallback.true_metric` names


class HealthWarning(UserWarning):
    """A metric shows that training goes wrong. Python's warning filters silence it, or make it an error."""


@dataclass
class Record:
    """The past of one check, in optimizer steps."""

    passed: int = 0  # the last log that passed
    failed: int | None = None  # the first log that failed since then
    warned: int | None = None  # the last failure that a warning covers


@dataclass(eq=False, kw_only=True)
class HealthCallback(TrainerCallback):
    """Warn when the log shows a run that goes wrong: metric, since when, why, and what to change. On by default.

    The main process warns once per problem, and again when the problem returns after `recovery` rollouts. A resumed
    run first goes through the log history of its checkpoint, so it judges as a straight run would.

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
        max_value_loss: the critic's loss as a multiple of the best constant's.
        min_explained_variance: of the critic; below 0 it is worse than a constant.
        max_grad_norm_factor: gradient norms as a multiple of `max_grad_norm`, or of 1 where nothing is clipped.
        true_metric: name in the log of the quantity that the reward stands for, higher is better; None:
            `metric_for_best_model` where greater is better, else "eval_reward".
        max_true_drop: share of its best by which that metric may fall while the reward rises.
        improvement: gain over the first reward that counts as better, in standard deviations of the first scores.
        patience: rollouts in a row that most problems must last before the warning.
        critic_patience: the same for the critic, which begins as a constant and needs time.
        recovery: rollouts after which a problem that returns is warned of again.
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
    _records: defaultdict[str, Record] = field(init=False, default_factory=lambda: defaultdict(Record))

    def on_train_begin(self, args, state, control, **kwargs):
        """Go through the log history without a warning."""
        self._records.clear()
        for end in range(1, len(state.log_history) + 1):
            self._find_failures(Run(state.log_history[:end], args, self))

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Judge the latest log."""
        if not state.is_world_process_zero:
            return
        run = Run(state.log_history, args, self)
        for anchor, record in self._find_failures(run):
            check = CHECKS[anchor]
            if record.warned is None or run.rollouts_since(record.warned) > self.recovery:
                patience = getattr(self, check.patience) if check.patience else 1
                if run.rollouts_since(record.passed) < patience:
                    continue
                warn(check.message(run, record.failed), f"#{anchor}")
            record.warned = run.step

    def on_train_end(self, args, state, control, **kwargs):
        """Warn of a `true_metric` that was never logged."""
        name = self.true_metric
        if name is not None and state.is_world_process_zero and not any(name in log for log in state.log_history):
            warn(f"true_metric={name!r} was in no log, so nothing was compared with it; metrics.jsonl has the names")

    def _find_failures(self, run: "Run") -> list[tuple[str, Record]]:
        """Bring the records up to date, and return those of the checks that the last log fails."""
        failures = []
        for anchor, check in CHECKS.items():
            record = self._records[anchor]
            passes = check.passes(run)
            if passes:
                record.passed, record.failed = run.step, None
            elif passes is False:
                record.failed = record.failed or run.step
                failures.append((anchor, record))
        return failures


def warn(message: str, anchor: str = "") -> None:
    # `warnings.warn` would add a line of source, and be silent about the same words in a second run of the process.
    warnings.warn_explicit(f"{message}. See docs/health.md{anchor}", HealthWarning, "hfppo", 1)


@dataclass(frozen=True)
class Run:
    """The log of a run up to a step, its configuration and the limits."""

    logs: list[dict[str, float]]
    args: PPOConfig
    limits: HealthCallback

    @property
    def step(self) -> int:
        return int(self.logs[-1]["step"])

    def rollouts_since(self, step: int) -> int:
        """Return the number of rollouts from a step to now, one that has begun included."""
        return -(-(self.step - step) // self.args.updates_per_rollout)

    def name(self, metric: str) -> str:
        """Return the metric's name in the log."""
        if metric != TRUE_METRIC:
            return metric
        best = self.args.metric_for_best_model if self.args.greater_is_better else None
        best = f"eval_{best}" if best and not best.startswith("eval_") else best  # as Trainer reads it
        return self.limits.true_metric or best or "eval_reward"

    def now(self, metric: str) -> float:
        """Return the mean over the logs of the last rollout, since one step of it, such as the first, says little.

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
        """Return the metric's first value; raise KeyError without one."""
        for log in self.logs:
            if metric in log:
                return log[metric]
        raise KeyError(metric)

    @property
    def improved(self) -> bool:
        """Whether the reward has risen by more than the noise of a rollout's mean."""
        gain = self.now("reward") - self.first("reward")
        return gain > self.limits.improvement * self.first("reward_std")


@dataclass(frozen=True)
class Check:
    """A problem: the metric and the limit that show it, and the text of its warning.

    In `change`, a field of the configuration in braces is shown with its present value.
    """

    metric: str
    limit: Callable[[Run], float]
    meaning: str
    causes: str  # the likeliest first
    change: str
    below: bool = False  # fails at or below the limit instead of above it
    only: Callable[[Run], bool] = lambda run: True  # fails only where this holds as well
    patience: str | None = "patience"  # field of HealthCallback with the rollouts that it must last; None: one

    def passes(self, run: Run) -> bool | None:
        """Whether the last log is free of the problem; None where it lacks a metric that is needed."""
        if run.name(self.metric) not in run.logs[-1]:
            return None
        try:
            value, limit = run.now(self.metric), self.limit(run)
            good = value > limit if self.below else value <= limit  # False for NaN
            return good or not self.only(run)
        except KeyError:
            return None

    def message(self, run: Run, first_step: int) -> str:
        """Return one line: metric, since when, why, what to do, and the section to read."""
        change = re.sub(r"{(\w+)}", lambda name: f"{name[1]} (now {getattr(run.args, name[1])})", self.change)
        side = "at or below" if self.below else "above"
        return (
            f"{run.name(self.metric)} is {run.now(self.metric):.3g}, {side} {self.limit(run):.3g}, since step "
            f"{first_step}: {self.meaning}. Likely causes, in order: {self.causes}. To change: {change}"
        )


def returns_variance(run: Run) -> float:
    """Return the variance of the returns, at least a tenth of their mean squared.

    Where returns hardly vary, any error would be large beside their variance.
    """
    return max(run.now("value/return_std") ** 2, (0.1 * run.now("value/return")) ** 2)


def until_best(run: Run) -> Run:
    """Return the run up to the best value of the true metric."""
    name = run.name(TRUE_METRIC)
    best = max((i for i, log in enumerate(run.logs) if name in log), key=lambda i: run.logs[i][name])
    return replace(run, logs=run.logs[: best + 1])


def true_limit(run: Run) -> float:
    """Return the lowest value that the true metric may fall to from its best."""
    best = until_best(run).logs[-1][run.name(TRUE_METRIC)]
    return best - run.limits.max_true_drop * abs(best)


def games_reward(run: Run) -> bool:
    """Whether the reward rose since the best evaluation, and the last two evaluations are below the limit."""
    name = run.name(TRUE_METRIC)
    last_two = [log[name] for log in run.logs if name in log][-2:]
    return run.now("reward") > until_best(run).now("reward") and all(value <= true_limit(run) for value in last_two)


# By the section of docs/health.md.
CHECKS = {
    "clip-fraction": Check(
        "policy/clip_frac",
        lambda run: run.limits.max_clip_frac,
        "many tokens are clipped and teach nothing",
        "steps that are too large; too many steps on one rollout",
        "lower {learning_rate}, or {num_ppo_epochs}",
        patience=None,
    ),
    "approximate-kl": Check(
        "policy/approx_kl",
        lambda run: run.limits.max_approx_kl if run.args.target_kl is None else run.args.target_kl,
        "each rollout's updates move the policy far from the one that sampled",
        "steps that are too large; too many steps on one rollout",
        "lower {learning_rate}, or {num_ppo_epochs}; or let {target_kl} end rollouts early",
    ),
    "first-ratio": Check(
        "policy/first_ratio_deviation",
        lambda run: run.limits.max_first_ratio_deviation,
        "before a rollout's first update the ratio must be 1, but its pass and the update's pass disagree",
        "noise in the model, such as dropout in a module of its own; half precision; a sampler with other numerics",
        "take the noise out; load the base in float32 by {model_init_kwargs}; {policy_mode} must not be 'bypass'",
        patience=None,
    ),
    "sampler-mismatch": Check(
        "mismatch/mean",
        lambda run: run.limits.max_mismatch,
        "the completions were drawn from another policy than the one that scores them",
        "with vLLM another dtype or quantization, or an old adapter on the server; without it noise in the model, or "
        "an architecture that computes otherwise with a cache",
        "give vLLM the base's dtype; take the noise out; set {policy_mode} to 'corrected'",
        patience=None,
    ),
    "kl-to-the-reference": Check(
        "kl",
        lambda run: run.limits.max_kl,
        "the policy has gone far from its reference, where the reward may mean something else",
        "a KL penalty that is small beside the scores; a learning rate that is too high; a reward that can be gamed",
        "raise {kl_coef}, lower {learning_rate}, or steer with AdaptiveKLCallback and a shorter horizon",
    ),
    "negative-kl": Check(
        "kl",
        lambda run: run.limits.min_kl,
        "a KL is never negative, and its estimate only by noise",
        "completions that were not drawn from the policy that scores them, see mismatch/mean; too few tokens",
        "fix the sampler; with few completions raise {num_mini_batches}; another {kl_estimator} only hides it",
        below=True,
        patience=None,
    ),
    "entropy-collapse": Check(
        "policy/entropy",
        lambda run: run.limits.min_entropy_frac * run.first("policy/entropy"),
        "the policy has stopped exploring, and the reward is no better than at the start",
        "steps that are too large; advantages that are noise; a reward that wants one answer to everything",
        "lower {learning_rate}; raise {entropy_coef}, {kl_coef} or {cliprange_high}",
        below=True,
        only=lambda run: not run.improved,
    ),
    "length-explosion": Check(
        "completions/mean_length",
        lambda run: run.limits.max_length_growth * run.first("completions/mean_length"),
        "completions are several times as long as at the start",
        "a reward that grows with length; a penalty per token that is smaller than what a token earns",
        "fix the reward; set {missing_eos_penalty}; raise {kl_coef}; if the length is meant, raise max_length_growth",
    ),
    "truncation": Check(
        "completions/truncated_frac",
        lambda run: run.limits.max_truncated_frac,
        "the length limit ends most completions, so scores are of unfinished text",
        "an EOS that the policy never samples; a limit below what answers need; a reward that grows with length",
        "raise {max_completion_length}; set {missing_eos_penalty} or {mask_truncated_completions}; check the EOS",
    ),
    "no-signal": Check(
        "reward_std",
        lambda run: run.limits.min_reward_std * abs(run.now("reward")),
        "all completions score alike, so there is nothing to learn from",
        "a reward function that always gives the same; prompts that are all too hard or too easy; a collapsed policy",
        "check the reward function on a few completions; take other prompts; raise {temperature}, {num_mini_batches}",
        below=True,
        only=lambda run: not run.improved,
    ),
    "no-signal-within-prompts": Check(
        "frac_reward_zero_std",
        lambda run: run.limits.max_frac_reward_zero_std,
        "the completions of nearly every prompt score alike, and this estimator compares nothing else",
        "too few completions per prompt; prompts that are too hard or too easy; a collapsed policy",
        "raise {num_generations} or {temperature}; take other prompts; set {advantage_estimator} to 'gae'",
        only=lambda run: estimator_needs(run.args.advantage_estimator, "groups") and not run.improved,
    ),
    "unscorable": Check(
        "unscorable_frac",
        lambda run: run.limits.max_unscorable_frac,
        "the reward functions return None for most completions, which are left out of training",
        "a parser that does not know what the model writes; completions that are cut before their answer",
        "return a low score where an answer is wrong, not None; raise {max_completion_length}; check the prompt",
    ),
    "value-loss": Check(
        "value/loss",
        lambda run: run.limits.max_value_loss / 2 * returns_variance(run),
        "the critic has not learnt as much as the returns' mean",
        "a value clip that is small beside the scores; a critic that learns too slowly; or so fast that it diverges",
        "set {cliprange_value} to None or scale the scores; change {critic_learning_rate}, None being the actor's",
        patience="critic_patience",
    ),
    "explained-variance": Check(
        "value/explained_variance",
        lambda run: run.limits.min_explained_variance,
        "the critic is worse than a constant, so it adds noise to the advantages",
        "a learning rate of the critic that is too high; rollouts so small that it learns them by heart",
        "lower {critic_learning_rate}, None being the actor's, or {num_ppo_epochs}; raise {num_mini_batches}",
        below=True,
        patience="critic_patience",
    ),
    "gradient-norm": Check(
        "grad_norm",
        lambda run: run.limits.max_grad_norm_factor * (run.args.max_grad_norm or 1.0),
        "the actor's gradient is far larger than its clip",
        "scores far from ±1 without whitened advantages; a run that diverges; a term of the loss with a large weight",
        "scale the scores, or set {whiten_advantages} or {normalize_scores} to True; lower {learning_rate}",
    ),
    "critic-gradient-norm": Check(
        "value/grad_norm",
        lambda run: run.limits.max_grad_norm_factor * (run.args.max_grad_norm or 1.0),
        "the critic's gradient is far larger than its clip",
        "scores far from ±1; a critic that diverges; a value loss with a large weight",
        "scale the scores, or set {normalize_scores} to True; lower {vf_coef} or {critic_learning_rate}",
    ),
    "reward-hacking": Check(
        TRUE_METRIC,
        true_limit,
        "it falls while the reward rises, so the policy games the reward",
        "a reward that misses part of the goal; a KL penalty that is small beside the scores; training too long",
        "raise {kl_coef}; fix the reward; keep the best model with {metric_for_best_model}, {load_best_model_at_end}",
        below=True,
        only=games_reward,
        patience=None,
    ),
}
