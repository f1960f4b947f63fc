"""The events of a PPO run, and callbacks that steer it: adaptive KL and clip metrics."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from operator import attrgetter
from typing import Literal

from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.trainer_utils import IntervalStrategy

from hfppo.functional import adaptive_kl_coef
from hfppo.metrics import metrics_of
from hfppo.state import PPOState

PASSED = ("model", "processing_class", "optimizer", "lr_scheduler")  # passed to every event, like Trainer's own


@dataclass
class PPOControl(TrainerControl):
    """Trainer's flags, and the settings that a callback may change during a run; each is part of every checkpoint."""

    kl_coef: float = 0.0  # β from the next rollout on
    cliprange: float = 0.2  # ε of the policy clip below 1, from the next optimizer step on
    cliprange_high: float = 0.2  # ε above 1, likewise
    learning_rate_factor: float = 1.0  # multiplies the actor's scheduled learning rate, likewise
    should_end_rollout: bool = False  # set in `on_mini_batch_end`: drop the remaining steps on the rollout
    logs: dict[str, float] = field(default_factory=dict)  # numbers for the next log, by a name of METRICS

    @classmethod
    def of(cls, control: TrainerControl, state: PPOState) -> "PPOControl":
        """Return Trainer's current flags and the settings in PPO's state."""
        return cls(**asdict(control), **{name: getattr(state, name) for name in PPOState.STEERED})

    def flags(self) -> dict[str, bool]:
        """Return Trainer's flags by name, without PPO's settings."""
        return {f.name: getattr(self, f.name) for f in fields(TrainerControl)}

    def check(self, source: str) -> None:
        """Turn settings and logs into floats.

        Args:
            source: the event that has changed them, for errors.
        Raises:
            AttributeError: the event has set an attribute that is not a field.
            TypeError, ValueError: a value is not a number, or a setting is negative or not finite.
        """
        names = [f.name for f in fields(self)]
        for name in vars(self).keys() - set(names):
            raise AttributeError(f"{source} set control.{name}, which nothing reads; it may set {', '.join(names)}")
        for name in PPOState.STEERED:
            number = float(getattr(self, name))
            if not 0 <= number < math.inf:
                raise ValueError(f"{source} set control.{name}={number}; set a finite number of at least 0")
            setattr(self, name, number)
        self.logs = {name: float(value) for name, value in self.logs.items()}


class PPOCallback(TrainerCallback):
    """A TrainerCallback with three more events.

    Each event passes `model`, `processing_class`, `optimizer` and `lr_scheduler` as Trainer's events do, and further
    arguments by keyword; take `**kwargs`. An event may return a `TrainerControl` in place of `control`. Trainer's next
    `on_step_begin` clears flags that `on_rollout_end` sets in `control`; set them in the other events.
    """

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state, **kwargs):
        """Called on every process after a rollout was collected, before its first update.

        Args:
            control (PPOControl): Trainer's flags and PPO's settings; change them equally on every process.
            rollout (Rollout): this process's rows.
            transcript (Transcript): the same rows as text, with the scores of each reward function.
            metrics (dict[str, float]): the rollout's over all processes, by the names of `hfppo.metrics.METRICS`.
            ppo_state (PPOState): PPO's state; read it only.
        """

    def on_mini_batch_end(self, args, state, control, *, step, ppo_state, **kwargs):
        """Called on every process after each optimizer step.

        Args:
            step (UpdateStep): its place and its metrics over all processes.
        """

    def on_update_end(self, args, state, control, *, rollout, metrics, steps, ppo_state, **kwargs):
        """Called on every process after the last optimizer step on a rollout, before that step is logged and saved.

        Args:
            rollout (Rollout): this process's rows, as collected.
            metrics (dict[str, float]): metrics of the whole update over all processes.
            steps (list[UpdateStep]): the same for each optimizer step on the rollout.
            ppo_state (PPOState): PPO's state on this rollout.
        """


def call_event(trainer: Trainer, event: str, control: PPOControl, **arguments: object) -> None:
    """Call an event of every `PPOCallback` of a trainer; `control` then has what they return or change.

    Trainer's own `call_event` raises for events that a callback does not have.
    """
    given = {name: getattr(trainer.callback_handler, name) for name in PASSED} | arguments
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, PPOCallback):
            returned = getattr(callback, event)(trainer.args, trainer.state, control, **given)
            if isinstance(returned, TrainerControl):
                vars(control).update(vars(returned))
            control.check(f"{type(callback).__name__}.{event}")


