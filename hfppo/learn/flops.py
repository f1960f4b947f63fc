"""Floating-point operations of an update, from its weights and tokens.

For a matrix with N weights a token costs 2N in the forward pass, 2N for the gradient of its input, and 2N for the
gradient of the weights if they are trained (arXiv:2001.08361, section 2.1): 6N for a trained matrix, 4N for a frozen
one. Trainer's own count treats every weight as trained and leaves out the critic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from hfppo.learn.run import StepPlan
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.layout import trunk_of
from hfppo.rollout import Rollout


@dataclass(frozen=True)
class FlopCounter:
    """Operations of forward and backward, in floating-point operations per token; attention's products are left out.

    A mixture of experts counts all its experts. A prompt counts for each of its completions. A shared critic counts as
    part of the actor.
    """

    actor: int  # per token of prompt and completion
    critic: int  # likewise; 0 if the critic has no trunk
    head: int  # operations of the output head per sampled token

    @classmethod
    def of(cls, model: ActorCritic) -> "FlopCounter":
        """Count the weights of a model that is not sharded yet."""
        config, critic = model.causal_lm.config.get_text_config(), model.critic
        of_critic = 0
        if critic is not None and not critic.is_shared:
            of_critic = flops_per_token(model.critic_trunk, model.critic_parameters())
            of_critic = of_critic * (critic.layers or config.num_hidden_layers) // config.num_hidden_layers
        head = 4 * config.hidden_size * config.vocab_size
        return cls(flops_per_token(trunk_of(model.causal_lm), model.actor_parameters()), of_critic, head)

    def count(self, pieces: Sequence[Rollout], plan: StepPlan) -> int:
        """Return the operations of a step with this plan on some completions."""
        of_actor = of_critic = 0
        for piece in pieces:
            completed = piece.real.sum()
            of_actor += int(piece.prompt_mask.sum() + completed) * self.actor + int(piece.mask.sum()) * self.head
            of_critic += int(piece.read_by_critic[1].sum() + completed) * self.critic
        return plan.policy * of_actor + plan.values * of_critic


def flops_per_token(trunk: nn.Module, trained: list[nn.Parameter]) -> int:
    """Return the operations of forward and backward per token: 4 per frozen weight and 6 per trained one."""
    model = cast(PreTrainedModel, trunk)  # a PeftModel has its base's methods
    counts = [model.num_parameters(only_trainable, exclude_embeddings=True) for only_trainable in (False, True)]
    inside = set(trunk.parameters())
    return 4 * (counts[0] - counts[1]) + 6 * sum(p.numel() for p in trained if p in inside)
