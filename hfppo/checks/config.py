"""Checks of `PPOConfig`: types, ranges, names, and fields that contradict each other."""

import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch

from hfppo.functional import estimator_needs
from hfppo.support.secrets import find_secret, is_secret


@dataclass(frozen=True)
class Requirement:
    """A condition on a number and its error text; NaN is rejected earlier."""

    text: str
    is_met: Callable[[float], bool]


AT_LEAST_0 = Requirement("at least 0", lambda x: x >= 0)
AT_LEAST_1 = Requirement("at least 1", lambda x: x >= 1)

# Requirements on fields of TrainingArguments; PPOConfig's own are in its annotations.
INHERITED_REQUIREMENTS = {
    "per_device_train_batch_size": AT_LEAST_1,
    "per_device_eval_batch_size": AT_LEAST_1,
    "gradient_accumulation_steps": AT_LEAST_1,
    "max_grad_norm": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "seed": AT_LEAST_0,
}

# Arguments of `apply_chat_template` that follow from the prompt.
SET_BY_RENDERING = {"tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}

TRL_VALUES = {"scale_rewards='group'": "; it is True here", "scale_rewards='none'": "; it is False here"}
# The keys of `generation_kwargs`, with what their lists hold.
STOPS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "stop_strings": (str, bool, "texts that are not empty"),
    "stop_token_ids": (int, lambda x: x >= 0, "token ids"),
}
# Arguments of `generate` and vLLM that have a field of their own, or another key.
OTHER_FIELDS = {
    "temperature": "a field of PPOConfig",
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "max_tokens": "max_completion_length",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
    "do_sample": "eval_do_sample",
    "eos_token_id": "stop_token_ids",
    "stop": "stop_strings",
    "seed": "a field of PPOConfig",
}

METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")  # schedulers that read an evaluation's metric
TEXT_OR_NONE = (str | None, dict | str | None, dict[str, Any] | str | None)


def is_number(x: Any) -> bool:
    """Return whether x is a finite number; a bool is none."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


TYPES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda x: isinstance(x, bool), "must be True or False"),
    int: (lambda x: isinstance(x, int) and not isinstance(x, bool), "must be a whole number"),
    float: (is_number, "must be a finite number"),
    list[float]: (lambda x: isinstance(x, list | tuple) and all(map(is_number, x)), "must be a list of numbers"),
    dict[str, Any] | str: (lambda x: isinstance(read_json(x), dict), "must be a dictionary, or JSON of one"),
}

# Fields of TrainingArguments that PPO cannot use; each is refused unless it has its default.
EVALUATION = "an evaluation samples completions and scores them, and does no pass with labels; leave it out"
LOADER = "prompts are read and tokenized without a dataloader; leave it out"
ORDER = "the order of the prompts follows from seed alone; leave it out"
LOSS = "the losses are PPO's, which have no labels; leave it out"
FULL_EVAL = "it would cast the model that is trained; set model_init_kwargs={'dtype': 'bfloat16'} or float16 instead"
LOADER_KEYS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
UNUSABLE_FIELDS = {
    "auto_find_batch_size": "it would change the size of rollouts in the middle of a run; lower "
    "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor, which changes no gradient",
    "neftune_noise_alpha": "it would add noise to the update's pass and not to the rollout's, so that their ratio "
    "would be noise; leave it out",
    "bf16_full_eval": FULL_EVAL,
    "fp16_full_eval": FULL_EVAL,
    "label_smoothing_factor": LOSS,
    "label_names": LOSS,
    "train_sampling_strategy": ORDER,
    "length_column_name": ORDER,
    "data_seed": ORDER,
    "average_tokens_across_devices": "losses are divided by the tokens of all processes; leave it out",
    "use_cache": "sampling always keeps a cache, and the passes over whole completions never; leave it out",
    "ignore_data_skip": "a resumed run goes on with its next prompts, and skips nothing; leave it out",
    "parallelism_config": "tensor, context and sequence parallelism are not supported; use DDP, FSDP2 or ZeRO, as "
    "docs/distributed.md says",
    "remove_unused_columns": "all columns reach the reward functions; leave it out",
    "dataloader_drop_last": LOADER,
    "dataloader_num_workers": LOADER,
    "dataloader_persistent_workers": LOADER,
    "dataloader_prefetch_factor": LOADER,
    "dataloader_multiprocessing_context": LOADER,
    "dataloader_in_order": LOADER,
    "prediction_loss_only": EVALUATION,
    "include_for_metrics": EVALUATION,
    "batch_eval_metrics": EVALUATION,
    "eval_accumulation_steps": EVALUATION,
    "eval_do_concat_batches": EVALUATION,
    "eval_use_gather_object": EVALUATION,
}


def check_fields(args: Any) -> None:
    """Check types, ranges and choices before TrainingArguments uses the values.

    NumPy's scalars become Python's. The texts "None" and "null" become None where a command line has no other way.

    Raises:
        ValueError: names the field, its value and the requirement.
    """
    hints = get_type_hints(type(args), include_extras=True)  # HfArgumentParser writes other types into the fields
    plain = get_type_hints(type(args))
    for f in fields(args):
        value, kind = getattr(args, f.name), plain[f.name]
        if isinstance(value, np.generic):
            value = value.item()
        if kind in TEXT_OR_NONE and value in ("None", "none", "null"):
            value = None
        setattr(args, f.name, value)
        if value is None and (f.default is None or NoneType in get_args(kind)):
            continue
        for wanted, (is_met, demand) in TYPES.items():
            if kind in (wanted, wanted | None) and not is_met(value):
                given = f"{f.name}={value!r}"
                text_in_yaml = wanted is float and isinstance(value, str)
                hint = "; YAML wants 1.0e-5, and takes 1e-5 for text" if text_in_yaml else TRL_VALUES.get(given, "")
                raise ValueError(f"{given} {demand}{hint}")
        choices = get_args(kind) if get_origin(kind) is Literal else f.metadata.get("choices")
        if choices is not None and value not in choices:
            raise ValueError(f"{f.name}={value!r} is unknown; choose from {', '.join(choices)}")
        for requirement in requirements(f.name, hints[f.name]):
            if not requirement.is_met(value):
                raise ValueError(f"{f.name}={value!r} must be {requirement.text}")


def requirements(name: str, hint: Any) -> list[Requirement]:
    """Return the requirements on a field, from its annotation or from INHERITED_REQUIREMENTS."""
    annotated = [extra for part in (hint, *get_args(hint)) for extra in getattr(part, "__metadata__", ())]
    return [*annotated, INHERITED_REQUIREMENTS[name]] if name in INHERITED_REQUIREMENTS else annotated


def read_json(value: Any) -> Any:
    """Return the JSON value of a text, and anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def check_config(args: Any) -> None:
    """Check that the fields agree with each other, and that PPO can use them.

    Raises:
        ValueError: names the fields, their values and the remedy.
    """
    check_secrets(args)
    check_combinations(args)
    check_critic(args)
    check_dtypes(args)
    check_inherited(args)
    check_processes(args)


