"""The names that other trainers have for fields and arguments, and errors for unknown ones."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec

from hfppo.checks.config import UNREAD_FIELDS, UNUSABLE_FIELDS

# TRL's fields that have another name here.
TRL_NAMES = {
    "beta": "kl_loss_coef with kl_coef=0 and advantage_estimator='grpo' (GRPO's), or kl_coef (RLOO's, in the reward)",
    "epsilon": "cliprange",
    "epsilon_high": "cliprange_high",
    "delta": "dual_clip",
    "num_iterations": "num_ppo_epochs",
    "loss_type": "policy_loss and loss_reduction; as loss_reduction 'dapo' is 'token-mean', 'grpo' is "
    "'seq-mean-token-mean', 'dr_grpo' is 'seq-mean-token-sum-norm'",
    "importance_sampling_level": "policy_loss; 'sequence' is policy_loss='gspo'",
    "steps_per_generation": "gradient_accumulation_steps × num_mini_batches",
    "use_bias_correction_kl": "kl_estimator='k3+'",
    "vllm_server_host": "vllm_server_base_url",
    "vllm_server_port": "vllm_server_base_url",
    "vllm_gpu_memory_utilization": "vllm_engine_kwargs={'gpu_memory_utilization': ...}",
    "vllm_enable_sleep_mode": "vllm_engine_kwargs={'enable_sleep_mode': True}",
    "vllm_max_model_length": "vllm_engine_kwargs",
    "vllm_tensor_parallel_size": "vllm_engine_kwargs",
    "vllm_model_impl": "vllm_engine_kwargs",
    "vllm_importance_sampling_correction": "policy_mode",
    "vllm_importance_sampling_mode": "policy_mode, with the same values",
    "vllm_importance_sampling_clip_min": "1/vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "trust_remote_code": "model_init_kwargs",
    "response_length": "max_completion_length",
    "num_sample_generations": "eval_strategy and eval_steps",
    "warmup_ratio": "warmup_steps, a share of the run below 1",
}

# Fields that have no counterpart, by the reason; most are TRL's.
TRL_REASONS = {
    "sampling is pure, since PPO must know the probability of each token under the policy": "top_p top_k min_p "
    "repetition_penalty generation_kwargs",
    "every EOS of tokenizer and generation config ends a completion": "stop_token stop_token_id",
    "a rollout has per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches completions per "
    "process": "generation_batch_size batch_size local_batch_size mini_batch_size local_mini_batch_size "
    "micro_batch_size num_total_batches",
    "dropout is always off": "disable_dropout",
    "the log-softmax is always float32": "cast_lm_head_to_fp32",
    "prompts are always shuffled": "shuffle_dataset",
    "an evaluation samples one completion per prompt": "num_generations_eval",
    "the reference never changes": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "entropy_coef is constant": "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta "
    "entropy_target top_entropy_quantile",
    "an argument of PrintCompletionsCallback": "num_completions_to_print",
    "an argument of PPOTrainer": "model reward_funcs args train_dataset eval_dataset processing_class peft_config "
    "ref_model critic callbacks compute_metrics reward_processing_classes tools environment_factory "
    "quantization_config",
    "PPOTrainer has the model as an argument": "sft_model_path reward_model_path model_adapter_name ref_adapter_name",
    "not available": "cache_implementation dataset_num_proc ds3_gather_for_generation log_completions_hub_repo "
    "log_multimodal log_unique_prompts multi_objective_aggregation off_policy_mask_threshold pad_to_multiple_of "
    "router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos transformers_continuous_batching_config "
    "use_transformers_continuous_batching use_transformers_paged vespo_k_neg vespo_k_pos vespo_lambda_neg "
    "vespo_lambda_pos vllm_group_port vllm_structured_outputs_regex",
}


# Arguments of TRL's trainers and of Trainer that PPOTrainer lacks.
ARGUMENTS = {
    "reward_model": "here reward_funcs, which takes reward models as well as functions",
    "reward_fn": "here reward_funcs",
    "value_model": "here critic",
    "tokenizer": "here processing_class",
    "config": "here args",
    "dataset": "here train_dataset",
    "policy": "here model",
    "ref_policy": "here ref_model",
    "rollout_func": "here environment_factory, or a subclass with its own create_sampler",
    "data_collator": "the rollouts are the batches",
    "model_init": "here model",
    "compute_loss_func": "a subclass may add to the loss, see docs/extending.md",
    "optimizer_cls_and_kwargs": "here optim and optim_args of args",
    "optimizers": "here optim and optim_args of args; a subclass may override create_optimizer",
    "preprocess_logits_for_metrics": "compute_metrics gets completions, and no logits are kept",
}

Parameters = ParamSpec("Parameters")


def check_names(cls: type, names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise TypeError if fields do not exist.

    Args:
        others: names that exist elsewhere.
    """
    known = list(dict.fromkeys([*(f.name for f in fields(cls)), *others]))
    unknown = {name: explain_name(name, known) for name in names if name not in known}
    refuse(f"{cls.__name__} has no field", unknown, "lists the fields, docs/from_trl.md those of TRL")


def checks_keywords(config: type) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Return a decorator for `__init__` that raises one error for all unknown keywords, each with an explanation.

    Args:
        config: the dataclass of the argument `args`; its fields are often passed as arguments by mistake.
    """

    def decorate(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
        known = list(inspect.signature(init).parameters)

        @wraps(init)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            unknown = {name: explain_keyword(name, known, config) for name in kwargs if name not in known}
            owner = init.__qualname__.partition(".")[0]
            refuse(f"{owner} has no argument", unknown, "lists the fields of its args")
            init(*args, **kwargs)

        return checked

    return decorate


def refuse(subject: str, unknown: Mapping[str, str], lists: str) -> None:
    """Raise TypeError if there are unknown names; the error has a line for each name, with its explanation."""
    if unknown:
        gap = "\n  " if len(unknown) > 1 else " "
        lines = [subject, *(f"{name!r}{end}" for name, end in unknown.items()), f"(docs/configuration.md {lists})"]
        raise TypeError(gap.join(lines))


def explain_keyword(name: str, known: list[str], config: type) -> str:
    """Return an argument's name here, or why it is missing, as the end of a line."""
    names = [f.name for f in fields(config)]
    if (meaning := ARGUMENTS.get(name)) is not None:
        return f": {meaning}"
    if name in names:
        return f": a field, args={config.__name__}({name}=...)"
    if name in TRL_NAMES:
        return f": a field, {explain_name(name, names).removeprefix(': ')}"
    return explain_name(name, known)


def explain_name(name: str, known: list[str]) -> str:
    """Return the name of TRL's field here, why it is missing, or similar names, as the end of a line."""
    if (meaning := TRL_NAMES.get(name)) is not None:
        return f": here {meaning}"
    for reason, names in TRL_REASONS.items():
        if name in names.split():
            return f": {reason}"
    meant = get_close_matches(name, [k for k in known if k not in (*UNUSABLE_FIELDS, *UNREAD_FIELDS)], cutoff=0.65)
    return f": did you mean {' or '.join(meant)}?" if meant else ""
