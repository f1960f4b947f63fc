"""What `PPOConfig` refuses: types, names and numbers out of range, and fields that contradict each other."""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from hfppo.functional import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REDUCTIONS,
    estimator_needs,
)

# What a number must be, and the fields of which that is asked. Written so that NaN never meets it.
RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda x: x >= 1,
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "num_ppo_epochs",
            "num_mini_batches",
            "num_generations",
            "max_completion_length",
            "local_rollout_forward_batch_size",
            "max_tokens_per_micro_batch",
            "total_episodes",
            "max_prompt_length",
        ),
    ),
    (
        "at least 0",
        lambda x: x >= 0,
        (
            "kl_coef",
            "kl_loss_coef",
            "entropy_coef",
            "positive_nll_coef",
            "vf_coef",
            "missing_eos_penalty",
            "critic_warmup",
            "critic_learning_rate",
            "learning_rate",
            "max_grad_norm",
            "weight_decay",
            "seed",
        ),
    ),
    ("in [0, 1]", lambda x: 0 <= x <= 1, ("gamma", "lam", "lam_critic")),
    (
        "above 0",
        lambda x: x > 0,
        (
            "temperature",
            "cliprange",
            "cliprange_high",
            "cliprange_value",
            "reward_clip",
            "lam_alpha",
            "target_kl",
            "mismatch_floor",
            "vllm_server_timeout",
        ),
    ),
    ("above 1: below, it would undo the clip at ratio 1", lambda x: x > 1, ("dual_clip",)),
    (
        "at least 1: a cap below it would shrink the weights of tokens without mismatch",
        lambda x: x >= 1,
        ("mismatch_cap",),
    ),
    ("at most 1: a floor above it would drop tokens without mismatch", lambda x: x <= 1, ("mismatch_floor",)),
    ("in (0, 1]", lambda x: 0 < x <= 1, ("vllm_gpu_memory_utilization",)),
    ("below 1: the ratio is clipped to 1 − cliprange", lambda x: x < 1, ("cliprange",)),
)

# Fields of transformers 4 that scripts still set, and what does the same now.
REMOVED_FIELDS = {
    "warmup_ratio": "warmup_steps, below 1 a share of all steps,",
    "no_cuda": "use_cpu",
    "evaluation_strategy": "eval_strategy",
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
}

# Fields of TRL's trainers that have another name here.
TRL_NAMES = {
    "beta": "kl_loss_coef",
    "epsilon": "cliprange",
    "epsilon_high": "cliprange_high",
    "delta": "dual_clip",
    "num_iterations": "num_ppo_epochs",
    "loss_type": "policy_loss and loss_reduction",
    "importance_sampling_level": "policy_loss",
    "steps_per_generation": "num_mini_batches",
    "generation_batch_size": "num_mini_batches",
    "vllm_server_host": "vllm_server_base_url",
    "vllm_server_port": "vllm_server_base_url",
    "response_length": "max_completion_length",
}

# What rendering a prompt for completion sets.
SET_BY_RENDERING = {"tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}

METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")  # schedulers that are told an evaluation's metric
TEXT_OR_NONE = (str | None, dict | str | None, dict[str, Any] | str | None)
KINDS: tuple[tuple[Any, Callable[[Any], bool], str], ...] = (
    (bool, lambda x: isinstance(x, bool), "must be True or False"),
    (int, lambda x: isinstance(x, int) and not isinstance(x, bool), "must be a whole number"),
    (
        float,
        lambda x: isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x),
        "must be a finite number",
    ),
    (dict[str, Any] | str, lambda x: isinstance(read_json(x), dict), "must be a dictionary, or JSON of one"),
)


def check_names(cls: type, names: Iterable[str]) -> None:
    """Refuse names of fields that do not exist.

    Raises:
        TypeError: names the one that does not, and those that are called much the same.
    """
    known = [f.name for f in fields(cls)]
    for name in names:
        if name not in known:
            meant = get_close_matches(name, known, cutoff=0.7)
            hint = "docs/configuration.md lists them, docs/migrating.md those of TRL"
            if name in REMOVED_FIELDS:
                hint = f"transformers 5 has {REMOVED_FIELDS[name]} in its place"
            elif name in TRL_NAMES:
                hint = f"what TRL calls so is {TRL_NAMES[name]} here, see docs/migrating.md"
            elif meant:
                hint = f"did you mean {' or '.join(meant)}?"
            raise TypeError(f"{cls.__name__} has no field {name!r}; {hint}")


def read_nones(args: Any) -> None:
    """None where a command line, which has no other way to say it, gave the text "None" or "null"."""
    for name, kind in get_type_hints(type(args)).items():
        if kind in TEXT_OR_NONE and getattr(args, name) in ("None", "none", "null"):
            setattr(args, name, None)


def check_types(args: Any) -> None:
    """Refuse text and the like in the place of numbers; before TrainingArguments computes with some."""
    declared = get_type_hints(type(args))  # HfArgumentParser writes other types into the fields
    for f in fields(args):
        value, its = getattr(args, f.name), declared[f.name]
        for kind, is_met, demand in KINDS:
            allowed = value is f.default or (value is None and its == kind | None)
            if its in (kind, kind | None) and not allowed and not is_met(value):
                hint = (
                    "; YAML wants 1.0e-5, and takes 1e-5 for text" if kind is float and isinstance(value, str) else ""
                )
                raise ValueError(f"{f.name}={value!r} {demand}{hint}")


