"""Checks of `PPOConfig`: types, ranges, and fields that contradict each other or that PPO cannot use."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

from hfppo.functional import MISMATCH_MODES, estimator_needs
from hfppo.support.refusals import raise_first
from hfppo.support.secrets import find_secret

logger = logging.getLogger(__name__)

STOPS = {"stop_strings": str, "stop_token_ids": int}  # keys of `generation_kwargs`, with the type of their entries

# Fields that only some advantage estimators read, by what such an estimator needs.
OF_CRITIC = "critic_warmup", "critic_pretraining_completions", "num_critic_epochs", "critic_layers", "critic_update"
READ_FOR = {
    "values": (*OF_CRITIC, "value_range"),
    "gamma": ("gamma_turn",),
    "lam": ("lam_turn",),
    "scale": ("scale_rewards", "multi_objective_aggregation"),
}

METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")  # schedulers that read an evaluation's metric


def is_number(x: object) -> bool:
    """Return whether x is a finite number; False for a bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


# What values of a type must be, and how the error says so.
TYPES: dict[object, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda x: isinstance(x, bool), "True or False"),
    int: (lambda x: isinstance(x, int) and not isinstance(x, bool), "a whole number"),
    float: (is_number, "a finite number"),
    list[float]: (lambda x: isinstance(x, list | tuple) and all(map(is_number, x)), "a list of numbers"),
    dict[str, Any] | str: (lambda x: isinstance(read_json(x), dict), "a dictionary, or JSON of one"),
}

# Fields of TrainingArguments that break PPO, with the reason and a remedy; only their defaults are allowed.
FULL_EVAL = "it would cast the model that is trained; set model_init_kwargs={'dtype': 'bfloat16'} or float16 instead"
UNUSABLE_FIELDS = {
    "auto_find_batch_size": "it would change the size of rollouts in the middle of a run; lower "
    "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor, which changes no gradient",
    "neftune_noise_alpha": "it would add noise to the update's pass and not to the rollout's, so that their ratio "
    "would be noise; leave it out",
    "ddp_static_graph": "a step has the actor's graph and the critic's, and some steps have one of them; leave it out",
    "bf16_full_eval": FULL_EVAL,
    "fp16_full_eval": FULL_EVAL,
    "ignore_data_skip": "Trainer would count a resumed epoch from its beginning; leave it out, since a resumed run "
    "continues with its next prompts",
}


def check_fields(args: TrainingArguments, inherited: Mapping[str, object]) -> None:
    """Check types, ranges and choices before TrainingArguments uses the values.

    Args:
        inherited: types with ranges for fields of TrainingArguments.
    Raises:
        ValueError: values have the wrong type, are out of range, or are not among the choices; names all of them.
    """
    hints = {**get_type_hints(type(args), include_extras=True), **inherited}  # HfArgumentParser changes `f.type`
    plain = get_type_hints(type(args))
    wrong: list[str] = []
    for f in fields(args):
        value, kind = getattr(args, f.name), plain[f.name]
        is_unset = value is None and (f.default is None or NoneType in get_args(kind))
        if not is_unset and f.name != "fsdp_config":  # which may be the path of a file
            wrong += find_fault(f, value, kind, hints[f.name])
    if wrong:
        raise ValueError("\n  ".join(wrong if len(wrong) == 1 else [f"{len(wrong)} fields have wrong values", *wrong]))


def find_fault(f: Field[Any], value: Any, kind: object, hint: object) -> list[str]:
    """Return a line for a field's value unless it is right: its type, then its choices, then its range."""
    for wanted, (is_met, demand) in TYPES.items():
        if kind in (wanted, wanted | None) and not is_met(value):  # type: ignore[operator]
            advice = "; YAML reads 1e-5 as text, so write 1.0e-5" if wanted is float and isinstance(value, str) else ""
            return [f"{f.name}={value!r} must be {demand}{advice}"]
    choices = get_args(kind) if get_origin(kind) is Literal else f.metadata.get("choices")
    if choices and value not in choices:
        return [f"{f.name}={value!r} is unknown; choose from {', '.join(choices)}"]
    ranges = [part.__metadata__ for part in (hint, *get_args(hint)) if get_origin(part) is Annotated]
    return [f"{f.name}={value!r} must be {text}" for text, is_met in ranges if not is_met(value)]