def check_secrets(args: Any) -> None:
    """Raise ValueError if a setting other than `hub_token`, which TrainingArguments hides, holds a secret."""
    settings = {f.name: getattr(args, f.name) for f in fields(args) if f.name != "hub_token"}
    for name, value in settings.items():
        if (place := name if is_secret(name, value) else find_secret(value, name)) is not None:
            raise ValueError(
                f"{place} holds a secret, which checkpoints, the model card and trackers would show; leave it out. "
                "Downloads use the token of `hf auth login` or HF_TOKEN, pushes use hub_token; a reward function can "
                "read other keys from the environment"
            )


def check_combinations(args: Any) -> None:
    """Raise ValueError if fields contradict each other."""
    if estimator_needs(args.advantage_estimator, "groups") and args.num_generations < 2:
        raise ValueError(
            f"advantage_estimator={args.advantage_estimator!r} compares completions of one prompt, but "
            f"num_generations={args.num_generations}; raise num_generations to 2 or more"
        )
    if args.rollout_size_per_process % args.num_generations:
        raise ValueError(
            f"a rollout of {args.rollout_size_per_process} completions per process (per_device_train_batch_size="
            f"{args.per_device_train_batch_size} × gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} × num_mini_batches={args.num_mini_batches}) cannot be divided "
            f"into groups of num_generations={args.num_generations}; choose sizes that divide"
        )
    if args.kl_loss_coef and args.kl_loss_estimator == "k1":
        warnings.warn(
            "kl_loss_estimator='k1' has a gradient of zero mean as a loss: it adds noise and restrains nothing. "
            "Use k2, k3 or k1+, whose gradient is that of k2.",
            stacklevel=5,  # where the configuration is made
        )
    for field, parameter in (("gamma_turn", "gamma"), ("lam_turn", "lam")):
        value = getattr(args, field)
        if value is not None and not estimator_needs(args.advantage_estimator, parameter):
            raise ValueError(
                f"{field}={value!r} has no effect with advantage_estimator={args.advantage_estimator!r}, which takes "
                "the sum of a completion's rewards; leave it out, or set advantage_estimator='gae'"
            )
    if taken := sorted(SET_BY_RENDERING & set(args.chat_template_kwargs or {})):
        raise ValueError(
            f"chat_template_kwargs={args.chat_template_kwargs!r} sets {', '.join(taken)}, which follows from the "
            "prompt; leave it out"
        )
    check_generation_kwargs(args.generation_kwargs or {})