def read_json(value: Any) -> Any:
    """What JSON says, if it is JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def check_config(args: Any) -> None:
    """Refuse what cannot be meant.

    Raises:
        ValueError: names the fields, their values, and what to choose.
    """
    check_choices(args)
    check_ranges(args)
    check_combinations(args)
    check_dtypes(args)
    check_inherited(args)
    check_processes(args)


def check_choices(args: Any) -> None:
    """Refuse unknown names of estimators, losses and the like."""
    hints = get_type_hints(type(args))
    literal = {f.name: hints[f.name] for f in fields(args) if get_origin(hints[f.name]) is Literal}
    choices = {name: get_args(kind) for name, kind in literal.items()} | {
        "kl_estimator": tuple(KL_ESTIMATORS),
        "kl_loss_estimator": tuple(KL_ESTIMATORS),
        "advantage_estimator": tuple(ADVANTAGE_ESTIMATORS),
        "policy_loss": tuple(POLICY_LOSSES),
        "loss_reduction": tuple(REDUCTIONS),
    }
    for name, allowed in choices.items():
        if (value := getattr(args, name)) not in allowed:
            raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(allowed)}")


def check_ranges(args: Any) -> None:
    """Refuse numbers outside of `RANGES`."""
    for demand, is_met, names in RANGES:
        for name in names:
            if (value := getattr(args, name)) is not None and not is_met(value):
                raise ValueError(f"{name}={value} must be {demand}")


def check_combinations(args: Any) -> None:
    """Refuse fields that contradict each other."""
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
    if args.kl_loss_coef and args.kl_loss_estimator == "k1" and not args.kl_loss_straight_through:
        warnings.warn(
            "kl_loss_estimator='k1' has a gradient of zero mean as a loss: it adds noise and holds nothing back. "
            "Use k2 or k3, or kl_loss_straight_through=True.",
            stacklevel=5,  # where the configuration is made
        )
    if args.normalize_scores and args.positive_nll_coef:
        raise ValueError(
            f"positive_nll_coef={args.positive_nll_coef} looks for scores from positive_score="
            f"{args.positive_score}, and normalize_scores=True moves all scores; set one of them back"
        )
    if args.whiten_rewards and estimator_needs(args.advantage_estimator, "greedy_scores"):
        raise ValueError(
            "whiten_rewards=True scales the rewards, and not the score of the greedy completion that "
            f"advantage_estimator={args.advantage_estimator!r} subtracts; set whiten_rewards=False"
        )
    if args.critic_warmup and not args.needs_critic:
        raise ValueError(
            f"critic_warmup={args.critic_warmup} has nothing to train: advantage_estimator="
            f"{args.advantage_estimator!r} has no critic; set critic_warmup=0 or advantage_estimator='gae'"
        )
    if taken := sorted(SET_BY_RENDERING & set(args.chat_template_kwargs or {})):
        raise ValueError(
            f"chat_template_kwargs={args.chat_template_kwargs!r} sets {', '.join(taken)}, which follows from the "
            "prompt; leave it out"
        )


def check_dtypes(args: Any) -> None:
    """Refuse a dtype that torch has not."""
    for field in ("model_init_kwargs", "reward_model_init_kwargs"):
        for key in ("dtype", "torch_dtype"):
            dtype = (getattr(args, field) or {}).get(key, "auto")
            if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(
                    f"{field} has {key}={dtype!r}, which torch has not; choose auto, float32, bfloat16 or float16"
                )


def check_inherited(args: Any) -> None:
    """Refuse what Trainer's own fields can ask for and PPO cannot do."""
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would change the rollouts in the middle of a run; lower "
            "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor, which changes "
            "no gradient"
        )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} would add noise to the update's pass and not to the "
            "rollout's, so that their ratio were noise; leave it out"
        )
    if args.optim.startswith("schedule_free"):
        raise ValueError(
            f"optim={args.optim.value!r} trains at other weights than those that it ends with, and completions, "
            "evaluations and checkpoints would be of the former; set optim='adamw_torch', and "
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
    if args.bf16_full_eval or args.fp16_full_eval:
        raise ValueError(
            "bf16_full_eval and fp16_full_eval would cast the model that is trained; load it in that type instead, "
            "model_init_kwargs={'dtype': 'bfloat16'}"
        )
    if args.enable_jit_checkpoint and args.world_size > 1:
        raise ValueError(
            f"enable_jit_checkpoint=True saves when a process is told to end, and {args.world_size} processes are not "
            "told at the same step: they would wait for each other; set it to False, and save often"
        )


def check_processes(args: Any) -> None:
    """Refuse processes that Trainer has not joined: each would do the whole run, in one folder."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and args.world_size == 1:
        raise ValueError(
            f"{started} processes were started, but each would train alone and write into the same output_dir; set "
            "use_cpu=True where there is no GPU, or start one process"
        )
