"""What PPO asks of the optimiser: groups of the critic's own, and a hand in each step."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hfppo.evaluation import EvaluatingTrainer
from hfppo.learn.nonfinite import NonFiniteGuard, grad_norms


def give_critic_groups(optimizer: Optimizer, critic: list[nn.Parameter], lr: float) -> None:
    """Move the critic's parameters to groups of their own, the last ones, with a learning rate of their own."""
    ids = {id(p) for p in critic}
    for group in list(optimizer.param_groups):
        of_critic = [p for p in group["params"] if id(p) in ids]
        group["params"] = [p for p in group["params"] if id(p) not in ids]
        if of_critic:
            optimizer.add_param_group({**group, "params": of_critic, "lr": lr})


def critic_rate(optimizer: Optimizer, critic: list[nn.Parameter]) -> float:
    """The critic's learning rate, also in an optimiser that somebody else made."""
    ids = {id(p) for p in critic}
    own = (group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"]))
    return next(own, optimizer.param_groups[-1])["lr"]  # engines may have put other tensors into the groups


class StepHooks:
    """Calls functions before and after each step of an optimiser.

    Trainer's events will not do: DeepSpeed has made its step before they come.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[], None]):
        self._before, self._after = before, after
        self._handles: list[RemovableHandle] = []

    def follow(self, optimizer: Any) -> None:
        """Follow this optimiser from now on, and no other."""
        while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's are around it
            optimizer = optimizer.optimizer
        for handle in self._handles:
            handle.remove()
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]


class OptimizingTrainer(EvaluatingTrainer):
    """A trainer that optimises actor and critic apart: each has its learning rate, its gradient norm and its clip."""

    _guard: NonFiniteGuard

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Trainer's optimiser with the critic's parameters in groups of their own."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        lr = self.args.learning_rate if self.args.critic_learning_rate is None else self.args.critic_learning_rate
        give_critic_groups(optimizer, self.model.critic_parameters(), lr)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        # Private, but the one place between backward and step where gradients are clipped: actor and critic are
        # clipped apart, so that a large gradient of one does not shrink the step of the other.
        return self._clip_apart(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        # Private: with max_grad_norm=0 Trainer asks here instead, for norms without clipping.
        return super()._get_grad_norm(model, self._clip_apart(math.inf) if grad_norm is None else grad_norm)

    def _clip_apart(self, max_norm: float) -> Tensor:
        """Clip both gradients, note the critic's norm and return the actor's; no step is made if one is not finite.

        DeepSpeed has clipped them together and decided on the step already; the norm of both is returned.
        """
        self.accelerator.unscale_gradients()
        parameters = {"actor": self.model.actor_parameters(), "critic": self.model.critic_parameters()}
        norms = grad_norms(self.accelerator, parameters)
        if parameters["critic"]:
            self._meter.add_number("critic_learning_rate", critic_rate(self.optimizer, parameters["critic"]))
        if "critic" in norms:
            self._meter.add("value/grad_norm", norms["critic"])
        if self._guard.allows_step(norms, self.model, self.optimizer, self.state.global_step + 1, self._meter):
            for name, norm in norms.items():
                nn.utils.clip_grads_with_norm_(parameters.get(name, []), max_norm, norm)
        return next(iter(norms.values()))
