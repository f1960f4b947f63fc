"""The names that other trainers have for fields and arguments: translated, or explained in one error."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hfppo.config_checks import UNREAD_FIELDS, UNUSABLE_FIELDS, default_of, read_json

logger = logging.getLogger(__name__)

Fields = Mapping[str, Any]  # values by field
# TRL's fields that have another name here, or are an entry of a dictionary.
RENAMED = {
    "epsilon": "cliprange",
    "epsilon_high": "cliprange_high",
    "delta": "dual_clip",
    "num_iterations": "num_ppo_epochs",
    "response_length": "max_completion_length",
    "vllm_gpu_memory_utilization": "vllm_engine_kwargs.gpu_memory_utilization",
    "vllm_enable_sleep_mode": "vllm_engine_kwargs.enable_sleep_mode",
    "vllm_max_model_length": "vllm_engine_kwargs.max_model_len",
    "vllm_model_impl": "vllm_engine_kwargs.model_impl",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}

# Fields without a counterpart, by the reason. A field changes nothing at the value after "=" (*: any), nor at None.
REASONS = {
    "sampling is pure: PPO needs each token's probability": "top_p=1.0 top_k=0 min_p repetition_penalty=1.0",
    "every EOS of tokenizer and generation config ends a completion": "stop_token=eos stop_token_id",
    "per_device_train_batch_size, gradient_accumulation_steps and num_mini_batches make a rollout": "batch_size "
    "local_batch_size mini_batch_size local_mini_batch_size micro_batch_size num_total_batches world_size",
    "dropout is always off": "disable_dropout=true",
    "the log-softmax is always float32": "cast_lm_head_to_fp32=*",
    "prompts are always shuffled": "shuffle_dataset=true",
    "an evaluation samples one completion per prompt": "num_generations_eval=1",
    "here eval_strategy and eval_steps": "num_sample_generations=0",
    "the reference never changes": "sync_ref_model=false ref_model_mixup_alpha=* ref_model_sync_steps=*",
    "entropy_coef is constant": "use_adaptive_entropy=false entropy_coef_min=* entropy_coef_max=* "
    "entropy_coef_delta=* entropy_target=*",
    "the policy loss counts every token": "top_entropy_quantile=1.0 off_policy_mask_threshold",
    "sapo has the temperatures of its paper": "sapo_temperature_neg=1.05 sapo_temperature_pos=1.0",
    "there is no loss vespo": "vespo_k_neg=* vespo_k_pos=* vespo_lambda_neg=* vespo_lambda_pos=*",
    "whiten_advantages is similar, weighted by tokens": "normalize_advantages=false",
    "whiten_advantages scales the advantages instead": "whiten_rewards=false",
    "value_range bounds the values instead": "cliprange_value",
    "reward functions can clip their own scores": "reward_clip_range",
    "an entry of the base's config; model_init_kwargs={'router_aux_loss_coef': ...} sets it": "router_aux_loss_coef",
    "an option of the server, with vllm_mode='server'": "vllm_tensor_parallel_size=1",
    "an argument of PPOTrainer": "model reward_funcs args train_dataset eval_dataset processing_class peft_config "
    "ref_model critic critic_peft_config callbacks compute_metrics reward_processing_classes tools "
    "environment_factory agent quantization_config",
    "PPOTrainer has the model as an argument": "sft_model_path reward_model_path model_adapter_name ref_adapter_name",
    "log_completions prints eight": "num_completions_to_print=*",
    "not available": "cache_implementation dataset_num_proc=* ds3_gather_for_generation=true log_completions_hub_repo "
    "log_multimodal=* log_unique_prompts=false pad_to_multiple_of=auto transformers_continuous_batching_config=* "
    "use_transformers_continuous_batching=false use_transformers_paged=false vllm_group_port=* "
    "vllm_structured_outputs_regex",
}
WITHOUT = {
    name: (reason, read_json(neutral))
    for reason, names in REASONS.items()
    for name, _, neutral in (entry.partition("=") for entry in names.split())
}


def translate_beta(beta: float, given: Fields) -> Fields | None:
    """RLOOTrainer subtracts the KL from the reward; GRPOTrainer has it in the loss."""
    if given["advantage_estimator"] == "rloo":
        return {"kl_coef": beta}
    is_grpo = given["advantage_estimator"] in ("grpo", "opo", "reinforce_plus_plus_baseline")
    return {"kl_loss_coef": beta, "kl_coef": 0.0} if is_grpo or beta == 0 else None


def translate_bias_correction(corrects: bool, given: Fields) -> Fields:
    """The ratio, as a factor of k3, gives it the gradient of k2 while the ratio is 1."""
    has_kl = given.get("beta") or given["kl_loss_coef"]
    return {"kl_estimator": "k3+" if corrects else "k3"} if has_kl else {}


def translate_size(size: float, given: Fields) -> Fields | None:
    """TRL counts completions of all processes."""
    return translate_steps(size / given["per_device_train_batch_size"] / int(os.environ.get("WORLD_SIZE", "1")), given)


def translate_steps(steps: float, given: Fields) -> Fields | None:
    """TRL counts micro-batches."""
    mini_batches = steps / given["gradient_accumulation_steps"]
    return {"num_mini_batches": int(mini_batches)} if mini_batches.is_integer() else None


def translate_mismatch(_: object, given: Fields) -> Fields | None:
    """TRL corrects the mismatch of vLLM only, and has a field for the lower bound, which for `mask` is 1/c here."""
    if not given["use_vllm"]:
        return {}
    if not given.get("vllm_importance_sampling_correction", True):
        return {"policy_mode": "decoupled"}
    mode = given.get("vllm_importance_sampling_mode", "sequence_mask")  # TRL's default
    low, high = given.get("vllm_importance_sampling_clip_min"), given["vllm_importance_sampling_clip_max"]
    is_same = low is None if mode.endswith("truncate") else low is not None and low * high == 1
    return {"policy_mode": mode} if is_same else None


def translate_server(part: object, given: Fields) -> Fields:
    """TRL ignores host and port beside an address."""
    host, port = given.get("vllm_server_host", "0.0.0.0"), given.get("vllm_server_port", 8000)
    return {} if given["vllm_server_base_url"] else {"vllm_server_base_url": f"http://{host}:{port}"}


LEVELS = {"token": {}, "sequence": {"policy_loss": "gspo"}}
LOSS_TYPES = {
    "dapo": {"loss_reduction": "token-mean"},
    "grpo": {"loss_reduction": "seq-mean-token-mean"},
    "dr_grpo": {"loss_reduction": "seq-mean-token-sum-norm"},
    "cispo": {"policy_loss": "cispo", "loss_reduction": "token-mean"},
    "sapo": {"policy_loss": "sapo", "loss_reduction": "seq-mean-token-mean"},
}
SIZE = "here num_mini_batches, the optimizer steps of an epoch over a rollout, a whole number"
BAND = "here policy_mode, where the band of mask is [1/c, c] with c = vllm_importance_sampling_clip_max"

# Fields that need more than another name: the end of a line in an error, and a function from the value and all fields
# given to fields here; None: there are none for the value.
TRANSLATED: dict[str, tuple[str, Callable[[Any, Fields], Fields | None]]] = {
    "scale_rewards": ("", lambda x, _: {"scale_rewards": {"True": "group", "False": "none"}.get(str(x), x)}),
    "trust_remote_code": ("", lambda x, _: {"model_init_kwargs": {"trust_remote_code": True}} if x else {}),
    "beta": ("here kl_loss_coef (GRPO's) or kl_coef (RLOO's, in the reward), by advantage_estimator", translate_beta),
    "use_bias_correction_kl": ("", translate_bias_correction),
    "loss_type": ("here policy_loss and loss_reduction", lambda x, _: LOSS_TYPES.get(x)),
    "importance_sampling_level": ("here policy_loss, and 'sequence' is 'gspo'", lambda x, _: LEVELS.get(x)),
    "steps_per_generation": (SIZE, translate_steps),
    "generation_batch_size": (SIZE, translate_size),
    "vllm_importance_sampling_correction": (BAND, translate_mismatch),
    "vllm_importance_sampling_mode": (BAND, translate_mismatch),
    "vllm_importance_sampling_clip_min": (BAND, translate_mismatch),
    "vllm_server_host": ("", translate_server),
    "vllm_server_port": ("", translate_server),
    "warmup_ratio": ("here warmup_steps, a share below 1", lambda x, _: {"warmup_steps": x} if x < 1 else None),
}


# Arguments of TRL's trainers and of Trainer that people pass and PPOTrainer lacks.
ARGUMENTS = {
    "reward_model": "here reward_funcs, which takes reward models as well as functions",
    "value_model": "here critic",
    "tokenizer": "here processing_class",
    "rollout_func": "here environment_factory, or a subclass with its own create_sampler",
    "data_collator": "the rollouts are the batches",
    "model_init": "here model",
    "compute_loss_func": "a subclass may add to the loss, see docs/extending.md",
    "optimizers": "here optim and optim_args of args; a subclass may override create_optimizer",
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
    settings = {**{f.name: default_of(f) for f in fields(cls)}, **given}
    result = {name: x for name, x in given.items() if name in known and name not in TRANSLATED}
    found = {name: fields_here(name, x, settings) for name, x in given.items() if name not in result}
    unknown = {name: explain_name(name, known) for name, here in found.items() if here is None}
    refuse(f"{cls.__name__} has no field", unknown, "lists the fields, docs/from_trl.md those of TRL")
    for name, here in found.items():
        for target, value in here.items():
            before: Any = read_json(result.get(target))
            if isinstance(value, dict) and isinstance(before or {}, dict):
                before, value = {**value, **(before or {})}, {**(before or {}), **value}
            if before not in (None, value):
                raise ValueError(
                    f"{name}={given[name]!r} is {target}={value!r} here, and {before!r} is given; leave one out"
                )
            result[target] = value
    if log := [f"{name}: {here or 'no effect'}" for name, here in found.items() if here != {name: given[name]}]:
        logger.warning("fields of TRL: %s", ", ".join(log))
    return result


def fields_here(name: str, value: object, given: Fields) -> Fields | None:
    """Return the fields here that say the same as one of TRL's; None: there are none."""
    if value is None and name in (*RENAMED, *WITHOUT, *TRANSLATED):
        return {}  # left out
    if name in RENAMED:
        field, _, key = RENAMED[name].partition(".")
        return {field: {key: value} if key else value}
    if name in WITHOUT:
        return {} if WITHOUT[name][1] in ("*", value) else None
    try:
        return TRANSLATED[name][1](value, given)
    except (KeyError, TypeError, AttributeError, ArithmeticError):  # an unknown name, or a value that does not fit
        return None


