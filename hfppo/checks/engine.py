"""Refuse settings that nn.DataParallel, FSDP2 or DeepSpeed cannot train with; let processes end without an abort."""

import atexit
import functools
import math
import time
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import StateDictType

from hfppo.config import PPOConfig
from hfppo.models.actor_critic import ActorCritic
from hfppo.rewards.model import RewardAdapter
from hfppo.rewards.reward_func import unwrap

ONE_ALONE = ("critic_warmup", "critic_pretraining_completions")


def check_engine(accelerator: Accelerator, model: ActorCritic, reward_funcs: list[Any], args: PPOConfig) -> None:
    """Refuse settings that the engine cannot train with, before anything is computed.

    FSDP2 and ZeRO-3 replace a module's tensors by shards with one owner each, so a second module tree cannot use the
    same tensors. DeepSpeed counts backward passes itself, so a micro-batch cannot be cut further. With several GPUs in
    one process Trainer uses nn.DataParallel, which returns tensors only.

    Raises:
        ValueError: names the settings, and a supported combination.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, among which Trainer would split its batches; start a process for "
            f"each by accelerate launch --num_processes {args.n_gpu}, or show it one by CUDA_VISIBLE_DEVICES=0"
        )
    kind, critic = accelerator.distributed_type, model.critic
    deepspeed = accelerator.state.deepspeed_plugin if kind == DistributedType.DEEPSPEED else None
    if kind == DistributedType.FSDP:
        check_fsdp(accelerator, model, args)
    if kind == DistributedType.FSDP or (deepspeed is not None and deepspeed.zero_stage == 3):
        engine = "FSDP2" if deepspeed is None else "ZeRO-3"
        if critic is not None and critic.kind == "adapter":
            raise ValueError(
                f"critic='adapter' is a second module tree over the base's tensors, which {engine} cannot shard; "
                "use critic='shared' or a separate model, or DDP or ZeRO-2, which do not shard weights"
            )
        if any(isinstance(unwrap(func), RewardAdapter) for func in reward_funcs):
            raise ValueError(
                f"a reward adapter is a second module tree over the base's tensors, which {engine} cannot shard; "
                "merge it into its base and give the merged model, or use DDP or ZeRO-2, which do not shard weights"
            )
        if args.use_vllm:
            raise ValueError(
                f"use_vllm sends the adapter whole, and {engine} keeps shards of it; set use_vllm=False, or use DDP "
                "or ZeRO-2, which do not shard weights"
            )
    if deepspeed is not None:
        check_deepspeed(deepspeed.deepspeed_config, args)
    if args.critic_epochs != args.num_ppo_epochs and args.world_size > 1 and args.ddp_find_unused_parameters is False:
        raise ValueError(
            f"num_critic_epochs={args.num_critic_epochs} with num_ppo_epochs={args.num_ppo_epochs} leaves weights "
            "without gradients, which DDP waits for with ddp_find_unused_parameters=False; set it to True"
        )


def check_fsdp(accelerator: Accelerator, model: ActorCritic, args: PPOConfig) -> None:
    """Refuse version 1 and settings that break saving or resuming; keep log-probs and values in float32.

    FSDP2 loads no optimizer that lacks the state of some weights, and weights without gradients have none.

    Raises:
        ValueError: names the field, and what to do instead.
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
    for setting, off in steps_of_one(args).items():
        raise ValueError(
            f"{setting} moves actor or critic alone, and FSDP2 could load no checkpoint from that time, since the "
            f"optimizer has no state for the other; set {off}, or use DDP"
        )
    critic = model.critic
    if critic is not None and args.vf_coef == 0:
        raise ValueError(
            "vf_coef=0 holds the critic still, and FSDP2 could load no checkpoint, since the optimizer has no "
            "state for it; take an advantage_estimator without a critic, or DDP"
        )
    keep_float32(plugin)


def steps_of_one(args: PPOConfig) -> dict[str, str]:
    """Return the settings by which some steps move the actor or the critic alone, each with what turns it off."""
    found = {f"{name}={getattr(args, name)}": f"{name}=0" for name in ONE_ALONE if getattr(args, name)}
    if args.critic_epochs != args.num_ppo_epochs:
        found[f"num_critic_epochs={args.num_critic_epochs}"] = f"num_critic_epochs={args.num_ppo_epochs}"
    return found


def keep_float32(plugin: FullyShardedDataParallelPlugin) -> None:
    """Keep the model's outputs and the sums of gradients in float32; accelerate's policy would round them."""
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32
        )


def check_deepspeed(config: dict[str, Any], args: PPOConfig) -> None:
    """Refuse settings that need control of gradients and steps, which DeepSpeed keeps; set its clipping.

    Args:
        config: DeepSpeed's; gradient_clipping is written into it.
    Raises:
        ValueError: names the field, and what to do instead.
    """
    if args.max_tokens_per_micro_batch is not None:
        raise ValueError(
            "max_tokens_per_micro_batch needs DDP or FSDP2; with DeepSpeed, lower per_device_train_batch_size and "
            "raise gradient_accumulation_steps instead"
        )
    for setting, off in steps_of_one(args).items():
        raise ValueError(
            f"{setting} moves actor or critic alone, and DeepSpeed's optimizer would move the other by weight decay "
            f"and momentum; set {off}, or use DDP"
        )
    if "optimizer" in config:
        raise ValueError(
            "DeepSpeed's config has an optimizer, which knows neither critic_learning_rate nor the callbacks' events; "
            "leave it out, and choose by optim and learning_rate"
        )
    if not config.get("zero_optimization", {}).get("compute_grad_norm", True):
        raise ValueError(
            "compute_grad_norm=False in DeepSpeed's config hides gradients that are not finite; leave it out"
        )
    clips_at = config.get("gradient_clipping", "auto")
    max_grad_norm = args.max_grad_norm if math.isfinite(args.max_grad_norm) else 0.0  # as DeepSpeed has it
    if clips_at not in ("auto", max_grad_norm):
        raise ValueError(
            f"DeepSpeed's gradient_clipping={clips_at} and max_grad_norm={max_grad_norm} are not the same; leave "
            "gradient_clipping out, or set both"
        )
    config["gradient_clipping"] = max_grad_norm


@functools.cache  # one wait is enough, however many trainers there are
def wait_at_exit() -> None:
    """Let this process, one of several, sleep for half a second before the interpreter shuts down.

    Gloo's threads may still hold an object of Python's from the last collective, also when the group is destroyed.
    One that drops it during the shutdown aborts the process (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit.register(time.sleep, 0.5)
