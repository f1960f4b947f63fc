"""The events of a PPO run."""

from collections.abc import Callable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfppo.models.actor_critic import ActorCritic
from hfppo.rollout import Rollout, Transcript
from hfppo.run_state import PPOState


class PPOCallback(TrainerCallback):
    """A TrainerCallback with two more events, which may return `control` as the others may."""

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
            transcript: the same rows as text, with what each reward function said.
            metrics: the rollout's metrics over all processes, by the names of `hfppo.metrics.METRICS`.
            ppo_state: `kl_coef` set here holds from the next rollout on.
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
        """Called on every process after the last optimiser step on a rollout, before that step is logged and saved.

        Args:
            model: what the update has made of the policy and the critic.
            rollout: this process's rows, as they were collected.
            ppo_state: of the rollout that has been used up.
        """


class TrainerHooks(TrainerCallback):
    """Calls functions of the trainer's own: when training begins, and after each optimiser step."""

    def __init__(self, train_begin: Callable[[], None], step_end: Callable[[], None]):
        self.train_begin, self.step_end = train_begin, step_end

    def on_train_begin(self, args, state, control, **kwargs):
        self.train_begin()

    def on_step_end(self, args, state, control, **kwargs):
        self.step_end()