def refuse(subject: str, unknown: Mapping[str, str], lists: str) -> None:
    """Raise TypeError if there are unknown names; the error has a line for each name, with its explanation."""
    if unknown:
        gap = "\n  " if len(unknown) > 1 else " "
        lines = [subject, *(f"{name!r}{end}" for name, end in unknown.items()), f"(docs/configuration.md {lists})"]
        raise TypeError(gap.join(lines))


def explain_keyword(name: str, known: list[str], config: type) -> str:
    """Return an argument's name here, or why it is missing, as the end of a line."""
    if (meaning := ARGUMENTS.get(name)) is not None:
        return f": {meaning}"
    if name in (*(f.name for f in fields(config)), *RENAMED, *TRANSLATED):
        return f": a field, args={config.__name__}({name}=...)"
    return explain_name(name, known)


def explain_name(name: str, known: list[str]) -> str:
    """Return what TRL's field is here, why it is missing, or similar names, as the end of a line."""
    if name in WITHOUT:
        reason, neutral = WITHOUT[name]
        return f": {reason}; {neutral!r} is accepted" if neutral != "" else f": {reason}"
    if name in TRANSLATED:
        return f": {TRANSLATED[name][0]}"
    meant = get_close_matches(name, [k for k in known if k not in (*UNUSABLE_FIELDS, *UNREAD_FIELDS)], cutoff=0.65)
    return f": did you mean {' or '.join(meant)}?" if meant else ""