def read_json(value: object) -> object:
    """Return the JSON value of a text, and anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def accumulation_steps(args: Any) -> int:
    """Return the accumulation steps that make rollouts of `rollout_size` completions of all processes.

    Raises:
        ValueError: there are none.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    least = args.per_device_train_batch_size * args.num_mini_batches * processes
    steps, rest = divmod(args.rollout_size, least)
    if rest or not steps:
        raise ValueError(
            f"rollout_size={args.rollout_size} must be a multiple of {least} = per_device_train_batch_size="
            f"{args.per_device_train_batch_size} × num_mini_batches={args.num_mini_batches} × {processes} processes; "
            "choose sizes that divide"
        )
    if (given := args.gradient_accumulation_steps) not in (1, steps):
        logger.warning("rollout_size makes gradient_accumulation_steps=%s; %s is not used", steps, given)
    return steps


def check_config(args: Any) -> None:
    """Check that the fields of a PPOConfig agree with each other, and that PPO can use them.

    Raises:
        ValueError: fields contradict each other, or PPO cannot use one.
    """
    check_secrets(args)
    raise_first(find_contradictions(args))
    raise_first(find_faults_of_range(args, args.kl_coef))
    if args.kl_loss_coef and args.kl_estimator == "k1":
        logger.warning("kl_estimator='k1' restrains nothing in the loss, where its gradient has mean 0; use k3 or k1+")
    if args.policy_loss in ("gspo", "sapo") and args.loss_reduction == "token-mean":
        reduction = "a mean per completion; set loss_reduction='seq-mean-token-mean'"
        logger.warning("the paper of policy_loss=%r has %s", args.policy_loss, reduction)
    check_generation_kwargs(args.generation_kwargs or {})


def check_secrets(args: TrainingArguments) -> None:
    """Raise ValueError if a setting other than `hub_token`, which TrainingArguments hides, contains a secret."""
    for name in [f.name for f in fields(args) if f.name != "hub_token"]:
        if place := find_secret(name, getattr(args, name), name):
            raise ValueError(
                f"{place} contains a secret, which checkpoints, the model card and trackers would show; leave it out. "
                "Downloads use the token of `hf auth login` or HF_TOKEN, pushes use hub_token; a reward function can "
                "read other keys from the environment"
            )