def check_generation_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuse all but stop strings and stop token ids."""
    for name, value in kwargs.items():
        if name not in STOPS:
            reason = "cannot be set: sampling is the policy's own distribution, and the trainer sets the rest"
            if name in OTHER_FIELDS:
                reason = f"is {OTHER_FIELDS[name]} here"
            raise ValueError(
                f"generation_kwargs={kwargs!r}: {name} {reason}; leave it out, the keys are {' and '.join(STOPS)}"
            )
        kind, condition, described = STOPS[name]
        good = isinstance(value, list) and bool(value)
        if not good or not all(isinstance(x, kind) and not isinstance(x, bool) and condition(x) for x in value):
            raise ValueError(f"generation_kwargs={kwargs!r}: {name} must be a list of {described}, at least one")


def check_critic(args: Any) -> None:
    """Raise ValueError if fields of the critic are set without a critic, or for one that learns nothing."""
    off_values = {"critic_warmup": 0, "critic_pretraining_completions": 0}
    for field, off in {**off_values, "num_critic_epochs": None, "critic_layers": None}.items():
        if (given := getattr(args, field)) and not args.needs_critic:
            raise ValueError(
                f"{field}={given} has no critic to train: advantage_estimator={args.advantage_estimator!r} works "
                f"without one; set {field}={off} or advantage_estimator='gae'"
            )
    if args.total_episodes is not None and args.rollouts_for(args.total_episodes) <= args.critic_pretraining_rollouts:
        raise ValueError(
            f"total_episodes={args.total_episodes} are used up by critic_pretraining_completions="
            f"{args.critic_pretraining_completions}, rounded up to rollouts; raise total_episodes"
        )
    if args.critic_pretraining_completions and args.vf_coef == 0:
        raise ValueError(
            f"critic_pretraining_completions={args.critic_pretraining_completions} fits the critic, and vf_coef=0 "
            "gives its loss no weight; raise vf_coef, or set critic_pretraining_completions=0"
        )
    if args.critic_epochs > args.num_ppo_epochs and args.vf_coef == 0:
        raise ValueError(
            f"num_critic_epochs={args.num_critic_epochs} are more than num_ppo_epochs={args.num_ppo_epochs}, and "
            "vf_coef=0 leaves the critic nothing to learn in them; raise vf_coef or lower num_critic_epochs"
        )


def check_dtypes(args: Any) -> None:
    """Raise ValueError if torch does not have a dtype."""
    for field in ("model_init_kwargs", "reward_model_init_kwargs"):
        for key in ("dtype", "torch_dtype"):
            dtype = (getattr(args, field) or {}).get(key, "auto")
            if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(
                    f"{field} has {key}={dtype!r}, no dtype of torch; choose auto, float32, bfloat16 or float16"
                )


def check_inherited(args: Any) -> None:
    """Raise ValueError if a field of Trainer's has a value that PPO cannot use."""
    for f in fields(args):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if f.name in UNUSABLE_FIELDS and (value := getattr(args, f.name)) != default:
            raise ValueError(f"{f.name}={value!r} cannot be used with PPO: {UNUSABLE_FIELDS[f.name]}")
    for name in LOADER_KEYS:
        if (value := getattr(args.accelerator_config, name)) != getattr(type(args.accelerator_config)(), name):
            raise ValueError(f"accelerator_config has {name}={value!r}, which cannot be used with PPO: {LOADER}")
    if args.optim.startswith("schedule_free"):
        raise ValueError(
            f"optim={args.optim.value!r} trains other weights than the averaged ones that it ends with, and "
            "completions, evaluations and checkpoints would use the former; set optim='adamw_torch', and "
            "lr_scheduler_type='constant' for a run without a schedule"
        )
    by_reward = args.lr_scheduler_type in METRIC_SCHEDULERS and args.greater_is_better
    if by_reward and (args.lr_scheduler_kwargs or {}).get("mode") != "max":
        raise ValueError(
            f"lr_scheduler_type={args.lr_scheduler_type.value!r} lowers the learning rate unless "
            f"{args.metric_for_best_model} falls, and more of it is better; "
            "set lr_scheduler_kwargs={'mode': 'max'}"
        )
    no_length = args.max_steps == 0 or (args.max_steps < 0 and not args.num_train_epochs > 0)
    if no_length and args.total_episodes is None:
        raise ValueError(
            f"max_steps={args.max_steps} and num_train_epochs={args.num_train_epochs} leave no step to make; set "
            "total_episodes, num_train_epochs or max_steps above 0"
        )
    if args.enable_jit_checkpoint and args.world_size > 1:
        raise ValueError(
            f"enable_jit_checkpoint=True saves when a process is told to end, and {args.world_size} processes are not "
            "told at the same step: they would wait for each other; set it to False, and save often"
        )


def check_processes(args: Any) -> None:
    """Raise ValueError if Trainer has not joined the processes: each would run alone, all in one folder."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and args.world_size == 1:
        raise ValueError(
            f"{started} processes were started, but each would train alone and write into the same output_dir; set "
            "use_cpu=True where there is no GPU, or start one process"
        )
