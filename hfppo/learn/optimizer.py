"""Optimizer support for PPO: separate parameter groups, learning rates and clipping for actor and critic."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hfppo.learn.nonfinite_guard import NonFiniteGuard
from hfppo.metrics import Measures, parts, parts_of
from hfppo.models.actor_critic import ActorCritic

# Settings of an optimizer's groups that no step or schedule changes.
OWN_SETTINGS = ("weight_decay", "betas", "eps")


def split_critic_groups(optimizer: Optimizer, critic: list[nn.Parameter], lr: float) -> None:
    """Move the critic's parameters into groups of their own, the last ones, with their own learning rate."""
    ids = {id(p) for p in critic}
    for group in list(optimizer.param_groups):
        of_critic = [p for p in group["params"] if id(p) in ids]
        group["params"] = [p for p in group["params"] if id(p) not in ids]
        if of_critic:
            optimizer.add_param_group({**group, "params": of_critic, "lr": lr})


def critic_learning_rate(optimizer: Optimizer, critic: list[nn.Parameter]) -> float:
    """Return the critic's present learning rate, also from an optimizer that somebody else made."""
    ids = {id(p) for p in critic}
    own = (group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"]))
    return next(own, optimizer.param_groups[-1])["lr"]  # engines may have put other tensors into the groups


@contextmanager
def keep_own_settings(optimizer: Optimizer, scheduler: Any) -> Iterator[None]:
    """Keep this run's learning rates, weight decay, betas and eps while optimizer and scheduler state is loaded.

    Trainer would continue with the checkpoint's, whatever the configuration says now. Equal settings are not touched.
    """
    given = [{name: group[name] for name in OWN_SETTINGS if name in group} for group in optimizer.param_groups]
    rates = [group.get("initial_lr") for group in optimizer.param_groups]
    yield
    changed = False
    for group, own, rate in zip(optimizer.param_groups, given, rates, strict=True):
        group.update(own)
        loaded = group.get("initial_lr")  # the schedule multiplies it; ReduceLROnPlateau has none
        if rate is not None and loaded is not None and not math.isclose(rate, loaded, rel_tol=1e-6):
            group["lr"] = group["lr"] * rate / loaded if loaded else rate
            group["initial_lr"] = rate
            changed = True
    if changed:
        names = {"base_lrs": "initial_lr", "_last_lr": "lr"}
        now = {name: [group[of_group] for group in optimizer.param_groups] for name, of_group in names.items()}
        scheduler.load_state_dict(scheduler.state_dict() | now)


@dataclass(frozen=True)
class GradientClipper:
    """Clips the gradients of actor and critic apart, so that a large one does not shrink the other's step."""

    model: ActorCritic
    accelerator: Accelerator
    guard: NonFiniteGuard

    def clip(self, max_norm: float, optimizer: Optimizer, step: int) -> tuple[Tensor, Measures]:
        """Clip both gradients; return the actor's norm, the critic's in critic-only steps, and the critic's measures.

        DeepSpeed has clipped both together before this call; then the joint norm is returned.

        Args:
            max_norm: inf measures without clipping.
            step: number of the step, for errors.
        Raises:
            NonFiniteError: a loss or gradient is not finite on some process.
        """
        self.accelerator.unscale_gradients()
        parameters = {"actor": self.model.actor_parameters(), "critic": self.model.critic_parameters()}
        norms = measure_grad_norms(self.accelerator, parameters)
        measures: Measures = {}
        if parameters["critic"]:
            measures["critic_learning_rate"] = parts_of(critic_learning_rate(optimizer, parameters["critic"]))
        if "critic" in norms:
            measures["value/grad_norm"] = parts(norms["critic"])
        self.guard.check(norms, self.model, step)
        for name, norm in norms.items():
            nn.utils.clip_grads_with_norm_(parameters.get(name, []), max_norm, norm)
        return next(iter(norms.values())), measures


def measure_grad_norms(accelerator: Accelerator, parameters: dict[str, list[nn.Parameter]]) -> dict[str, Tensor]:
    """Return the gradient norm per owner (actor, critic) with gradients; DeepSpeed reports the joint norm only."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        norm = float(accelerator.clip_grad_norm_([], 0.0))  # it clips nothing here
        return {"whole model": torch.tensor(norm, dtype=torch.float32, device=accelerator.device)}
    some = {name: owned for name, owned in parameters.items() if owned}
    moved = {name: owned for name, owned in some.items() if any(p.grad is not None for p in owned)}
    return {name: measure_grad_norm(owned).to(accelerator.device) for name, owned in (moved or some).items()}


def measure_grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the joint norm of all their gradients."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # over all shards


@dataclass
class StepHooks:
    """Calls functions before and after each optimizer step.

    Trainer's events come too late for DeepSpeed, which has made its step by then.
    """

    before: Callable[[], None]
    after: Callable[[], None]
    handles: list[RemovableHandle] = field(default_factory=list)

    def attach(self, optimizer: Any) -> None:
        """Follow this optimizer, and no longer the one before."""
        while hasattr(optimizer, "optimizer"):  # accelerate and DeepSpeed wrap it
            optimizer = optimizer.optimizer
        for handle in self.handles:
            handle.remove()
        self.handles = [
            optimizer.register_step_pre_hook(lambda *_: self.before()),
            optimizer.register_step_post_hook(lambda *_: self.after()),
        ]


@dataclass
class ActorRate:
    """Scales the actor's learning rate for one optimizer step.

    The schedule computes the next rate from the unscaled one, which is put back to the bit.
    """

    parameters: list[nn.Parameter]
    before: list[float] = field(default_factory=list)  # the rate of each of the actor's groups

    def groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the groups with the actor's parameters."""
        ids = {id(p) for p in self.parameters}
        return [group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"])]

    def scale(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply the rates."""
        groups = [] if factor == 1.0 else self.groups(optimizer)
        self.before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= factor

    def restore(self, optimizer: Optimizer) -> None:
        """Put the rates back."""
        for group, rate in zip(self.groups(optimizer) if self.before else [], self.before, strict=True):
            group["lr"] = rate