def find_contradictions(args: Any) -> dict[str, object]:
    """Return an error for each way in which fields can contradict each other or break PPO, and whether they do."""
    estimator = f"advantage_estimator={args.advantage_estimator!r}"
    values, groups = (estimator_needs(args.advantage_estimator, x) for x in ("values", "groups"))
    per_mini_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    unread = [x for need in READ_FOR if not estimator_needs(args.advantage_estimator, need) for x in READ_FOR[need]]
    return {
        **{
            f"{name}={getattr(args, name)!r} cannot be used with PPO: {reason}": (
                getattr(args, name) != getattr(type(args), name)
            )
            for name, reason in UNUSABLE_FIELDS.items()
        },
        f"optim={args.optim.value!r} trains weights whose average is the result, but completions, evaluations and "
        "checkpoints would use the weights before averaging; set optim='adamw_torch', and "
        "lr_scheduler_type='constant' for a run without a schedule": args.optim.startswith("schedule_free"),
        f"lr_scheduler_type={args.lr_scheduler_type.value!r} lowers the learning rate unless "
        f"{args.metric_for_best_model} falls, but higher is better; set lr_scheduler_kwargs={{'mode': 'max'}}": (
            args.lr_scheduler_type in METRIC_SCHEDULERS
            and args.greater_is_better
            and (args.lr_scheduler_kwargs or {}).get("mode") != "max"
        ),
        f"{estimator} compares completions of one prompt, but num_generations={args.num_generations}; raise "
        "num_generations to 2 or more": groups and args.num_generations < 2,
        f"a mini-batch of {per_mini_batch} completions per process (per_device_train_batch_size="
        f"{args.per_device_train_batch_size} × gradient_accumulation_steps={args.gradient_accumulation_steps}) cannot "
        f"be divided into groups of num_generations={args.num_generations}; choose sizes that divide": (
            per_mini_batch % args.num_generations
        ),
        f"prompt_candidates={args.prompt_candidates} chooses by the critic or by the scores of a group, and "
        f"{estimator} has neither; leave it out, or set advantage_estimator='gae' or 'grpo'": (
            args.prompt_candidates > 1 and not values and not groups
        ),
        "rollouts_ahead=1 samples during the update, but with vllm_mode='colocate' vLLM computes in the training "
        "process; set vllm_mode='server', use_vllm=False or rollouts_ahead=0": (
            args.rollouts_ahead and args.use_vllm and args.vllm_mode == "colocate"
        ),
        **{
            f"{name}={getattr(args, name)!r} has no effect with {estimator}; leave it out, or set another one": (
                getattr(args, name) != getattr(type(args), name)
            )
            for name in unread
        },
        f"policy_loss='cispo' caps the ratio at cliprange_high={args.cliprange_high} itself, and a cap below 1 "
        "shrinks all weights; set cliprange_high=5.0 (arXiv:2510.13786)": (
            args.policy_loss == "cispo" and args.clip_high < 1
        ),
        f"policy_mode={args.policy_mode!r} weights tokens by π_old/π_rollout, but the ratio of policy_loss='dis' "
        "corrects the same mismatch; leave policy_mode out, or set 'decoupled'": (
            args.policy_loss == "dis" and args.policy_mode in MISMATCH_MODES
        ),
        "policy_loss='dis' needs the upper end of its band; set cliprange_high=5.0 (arXiv:2607.07508)": (
            args.policy_loss == "dis" and args.cliprange_high is None
        ),
        f"critic_pretraining_completions={args.critic_pretraining_completions}, rounded up to two or more rollouts, "
        f"uses up total_episodes={args.total_episodes}; raise total_episodes": (
            args.total_episodes and args.rollouts_for(args.total_episodes) <= args.critic_pretraining_rollouts
        ),
        f"critic_pretraining_completions={args.critic_pretraining_completions} and num_critic_epochs="
        f"{args.num_critic_epochs} train the critic, but vf_coef=0 gives its loss no weight; raise vf_coef": (
            args.vf_coef == 0
            and (
                args.critic_pretraining_completions or args.critic_epochs > args.num_ppo_epochs or args.critic_follows
            )
        ),
        f"critic_update='policy_aligned' weights returns at λ = 1, but lam_critic={args.lam_critic}; set it to 1.0": (
            args.critic_update == "policy_aligned" and args.lam_critic != 1
        ),
    }


def find_faults_of_range(args: Any, kl_coef: float) -> dict[str, object]:
    """Return an error for each way in which returns must leave `value_range`, and whether they do.

    Args:
        kl_coef: β, which a callback may have changed.
    """
    has_range = args.value_range is not None
    return {
        "value_loss='bce' takes values in a range; set value_range=[low, high], the range of the return": (
            args.value_loss == "bce" and not has_range
        ),
        f"kl_coef={kl_coef} subtracts a KL from the reward, which may exceed any value_range; set kl_coef=0, and "
        "kl_loss_coef for a KL in the loss": has_range and kl_coef > 0,
    }


def check_generation_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raise ValueError unless the keys are in `STOPS`, each with a list of its kind."""
    for name, value in kwargs.items():
        if name not in STOPS:
            raise ValueError(
                f"generation_kwargs={kwargs!r}: {name} cannot be set, since completions are sampled from the policy's "
                f"own distribution; the keys are {' and '.join(STOPS)}"
            )
        if not isinstance(value, list) or not value or not all(isinstance(x, STOPS[name]) and x != "" for x in value):
            raise ValueError(f"generation_kwargs={kwargs!r}: {name} must be a list of {STOPS[name].__name__}s")
