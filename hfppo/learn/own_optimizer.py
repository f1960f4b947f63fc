"""An optimizer that a user has made over a PeftModel, which the trainer unloads and builds anew."""

import re

from peft import PeftModel
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hfppo.models.actor_critic import ActorCritic

Optimizers = tuple[Optimizer | None, LambdaLR | None]


def names_of_parameters(model: object) -> dict[int, str]:
    """Return the names of a PeftModel's parameters by their id, with its adapter called "default"; of others none."""
    if not isinstance(model, PeftModel):
        return {}
    adapter = re.compile(rf"\.{re.escape(model.active_adapter)}(?=\.|$)")
    return {id(parameter): adapter.sub(".default", name) for name, parameter in model.named_parameters()}


def take_over(optimizers: Optimizers, names: dict[int, str], model: ActorCritic, critic_lr: float | None) -> None:
    """Let a user's optimizer, made over a PeftModel, train the actor made from that model, and the critic.

    The optimizer keeps its groups, without frozen weights. The critic's weights become the last group, with the first
    group's schedule.

    Args:
        names: as `names_of_parameters` returned them before the model was unloaded.
        critic_lr: None: the first group's.
    Raises:
        ValueError: the optimizer holds other weights, or the scheduler cannot be used.
    """
    optimizer, scheduler = optimizers
    if scheduler is not None and (optimizer is None or scheduler.optimizer is not optimizer):
        raise ValueError(
            "optimizers holds a scheduler whose optimizer it does not hold, so the scheduler would change nothing; "
            "give both, or set lr_scheduler_type and lr_scheduler_kwargs"
        )
    if optimizer is None:
        return
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ours = {id(parameter): trained[name] for parameter in given if (name := names.get(id(parameter), "")) in trained}
    if not ours:
        raise ValueError(
            "optimizers holds an optimizer over no weight that is trained, because the adapter is made in PPOTrainer; "
            "give model as a PeftModel and the optimizer over its parameters, or set optim and optim_args, override "
            "create_optimizer, or set trainer.optimizer to one over trainer.model's parameters"
        )
    for group in optimizer.param_groups:
        group["params"] = [ours[id(parameter)] for parameter in group["params"] if id(parameter) in ours]
    for parameter in given:
        state = optimizer.state.pop(parameter, None)
        if state and id(parameter) in ours:
            optimizer.state[ours[id(parameter)]] = state
    if critic := model.critic_parameters():
        first = optimizer.param_groups[0]
        lr = first.get("initial_lr", first["lr"]) if critic_lr is None else critic_lr
        add_critic_group(optimizer, scheduler, critic, lr)


def add_critic_group(optimizer: Optimizer, scheduler: LambdaLR | None, critic: list[nn.Parameter], lr: float) -> None:
    """Add the critic's parameters to a user's optimizer, and to its schedule.

    Raises:
        ValueError: the scheduler is no LambdaLR.
    """
    if scheduler is None:
        optimizer.add_param_group({"params": critic, "lr": lr})
        return
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"optimizers holds a {type(scheduler).__name__}, which cannot be extended to the critic's parameters; "
            "give a LambdaLR, such as transformers.get_scheduler returns, or set lr_scheduler_type"
        )
    schedule = scheduler.lr_lambdas[0]
    now = lr * schedule(scheduler.last_epoch)
    optimizer.add_param_group({"params": critic, "lr": now, "initial_lr": lr})
    scheduler.lr_lambdas.append(schedule)
    scheduler.base_lrs.append(lr)
    scheduler.load_state_dict(scheduler.state_dict() | {"_last_lr": [*scheduler.get_last_lr(), now]})
