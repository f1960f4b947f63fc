"""What an optimizer step computes and moves: actor, critic, or both."""

from dataclasses import dataclass

from hfppo.config import PPOConfig
from hfppo.run_state import PPOState


@dataclass(frozen=True)
class StepPlan:
    """The passes that a step makes on the rollout in use, and the weights that it moves."""

    epoch: int  # of the rollout's use, from 0
    policy: bool  # whether the actor's losses are computed; in `critic_warmup` they have weight 0
    values: bool  # whether the critic's losses are computed, and the critic moves
    warms_up: bool  # whether the rollout belongs to `critic_warmup`, which the actor sits out

    @classmethod
    def of(cls, step: int, state: PPOState, args: PPOConfig) -> "StepPlan":
        """Return the plan of the step after `step` others; during `critic_warmup` the critic moves in all of them.

        After the last step on a rollout it is that of the next one's first.
        """
        epoch = (step - state.first_step) % args.updates_per_rollout // args.num_mini_batches
        warms_up = state.rollouts <= args.critic_warmup
        return cls(
            epoch=epoch,
            policy=epoch < args.num_ppo_epochs,
            values=epoch < args.critic_epochs or warms_up,
            warms_up=warms_up,
        )

    @property
    def moves_actor(self) -> bool:
        """Whether the actor's weights change."""
        return self.policy and not self.warms_up
