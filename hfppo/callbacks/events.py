"""The events of a PPO run, and the settings that a callback may change in them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from hfppo.metrics import UpdateStep
from hfppo.rollout import Rollout, Transcript
from hfppo.run_state import PPOState

PASSED = ("model", "processing_class", "optimizer", "lr_scheduler")  # to every event, as Trainer does


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
        """Return the flags and settings as they are."""
        flags = {f.name: getattr(control, f.name) for f in fields(TrainerControl)}
        return cls(**flags, **{name: getattr(state, name) for name in PPOState.STEERED})

    def flags(self) -> dict[str, bool]:
        """Return Trainer's flags."""
        return {f.name: getattr(self, f.name) for f in fields(TrainerControl)}


class PPOCallback(TrainerCallback):
    """A TrainerCallback with three more events.

    Each event passes `model`, `processing_class`, `optimizer` and `lr_scheduler` as Trainer's events do, and further
    arguments by keyword; take `**kwargs`. Trainer's next `on_step_begin` clears flags that `on_rollout_end` sets in
    `control`; set them in the other events.
    """

    def on_rollout_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: PPOControl,
        *,
        rollout: Rollout,
        transcript: Transcript,
        metrics: dict[str, float],
        ppo_state: PPOState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called on every process after a rollout was collected, before its first update.

        Args:
            control: Trainer's flags and the settings of `PPOControl`; change them equally on every process.
            rollout: this process's rows.
            transcript: the same rows as text, with the scores of each reward function.
            metrics: the rollout's metrics over all processes, by the names of `hfppo.metrics.METRICS`.
            ppo_state: where the run stands.
        """

    def on_mini_batch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: PPOControl,
        *,
        step: UpdateStep,
        ppo_state: PPOState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called on every process after each optimizer step.

        Args:
            step: its place and its metrics over all processes.
        """

    def on_update_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: PPOControl,
        *,
        rollout: Rollout,
        metrics: dict[str, float],
        steps: list[UpdateStep],
        ppo_state: PPOState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called on every process after the last optimizer step on a rollout, before that step is logged and saved.

        Args:
            rollout: this process's rows, as collected.
            metrics: of the whole update over all processes.
            steps: the same for each optimizer step on the rollout.
            ppo_state: of the rollout that was just used up.
        """


def call_event(
    handler: CallbackHandler,
    event: str,
    args: TrainingArguments,
    state: TrainerState,
    control: PPOControl,
    ppo_state: PPOState,
    **arguments: Any,
) -> None:
    """Call an event of every `PPOCallback`; what they return or change is in `control` afterwards.

    Trainer's own `call_event` raises for events that a callback does not have.
    """
    given = {name: getattr(handler, name) for name in PASSED} | arguments
    for callback in handler.callbacks:
        if isinstance(callback, PPOCallback):
            returned = getattr(callback, event)(args, state, control, ppo_state=ppo_state, **given)
            if isinstance(returned, TrainerControl):
                vars(control).update(vars(returned))


class TrainerHooks(TrainerCallback):
    """Calls the trainer's own functions when training begins and after each optimizer step."""

    def __init__(self, train_begin: Callable[[], None], step_end: Callable[[], None]):
        self.train_begin, self.step_end = train_begin, step_end

    def on_train_begin(self, args, state, control, **kwargs):
        self.train_begin()

    def on_step_end(self, args, state, control, **kwargs):
        self.step_end()
