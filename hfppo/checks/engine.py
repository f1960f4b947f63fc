"""Raise if nn.DataParallel, FSDP2 or DeepSpeed cannot train with the settings."""

import atexit
import functools
import math
import sys
import time
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed import destroy_process_group, get_world_size, is_initialized
from torch.distributed.fsdp import StateDictType

from hfppo.config import PPOConfig
from hfppo.models.actor_critic import ActorCritic
from hfppo.rewards.model import RewardAdapter
from hfppo.rewards.reward_func import RewardFunc, unwrap
from hfppo.support.refusals import raise_first


def check_engine(
    accelerator: Accelerator, model: ActorCritic, reward_funcs: list[RewardFunc], args: PPOConfig, has_agent: bool
) -> None:
    """Raise if the engine cannot train with the settings, before anything is computed.

    With several GPUs in one process Trainer uses nn.DataParallel, which returns tensors only.

    Raises:
        ValueError: the engine does not support a setting.
    """
    started = get_world_size() if is_initialized() else 1
    faults: dict[str, object] = {
        f"one process sees {args.n_gpu} GPUs, and Trainer would split its batches among them; start a process per GPU "
        f"with accelerate launch --num_processes {args.n_gpu}, or use one GPU with CUDA_VISIBLE_DEVICES=0": (
            args.n_gpu > 1
        ),
        f"the launcher started {started} processes, but Trainer connects only {args.world_size}; on CPUs set "
        "use_cpu=True": started > args.world_size,
    }
    state, kind = accelerator.state, accelerator.distributed_type
    for name in ("tp_size", "cp_size", "sp_size"):
        size = getattr(accelerator.parallelism_config, name, 1)
        fault = f"parallelism_config.{name}={size}: each process computes whole layers of completions of its own"
        faults[f"{fault}; leave it out, and set dp_shard_size and dp_replicate_size only"] = size > 1
    if kind == DistributedType.FSDP:
        faults |= fsdp_faults(accelerator, model, args) | whole_faults("FSDP2", reward_funcs, args, has_agent)
    elif kind == DistributedType.DEEPSPEED:
        faults |= deepspeed_faults(state.deepspeed_plugin.deepspeed_config, args, has_agent)
        if state.deepspeed_plugin.zero_stage == 3:
            faults |= whole_faults("ZeRO-3", reward_funcs, args, has_agent)
    elif args.world_size > 1:
        faults |= ddp_faults(args)
    raise_first(faults)
    if kind == DistributedType.DEEPSPEED:
        state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = largest_norm(args)
    elif kind == DistributedType.FSDP and (policy := state.fsdp_plugin.mixed_precision_policy) is not None:
        # accelerate's policy rounds the outputs and the sums of gradients
        state.fsdp_plugin.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)


def ddp_faults(args: PPOConfig) -> dict[str, object]:
    """Return errors of settings with which DDP fails after the first rollout, and whether they are set."""
    # During the warmup the actor's loss has weight 0, so DDP still sees its gradients.
    alone = [name for name in steps_of_one(args) if not name.startswith("critic_warmup")]
    return {
        f"{' and '.join(alone)} leaves some weights without gradients, and DDP waits for them with "
        "ddp_find_unused_parameters=False; set ddp_find_unused_parameters=True": (
            alone and args.ddp_find_unused_parameters is False
        )
    }


def whole_faults(engine: str, reward_funcs: list[RewardFunc], args: PPOConfig, has_agent: bool) -> dict[str, object]:
    """Return errors of parts that need whole weights, which FSDP2 and ZeRO-3 shard, and whether they are there.

    A shard has one owner, so a second module tree, as of a reward adapter, cannot use the same tensors. All processes
    forward together, and agents of different processes call at different times.
    """
    reward_adapter = any(isinstance(unwrap(func), RewardAdapter) for func in reward_funcs)
    parts = {
        "a reward adapter": (reward_adapter, "merge it into its base and give the merged model"),
        "agent": (has_agent, "give tools or an environment"),
        "vllm_mode='colocate'": (args.use_vllm and args.vllm_mode == "colocate", "set vllm_mode='server'"),
        "rollouts_ahead=1": (args.rollouts_ahead, "set rollouts_ahead=0"),
    }
    return {
        f"{name} needs whole weights, which {engine} shards; {remedy}, or use DDP or ZeRO-2, which keep them whole": (
            is_used
        )
        for name, (is_used, remedy) in parts.items()
    }


