"""The events of a PPO run."""

from collections.abc import Callable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfppo.models.actor_critic import ActorCritic
from hfppo.rollout import Rollout, Transcript
from hfppo.run_state import PPOState


class PPOCallback(TrainerCallback):
    """A TrainerCallback with two more events.

    Flags that `on_rollout_end` sets in `control` are cleared by Trainer's next `on_step_begin`; set them in
    `on_update_end` or in Trainer's own events.
    """

    def on_rollout_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        rollout: Rollout,
        transcript: Transcript,
        metrics: dict[str, float],
        ppo_state: PPOState,
    ) -> TrainerControl | None:
        """Called on every process after a rollout was collected, before its first update.

        Args:
            rollout: this process's rows.
            transcript: the same rows as text, with the scores of each reward function.
            metrics: the rollout's metrics over all processes, by the names of `hfppo.metrics.METRICS`.
            ppo_state: a `kl_coef` set here is used from the next rollout on.
        """

    def on_update_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: ActorCritic,
        rollout: Rollout,
        ppo_state: PPOState,
    ) -> TrainerControl | None:
        """Called on every process after the last optimizer step on a rollout, before that step is logged and saved.

        Args:
            model: policy and critic after the update.
            rollout: this process's rows, as collected.
            ppo_state: of the rollout that was just used up.
        """


class TrainerHooks(TrainerCallback):
    """Calls the trainer's own functions when training begins and after each optimizer step."""

    def __init__(self, train_begin: Callable[[], None], step_end: Callable[[], None]):
        self.train_begin, self.step_end = train_begin, step_end

    def on_train_begin(self, args, state, control, **kwargs):
        self.train_begin()

    def on_step_end(self, args, state, control, **kwargs):
        self.step_end()
