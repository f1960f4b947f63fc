"""Floating-point operations of an update, from its weights and tokens.

Of a matrix with N weights a token costs 2N in the forward pass, 2N for the gradient of its input, and 2N for the
gradient of the weights if they are trained (arXiv:2001.08361, section 2.1): 6N for a trained matrix, 4N for a frozen
one. Trainer's own count takes every weight for a trained one, and knows no critic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hfppo.learn.run import StepPlan
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.layout import trunk_of
from hfppo.models.lower_layers import find_layers
from hfppo.rollout import Rollout


@dataclass(frozen=True)
class FlopCounter:
    """Operations of forward and backward, in floating-point operations per token; attention's products are left out.

    A mixture of experts counts all its experts, and a prompt counts for each of its completions.
    """

    actor: int  # of its trunk, per token of prompt and completion
    critic: int  # of a trunk of its own, or its top layers, per token of prompt and completion; 0 if there is none
    head: int  # of the output head, per sampled token
    critic_is_shared: bool

    @classmethod
    def of(cls, model: ActorCritic) -> "FlopCounter":
        """Count the weights of a model that is not sharded yet."""
        trunk, layers = (None, None) if model.critic is None else (model.critic.trunk, model.critic.layers)
        config = model.causal_lm.config.get_text_config()
        return cls(
            actor=flops_per_token(trunk_of(model.causal_lm)),
            critic=0 if trunk is None else flops_per_token(trunk if layers is None else find_layers(trunk)[-layers:]),
            head=4 * config.hidden_size * config.vocab_size,
            critic_is_shared=model.critic_is_shared,
        )

    def count(self, pieces: Sequence[Rollout], plan: StepPlan) -> int:
        """Return the operations that a step's plan makes on some completions."""
        tokens = sum(int(piece.lengths.sum()) for piece in pieces)
        sampled = sum(int(piece.mask.sum()) for piece in pieces)
        reads_actor = plan.policy or (plan.values and self.critic_is_shared)
        return tokens * (reads_actor * self.actor + plan.values * self.critic) + sampled * plan.policy * self.head


def flops_per_token(trunk: nn.Module) -> int:
    """Return the operations of forward and backward per token: 4 per frozen weight and 6 per trained one."""
    looked_up = {id(module.weight) for module in trunk.modules() if isinstance(module, nn.Embedding)}
    multiplied = [p for p in trunk.parameters() if id(p) not in looked_up]
    return sum((6 if p.requires_grad else 4) * num_weights(p) for p in multiplied)


def num_weights(parameter: nn.Parameter) -> int:
    """Return the number of weights, which in four bits is not that of the tensor's entries."""
    quantized = getattr(parameter, "quant_state", None)
    return parameter.numel() if quantized is None else math.prod(quantized.shape)