class TrainerHooks(TrainerCallback):
    """Calls the trainer's own functions around the optimizer's step, and at Trainer's end of it; logs the last steps.

    Trainer's events come too late for DeepSpeed, which has made its step by then; so torch's hooks are used.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[], None], step_end: Callable[[], None]):
        self.before, self.after, self.step_end = before, after, step_end
        self.handles: list[RemovableHandle] = []

    def on_train_begin(self, args, state, control, *, optimizer, **kwargs):
        while (wrapped := getattr(optimizer, "optimizer", None)) is not None:  # accelerate and DeepSpeed wrap it
            optimizer = wrapped
        for handle in self.handles:  # of an earlier run
            handle.remove()
        self.handles = [
            optimizer.register_step_pre_hook(lambda *_: self.before()),
            optimizer.register_step_post_hook(lambda *_: self.after()),
        ]

    def on_step_end(self, args, state, control, **kwargs):
        self.step_end()
        self.on_epoch_end(args, state, control)  # before the last checkpoint, from which no other log follows

    def on_epoch_end(self, args, state, control, **kwargs):
        if control.should_training_stop and args.logging_strategy == IntervalStrategy.STEPS:
            control.should_log = True  # Trainer logs only steps that are not logged yet


class AdaptiveKLCallback(PPOCallback):
    """Steers the KL to the reference by changing β. arXiv:1909.08593, section 2.2.

    Its only state is β, which every checkpoint has.

    Args:
        target: KL per token to steer to, nats.
        horizon: completions over which β moves by at most 20 %; more than a fifth of a rollout.
    """

    def __init__(self, target: float = 0.1, horizon: float = 10_000):
        if not target > 0 or not horizon > 0:
            raise ValueError(f"target={target} and horizon={horizon} must be above 0")
        self.target, self.horizon = target, horizon

    def on_train_begin(self, args, state, control, **kwargs):
        if args.kl_coef == 0:
            raise ValueError("AdaptiveKLCallback multiplies kl_coef, and kl_coef=0 stays 0; start from 0.05, say")
        completions = args.rollout_size_per_process * args.world_size
        if completions >= 5 * self.horizon:
            raise ValueError(
                f"horizon={self.horizon} of AdaptiveKLCallback is at most a fifth of a rollout's {completions} "
                f"completions, so a single step could make β 0 or negative; set horizon={completions} or more"
            )

    def on_rollout_end(self, args, state, control, *, rollout, metrics, **kwargs):
        completions = len(rollout) * args.world_size
        kl = metrics.get("kl", math.nan)
        control.kl_coef = adaptive_kl_coef(control.kl_coef, kl, self.target, self.horizon, completions)


# Metrics of a step, and their names under `clip/<part>/`.
CLIP_NAMES = {
    "policy/clip_frac": "frac",
    "policy/clip_frac_low": "frac_low",
    "policy/clip_frac_high": "frac_high",
    "policy/dual_clip_frac": "frac_dual",
    "policy/ratio": "ratio",
    "policy/approx_kl": "approx_kl",
}
MOST_CHANGE = 0.2  # most relative change of the learning rate per rollout, as for β in AdaptiveKLCallback


class ClipMetricsCallback(PPOCallback):
    """Log how much of each PPO epoch's policy loss is clipped, and steer the update by it.

    Clipped tokens have no gradient, so their share shows whether the steps on a rollout are too large or too many.
    With a `target` the callback acts on it:

    - `then="learning_rate"`: after each rollout the actor's learning rate is multiplied by
      1 + clip(1 − x/target, ±0.2), with x of the last PPO epoch; it never exceeds the scheduled rate.
    - `then="stop"`: once x of a mini-batch exceeds the target, the remaining steps on the rollout are dropped.

    Args:
        target: share of tokens for "clip_frac", nats per token for "approx_kl"; None only logs.
        by: what x is.
        then: what to change.
        per_mini_batch: log each mini-batch as well.

    Raises:
        ValueError: a target that is not above 0, or an unknown `by` or `then`.
    """

    def __init__(
        self,
        target: float | None = None,
        by: Literal["clip_frac", "approx_kl"] = "clip_frac",
        then: Literal["learning_rate", "stop"] = "learning_rate",
        per_mini_batch: bool = False,
    ):
        if target is not None and not target > 0:
            raise ValueError(f"target={target} must be above 0; leave it out to log only")
        if by not in ("clip_frac", "approx_kl"):
            raise ValueError(f"by={by!r} must be 'clip_frac' or 'approx_kl'")
        if then not in ("learning_rate", "stop"):
            raise ValueError(f"then={then!r} must be 'learning_rate' or 'stop'")
        self.target, self.metric, self.then, self.per_mini_batch = target, f"policy/{by}", then, per_mini_batch

    def on_mini_batch_end(self, args, state, control, *, step, **kwargs):
        if self.target is not None and self.then == "stop" and step.metrics.get(self.metric, 0.0) > self.target:
            control.should_end_rollout = True

    def on_update_end(self, args, state, control, *, steps, **kwargs):
        epochs = groupby(steps, key=attrgetter("epoch"))
        parts = {f"epoch_{epoch + 1}": metrics_of(some) for epoch, some in epochs}
        if self.per_mini_batch:
            parts |= {f"epoch_{s.epoch + 1}_batch_{s.mini_batch + 1}": s.metrics for s in steps}
        for part, metrics in parts.items():
            control.logs |= {f"clip/{part}/{name}": metrics[x] for x, name in CLIP_NAMES.items() if x in metrics}
        last = parts.get(f"epoch_{args.num_ppo_epochs}", {})
        if self.target is not None and self.then == "learning_rate" and self.metric in last:
            change = max(-MOST_CHANGE, min(MOST_CHANGE, 1 - last[self.metric] / self.target))
            control.learning_rate_factor = min(1.0, control.learning_rate_factor * (1 + change))
        control.logs["clip/learning_rate_factor"] = control.learning_rate_factor
