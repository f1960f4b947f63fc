"""Raise if nn.DataParallel, FSDP2 or DeepSpeed cannot train with the settings."""

import atexit
import functools
import math
import time
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed import get_world_size, is_initialized
from torch.distributed.fsdp import StateDictType

from hfppo.config import PPOConfig
from hfppo.models.actor_critic import ActorCritic
from hfppo.rewards.model import RewardAdapter
from hfppo.rewards.reward_func import RewardFunc, unwrap

# With these some steps train only the actor or only the critic.
ONE_ALONE = ("critic_warmup", "critic_pretraining_completions", "num_critic_epochs")


def check_engine(
    accelerator: Accelerator, model: ActorCritic, reward_funcs: list[RewardFunc], args: PPOConfig
) -> None:
    """Raise if the engine cannot train with the settings, before anything is computed.

    With several GPUs in one process Trainer uses nn.DataParallel, which returns tensors only.

    Raises:
        ValueError: the engine does not support a setting.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, and Trainer would split its batches among them; start a process per "
            f"GPU with accelerate launch --num_processes {args.n_gpu}, or use one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if is_initialized() and (started := get_world_size()) > args.world_size:
        raise ValueError(
            f"the launcher started {started} processes, but Trainer connects only {args.world_size}; on CPUs set "
            "use_cpu=True"
        )
    if "underflow_overflow" in args.debug:
        raise ValueError("debug='underflow_overflow' cannot read masks; leave it out: NonFiniteError names the row")
    if torch.__future__.get_overwrite_module_params_on_conversion():
        raise ValueError(
            "torch.__future__.set_overwrite_module_params_on_conversion(True) replaces weights that the optimizer and "
            "the critic share; set it to False"
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        check_fsdp(accelerator, model, args)
        check_whole("FSDP2", reward_funcs, args)
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        if plugin.zero_stage == 3:
            check_whole("ZeRO-3", reward_funcs, args)
        check_deepspeed(plugin.deepspeed_config, args)
    elif args.world_size > 1:
        check_ddp(args)


def check_ddp(args: PPOConfig) -> None:
    """Raise ValueError for settings with which DDP fails after the first rollout."""
    # During the warmup the actor's loss has weight 0, so DDP still sees its gradients.
    alone = [name for name in steps_of_one(args) if not name.startswith("critic_warmup")]
    finds = args.ddp_find_unused_parameters is not False
    if alone and not finds:
        raise ValueError(
            f"{alone[0]} leaves some weights without gradients, and DDP waits for them with "
            "ddp_find_unused_parameters=False; set ddp_find_unused_parameters=True"
        )
    if finds and cast(dict[str, Any], args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "use_reentrant=True of activation_checkpointing_kwargs computes a gradient in several backward passes, "
            "and DDP takes one; set it to False"
        )


def check_whole(engine: str, reward_funcs: list[RewardFunc], args: PPOConfig) -> None:
    """Raise if a part needs whole weights but FSDP2 or ZeRO-3 shards them.

    A shard has one owner, so a second module tree, as of a reward adapter, cannot use the same tensors.

    Raises:
        ValueError: a part that cannot be sharded would be.
    """
    reward_adapter = any(isinstance(unwrap(func), RewardAdapter) for func in reward_funcs)
    for is_used, name, remedy in (
        (reward_adapter, "a reward adapter", "merge it into its base and give the merged model"),
        (args.use_vllm, "use_vllm=True", "set use_vllm=False"),
        (args.rollouts_ahead, "rollouts_ahead=1", "set rollouts_ahead=0"),
    ):
        if is_used:
            raise ValueError(
                f"{name} needs whole weights, which {engine} shards; {remedy}, or use DDP or ZeRO-2, which keep them "
                "whole"
            )


def check_fsdp(accelerator: Accelerator, model: ActorCritic, args: PPOConfig) -> None:
    """Raise for version 1 and for settings that break saving or resuming; keep log-probs and values in float32.

    FSDP2 cannot load an optimizer that lacks the state of some weights, and weights without gradients have no state.

    Raises:
        ValueError: a setting breaks saving, resuming or the optimizer step.
    """
    if not accelerator.is_fsdp2:
        raise ValueError("FSDP version 1 is not supported; set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does")
    plugin = accelerator.state.fsdp_plugin
    if plugin.state_dict_type != StateDictType.FULL_STATE_DICT:
        raise ValueError(
            f"with fsdp_state_dict_type: {plugin.state_dict_type.name} neither adapter nor critic would be saved; set "
            "it to FULL_STATE_DICT, as recipes/accelerate/fsdp2.yaml does"
        )
    if plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing renames the layers, and the saved adapter would be empty; leave it out, "
            "and set activation_checkpointing=True (--activation_checkpointing)"
        )
    if getattr(model.peft_config["default"], "trainable_token_indices", None):
        raise ValueError(
            "FSDP2 cannot shard trainable_token_indices; leave it out of peft_config, or use DDP or ZeRO-2"
        )
    if model.critic is not None and args.vf_coef == 0:
        raise ValueError(
            "vf_coef=0 freezes the critic, but FSDP2 cannot load a checkpoint lacking its optimizer state; use an "
            "advantage_estimator without a critic, or DDP"
        )
    check_steps(args, "FSDP2 cannot load a checkpoint lacking the other's optimizer state")
    if plugin.mixed_precision_policy is not None:  # accelerate's rounds the outputs and the sums of gradients
        policy = replace(plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32)
        plugin.mixed_precision_policy = policy


def check_steps(args: PPOConfig, problem: str) -> None:
    """Raise ValueError if some steps train only the actor or only the critic, which is a problem of the engine."""
    if alone := steps_of_one(args):
        raise ValueError(
            f"with {alone[0]} some steps train only the actor or the critic, but {problem}; leave it out, or use DDP"
        )


def steps_of_one(args: PPOConfig) -> list[str]:
    """Return the settings that make some steps train only the actor or only the critic."""
    names = ONE_ALONE if args.critic_epochs != args.num_ppo_epochs else ONE_ALONE[:2]
    return [f"{name}={getattr(args, name)}" for name in names if getattr(args, name)]


def check_deepspeed(config: dict, args: PPOConfig) -> None:
    """Raise if a setting needs control of gradients or steps, which DeepSpeed does not give; set its clipping.

    Args:
        config: DeepSpeed's; gradient_clipping is written into it.
    Raises:
        ValueError: a setting breaks saving, resuming or the optimizer step.
    """
    if args.max_tokens_per_micro_batch is not None:
        raise ValueError(
            "max_tokens_per_micro_batch needs DDP or FSDP2; with DeepSpeed, lower per_device_train_batch_size and "
            "raise gradient_accumulation_steps instead"
        )
    check_steps(args, "DeepSpeed's optimizer would change the other's weights by weight decay and momentum")
    if "optimizer" in config:
        raise ValueError(
            "DeepSpeed's config has an optimizer, which ignores critic_learning_rate and the callbacks' events; "
            "leave it out, and set optim and learning_rate"
        )
    if not config.get("zero_optimization", {}).get("compute_grad_norm", True):
        raise ValueError(
            "compute_grad_norm=False in DeepSpeed's config hides gradients that are not finite; leave it out"
        )
    clips_at = config.get("gradient_clipping", "auto")
    max_grad_norm = args.max_grad_norm if math.isfinite(args.max_grad_norm) else 0.0  # no clipping
    if clips_at not in ("auto", max_grad_norm, args.max_grad_norm):  # Trainer has written the last one
        raise ValueError(
            f"DeepSpeed's gradient_clipping={clips_at} and max_grad_norm={max_grad_norm} are not the same; leave "
            "gradient_clipping out, or set both"
        )
    config["gradient_clipping"] = max_grad_norm


@functools.cache  # one wait is enough, however many trainers there are
def wait_at_exit() -> None:
    """Sleep for half a second at the exit of the interpreter, in runs of several processes.

    Gloo's threads may still reference a Python object of the last collective, even after the group is destroyed. If a
    thread releases it during the shutdown, the process aborts (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit.register(time.sleep, 0.5)