def fsdp_faults(accelerator: Accelerator, model: ActorCritic, args: PPOConfig) -> dict[str, object]:
    """Return errors of version 1 and of settings that break saving or resuming, and whether they are set.

    FSDP2 cannot load an optimizer that lacks the state of some weights, and weights without gradients have no state.
    """
    plugin = accelerator.state.fsdp_plugin
    kind = plugin.state_dict_type
    return {
        "FSDP version 1 is not supported; set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does": (
            not accelerator.is_fsdp2
        ),
        f"with fsdp_state_dict_type: {kind.name} neither adapter nor critic would be saved; set it to "
        "FULL_STATE_DICT, as recipes/accelerate/fsdp2.yaml does": kind != StateDictType.FULL_STATE_DICT,
        "fsdp_activation_checkpointing renames the layers, and the saved adapter would be empty; leave it out, and "
        "set activation_checkpointing=True (--activation_checkpointing)": plugin.activation_checkpointing,
        "FSDP2 cannot shard trainable_token_indices; leave it out of peft_config, or use DDP or ZeRO-2": (
            getattr(model.peft_config["default"], "trainable_token_indices", None)
        ),
        "vf_coef=0 freezes the critic, but FSDP2 cannot load a checkpoint lacking its optimizer state; use an "
        "advantage_estimator without a critic, or DDP": model.critic is not None and args.vf_coef == 0,
        **fault_of_steps(args, "FSDP2 cannot load a checkpoint lacking the other's optimizer state"),
    }


def deepspeed_faults(config: dict, args: PPOConfig, has_agent: bool) -> dict[str, object]:
    """Return errors of settings that need control of gradients or steps, and whether they are set.

    Args:
        config: DeepSpeed's.
    """
    clips_at, max_grad_norm = config.get("gradient_clipping", "auto"), largest_norm(args)
    as_given = clips_at in ("auto", max_grad_norm, args.max_grad_norm)  # Trainer has written the last one
    return {
        "max_tokens_per_micro_batch needs DDP or FSDP2; with DeepSpeed, lower per_device_train_batch_size and raise "
        "gradient_accumulation_steps instead": args.max_tokens_per_micro_batch is not None,
        "agent: its episodes have different numbers of conversations, but DeepSpeed's processes run equally many "
        "backward passes; use DDP, or give tools or an environment": has_agent,
        **fault_of_steps(args, "DeepSpeed's optimizer would change the other's weights by weight decay and momentum"),
        "DeepSpeed's config has an optimizer, which ignores critic_learning_rate and the callbacks' events; leave it "
        "out, and set optim and learning_rate": "optimizer" in config,
        "compute_grad_norm=False in DeepSpeed's config hides gradients that are not finite; leave it out": (
            not config.get("zero_optimization", {}).get("compute_grad_norm", True)
        ),
        f"DeepSpeed's gradient_clipping={clips_at} and max_grad_norm={max_grad_norm} are not the same; leave "
        "gradient_clipping out, or set both": not as_given,
    }


def largest_norm(args: PPOConfig) -> float:
    """Return max_grad_norm as DeepSpeed takes it: 0 for no clipping."""
    return args.max_grad_norm if math.isfinite(args.max_grad_norm) else 0.0


def fault_of_steps(args: PPOConfig, problem: str) -> dict[str, object]:
    """Return the error if some steps train only the actor or only the critic, which is a problem of the engine."""
    alone = steps_of_one(args)
    return {
        f"with {' and '.join(alone)} some steps train only the actor or the critic, but {problem}; leave it out, or "
        "use DDP": alone
    }


def steps_of_one(args: PPOConfig) -> list[str]:
    """Return the settings that make some steps train only the actor or only the critic."""
    are_set = {
        "critic_warmup": args.critic_warmup,
        "critic_pretraining_completions": args.critic_pretraining_completions,
        "num_critic_epochs": args.critic_epochs != args.num_ppo_epochs,
        "critic_update": args.critic_follows,
    }
    return [f"{name}={getattr(args, name)}" for name, is_set in are_set.items() if is_set]


@functools.cache  # once is enough, however many trainers there are
def end_at_exit() -> None:
    """Destroy the process group at the exit of the interpreter, unless an error ends it, and sleep for half a second.

    Gloo's threads may still reference a Python object of the last collective, even after the group is destroyed. If a
    thread releases it during the shutdown, the process aborts (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit.register(end_group)


def end_group() -> None:
    """Destroy the process group, if there still is one and no error has ended the script: others may wait in it."""
    if is_initialized() and not hasattr(sys, "last_value"):
        destroy_process_group()
    time.sleep(0.5)
