"""Configurations drawn at random, and their trainers."""

import asyncio
import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from helpers.agents import VOCAB_SIZE, end_of_turn_ids, talking_trainer
from helpers.runs import count_digits, small_trainer, stops_at_kl
from helpers.tiny import SHAPE
from hfppo import AdaptiveKLCallback, PPOTrainer
from hfppo.functional import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS

ROWS = Dataset.from_list([{"prompt": f"请问{'1+' * (a % 3)}{a}+{b}="} for a in range(4) for b in range(3, 11)])
GROUPED_HEADS = {"num_key_value_heads": 1, "head_dim": 16}
ARCHITECTURES = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "phi3"), GROUPED_HEADS),
    "granite": {**GROUPED_HEADS, "attention_multiplier": 0.25},  # at 1.0, its default, log-probs round by 1e-5
    "gpt_neox": {},
}


async def waits(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [0.1 * len(text) for text in completions]


def leaves_out(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if len(text) % 3 == 2 else float(len(text)) for text in completions]


def per_token(completion_ids: list[list[int]], **kwargs: Any) -> list[list[float]]:
    return [[0.1 * (token % 3) for token in ids] for ids in completion_ids]


def each(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def seldom(*fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [{}] * 2 * len(fields) + list(fields)


# A band so narrow that rounding leaves it.
NO_BAND = {"vllm_importance_sampling_clip_max": 1.0}
# Of every line one entry.
EVERY_RUN = [
    each("gradient_accumulation_steps", 1, 2),
    each("num_mini_batches", 1, 2),
    each("num_ppo_epochs", 1, 2, 3),
    each("max_steps", 4, 5, 7),
    each("max_completion_length", 3, 6, 9),
    each("temperature", 1.0, 0.7),
    each("kl_coef", 0.05, 0.3, 0.0),
    each("kl_estimator", *KL_ESTIMATORS),
    [
        *each("policy_loss", "ppo", "ppo", "ppo", *(name for name in POLICY_LOSSES if name != "cispo")),
        {"policy_loss": "cispo", "cliprange_high": 2.0},
    ],
    each("loss_reduction", *REDUCTIONS),
    each("max_grad_norm", 1.0, 0.1, 0.0),
    each("lr_scheduler_type", "linear", "cosine"),
    each("logging_steps", 1, 3),
    [
        *each("policy_mode", "decoupled", "bypass", "token_truncate", "sequence_truncate"),
        *({**NO_BAND, "policy_mode": mode} for mode in ("token_mask", "token_reject")),
    ],
    seldom({"kl_loss_coef": 0.1}),
    seldom({"entropy_coef": 0.01}),
    seldom({"missing_eos_penalty": 1.0}),
    seldom(*each("whiten_advantages", True, False)),
    seldom({"mask_truncated_completions": True}),
    seldom({"gamma": 0.9}),
    seldom({"cliprange_high": 1.28}),
    seldom({"dual_clip": 3.0}),
    seldom(*each("max_tokens_per_micro_batch", 16, 32)),
    seldom({"activation_checkpointing": True}),
    seldom(*each("local_rollout_forward_batch_size", 1, 3)),
    seldom({"weight_decay": 0.01}),
    seldom({"rollouts_ahead": 1}),
]
WITH_CRITIC = [
    seldom(*each("critic_warmup", 1, 2)),
    seldom({"bootstrap_truncated": True}),
    seldom({"lam_critic": 1.0}),
    seldom({"lam_alpha": 0.1}),
    seldom({"critic_learning_rate": 5e-3}),
    seldom({"num_generations": 2}),
    seldom({"critic_pretraining_completions": 24}),
    seldom({"prompt_candidates": 2}),
    seldom({"num_critic_epochs": 2}),
    seldom({"critic_update": "after_actor"}),
]
WITHOUT = [
    each("advantage_estimator", *(name for name in ADVANTAGE_ESTIMATORS if name != "gae")),
    each("num_generations", 2, 4),
]


def drawn(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a configuration, and the other arguments of its trainer."""
    draw = random.Random(number)
    fields = {"seed": number}
    for alternatives in EVERY_RUN + draw.choice([WITH_CRITIC, WITHOUT]):
        fields |= draw.choice(alternatives)
    if fields["policy_loss"] == "dis":
        fields |= {"policy_mode": draw.choice(["decoupled", "bypass"]), "cliprange_high": 5.0}
    functions = [count_digits, waits, leaves_out, per_token]
    adaptive = fields["kl_coef"] > 0 and draw.random() < 0.5
    arguments = {
        "critic": draw.choice(["adapter", "shared" if "critic_update" not in fields else "shared_detached"]),
        "reward_funcs": draw.sample(functions, draw.choice([1, 2])),
        "callbacks": [AdaptiveKLCallback(target=0.01, horizon=100)] if adaptive else [],
    }
    arguments["callbacks"] += draw.choice([[], [], [stops_at_kl(1e-4)], [stops_at_kl(1e-2)]])
    if arguments["critic"] == "adapter" and "advantage_estimator" not in fields and draw.random() < 0.5:
        fields["critic_layers"] = 1
    return fields, arguments


def trainer_of(number: int, folder: Path | str, several: bool = False, **changed: Any) -> PPOTrainer:
    """The trainer of a drawn configuration.

    Args:
        several: as a run of several processes, without jumps where rounding differs.
    """
    fields, arguments = drawn(number)
    name = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
    fields |= changed
    if several:
        fields["rollout_size"] = 8 * max(2, fields.get("num_generations", 1))
        fields.pop("vllm_importance_sampling_clip_max", None)
        if fields["kl_estimator"] == "abs":
            fields["kl_estimator"] = "k2"
    talks = random.Random(-1 - number).random() < 0.3
    shape = SHAPE | {"max_position_embeddings": 256 if talks else 64, "vocab_size": VOCAB_SIZE if talks else 26}
    set_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape, **ARCHITECTURES[name]))
    model.generation_config.eos_token_id = end_of_turn_ids() if talks else list(range(1, 8))  # completions end early
    if talks:
        del arguments["reward_funcs"]
        own = (
            {"gamma_turn": 1.0, "lam_turn": 0.9}
            if "advantage_estimator" not in fields
            else dict.fromkeys(("gamma_turn", "lam_turn"))
        )
        return talking_trainer(folder, {**fields, **own, "max_completion_length": 40}, model=model, **arguments)
    return small_trainer(folder, fields, model=model, train_dataset=ROWS, **arguments)
