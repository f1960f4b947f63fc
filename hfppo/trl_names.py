"""TRL's names of fields: translated where a field here says the same, otherwise refused, all in one error.

docs/from_trl.md has the table of all fields.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hfppo.config_checks import UNUSABLE_FIELDS, read_json

logger = logging.getLogger(__name__)

Fields = Mapping[str, Any]  # values by field

# TRL's fields that have another name here, or are an entry of a dictionary.
RENAMED = {
    "epsilon": "cliprange",
    "epsilon_high": "cliprange_high",
    "delta": "dual_clip",
    "num_iterations": "num_ppo_epochs",
    "response_length": "max_completion_length",
    "warmup_ratio": "warmup_steps",
    "vllm_gpu_memory_utilization": "vllm_engine_kwargs.gpu_memory_utilization",
    "vllm_enable_sleep_mode": "vllm_engine_kwargs.enable_sleep_mode",
    "vllm_max_model_length": "vllm_engine_kwargs.max_model_len",
    "vllm_model_impl": "vllm_engine_kwargs.model_impl",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}

# Fields without a counterpart, with the value at which they ask for nothing that is not done here.
NEUTRAL = {
    "cast_lm_head_to_fp32": True,
    "disable_dropout": True,
    "min_p": None,
    "num_generations_eval": 1,
    "repetition_penalty": 1.0,
    "shuffle_dataset": True,
    "sync_ref_model": False,
    "top_k": 0,
    "top_p": 1.0,
}

# Fields that may have no counterpart at a value, with the fields here.
HERE = {
    "beta": "kl_loss_coef (GRPO's) or kl_coef (RLOO's, in the reward), by advantage_estimator",
    "loss_type": "policy_loss and loss_reduction",
    "importance_sampling_level": "policy_loss",
    "steps_per_generation": "num_mini_batches, a whole number",
    "generation_batch_size": "num_mini_batches, a whole number",
    "vllm_importance_sampling_correction": "policy_mode",
    "vllm_importance_sampling_mode": "policy_mode",
}

SCALES: dict[object, str] = {True: "group", False: "none"}

LOSS_TYPES = {
    "dapo": {"loss_reduction": "token-mean"},
    "grpo": {"loss_reduction": "seq-mean-token-mean"},
    "dr_grpo": {"loss_reduction": "seq-mean-token-sum-norm"},
    "cispo": {"policy_loss": "cispo", "loss_reduction": "token-mean"},
    "sapo": {"policy_loss": "sapo", "loss_reduction": "seq-mean-token-mean"},
}


def translate_names(cls: type, given: Fields, others: Iterable[str] = ()) -> dict[str, Any]:
    """Return fields by their names here; one line in the log says what TRL's fields among them are.

    Args:
        given: fields by their names here or in TRL.
        others: names that exist elsewhere, such as other arguments of a script.
    Raises:
        TypeError: fields that do not exist, or values of TRL's fields without a counterpart; names all of them.
        ValueError: two names give a field different values.
    """
    known = list(dict.fromkeys([*(f.name for f in fields(cls)), *others]))
    # TRL takes a bool as well.
    given = {name: SCALES.get(x, x) if name == "scale_rewards" else x for name, x in given.items()}
    settings = {**{f.name: f.default for f in fields(cls)}, **given}
    found = {name: {name: x} if name in known else fields_here(name, x, settings) for name, x in given.items()}
    if unknown := [f"{name!r}{explain_name(name, known)}" for name, here in found.items() if here is None]:
        told = [f"{cls.__name__} has no field", *unknown, "(docs/configuration.md lists ours, docs/from_trl.md TRL's)"]
        raise TypeError("\n  ".join(told) if len(unknown) > 1 else " ".join(told))
    result = {name: x for name, x in given.items() if name in known}
    translated = {name: here for name, here in found.items() if name not in known}
    for name, here in translated.items():
        for target, value in here.items():
            before: Any = read_json(result.get(target))
            if isinstance(value, dict):
                value = {**value, **(before or {})}
            elif before not in (None, value):
                raise ValueError(
                    f"{name}={given[name]!r} is {target}={value!r} here, and {before!r} is given; leave one out"
                )
            result[target] = value
    if translated:
        log = (f"{name}: {here or 'no effect'}" for name, here in translated.items())
        logger.warning("fields of TRL: %s", ", ".join(log))
    return result


def fields_here(name: str, x: Any, given: Fields) -> Fields | None:
    """Return the fields here that say the same as one of TRL's; None: there are none.

    Args:
        x: its value.
        given: all given fields, and the defaults of the others.
    """
    if name in RENAMED:
        field, _, key = RENAMED[name].partition(".")
        return {field: {key: x} if key else x}
    estimator = given["advantage_estimator"]
    match name:
        case "beta" if estimator == "rloo":
            return {"kl_coef": x}
        case "beta" if x == 0 or estimator in ("grpo", "opo", "reinforce_plus_plus_baseline"):
            return {"kl_loss_coef": x, "kl_coef": 0.0}
        case "use_bias_correction_kl":  # the ratio, as a factor of k3, gives it the gradient of k2
            return {"kl_estimator": "k3+" if x else "k3"} if given.get("beta") or given["kl_loss_coef"] else {}
        case "loss_type":
            return LOSS_TYPES.get(x)
        case "importance_sampling_level":
            return {"token": {}, "sequence": {"policy_loss": "gspo"}}.get(x)
        case "trust_remote_code":
            return {"model_init_kwargs": {name: x}}
        case "generation_batch_size" | "steps_per_generation":  # in completions of all processes, or micro-batches
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            micro = given["per_device_train_batch_size"] * processes if name == "generation_batch_size" else 1
            mini_batches = x / micro / given["gradient_accumulation_steps"]
            return {"num_mini_batches": int(mini_batches)} if mini_batches.is_integer() else None
        case "vllm_server_host" | "vllm_server_port":  # TRL ignores them beside an address
            host, port = given.get("vllm_server_host", "0.0.0.0"), given.get("vllm_server_port", 8000)
            return {"vllm_server_base_url": given["vllm_server_base_url"] or f"http://{host}:{port}"}
    is_neutral = name == "num_completions_to_print" or (name in NEUTRAL and NEUTRAL[name] == x)
    return {} if is_neutral else None


def explain_name(name: str, known: list[str]) -> str:
    """Return what TRL's field is here, or similar names, as the end of a line."""
    if name in HERE:
        return f": here {HERE[name]}"
    if name in NEUTRAL:
        return f": only {NEUTRAL[name]!r} is possible"
    meant = get_close_matches(name, [k for k in known if k not in UNUSABLE_FIELDS], cutoff=0.65)
    return f": did you mean {' or '.join(meant)}?" if meant else ""
