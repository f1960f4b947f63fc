"""The optimizer: groups, learning rates and gradient norms of actor and critic."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hfppo.models.modes import whole

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


def groups_of(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the groups that have some of the parameters; a user's optimizer may mix actor and critic."""
    ids = {id(p) for p in parameters}
    return [group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"])]


def present_rate(optimizer: Optimizer, parameters: list[nn.Parameter], otherwise: int) -> float:
    """Return the present learning rate of parameters.

    Args:
        otherwise: index of the parameters' group, if an engine has replaced the parameters by its own tensors.
    """
    return [*groups_of(optimizer, parameters), optimizer.param_groups[otherwise]][0]["lr"]


@contextmanager
def keep_own_settings(optimizer: Optimizer, scheduler: LRScheduler) -> Iterator[None]:
    """Keep this run's learning rates, weight decay, betas and eps while optimizer and scheduler state is loaded.

    Trainer would continue with the checkpoint's settings, not this run's. Equal settings are not changed.
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
    return whole(norm)
