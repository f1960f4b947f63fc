"""What PPO asks of the optimiser: groups of the critic's own, and a hand in each step."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


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
