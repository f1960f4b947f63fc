"""Configurations drawn at random: a resumed run is the straight one bit for bit, and no cut changes a step.

The tests take a few; `CONFIGURATIONS=200 pytest -m slow tests/test_random_configurations.py` looks further.
"""

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from helpers.runs import assert_same_end, count_digits, logs, small_trainer, stops_at_kl
from hfppo import AdaptiveKLCallback, PPOTrainer
from hfppo.functional import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
numbered = pytest.mark.parametrize("number", range(int(os.environ.get("CONFIGURATIONS", "6"))))

ROWS = Dataset.from_list([{"prompt": f"请问{'1+' * (a % 3)}{a}+{b}="} for a in range(4) for b in range(3, 7)])
SHAPE = {
    **{"vocab_size": 26, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}
GROUPED_HEADS = {"num_key_value_heads": 1, "head_dim": 16}
ARCHITECTURES = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "phi3", "granite"), GROUPED_HEADS),
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
]
WITH_CRITIC = [
    seldom(*each("critic_warmup", 1, 2)),
    seldom({"bootstrap_truncated": True}),
    seldom({"lam_critic": 1.0}),
    seldom({"lam_alpha": 0.1}),
    seldom({"critic_learning_rate": 5e-3}),
    seldom({"num_generations": 2}),
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
    functions = [count_digits, waits, leaves_out, per_token]
    adaptive = fields["kl_coef"] > 0 and draw.random() < 0.5
    arguments = {
        "critic": draw.choice(["adapter", "shared"]),
        "reward_funcs": draw.sample(functions, draw.choice([1, 2])),
        "callbacks": [AdaptiveKLCallback(target=0.01, horizon=100)] if adaptive else [],
    }
    arguments["callbacks"] += draw.choice([[], [], [stops_at_kl(1e-4)], [stops_at_kl(1e-2)]])
    if arguments["critic"] == "adapter" and "advantage_estimator" not in fields and draw.random() < 0.5:
        fields["critic_layers"] = 1
    return fields, arguments


def trainer_of(number: int, folder: Path, **changed: Any) -> PPOTrainer:
    fields, arguments = drawn(number)
    name = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
    set_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE, **ARCHITECTURES[name]))
    model.generation_config.eos_token_id = list(range(1, 8))  # so that completions end early
    return small_trainer(folder, {**fields, **changed}, model=model, train_dataset=ROWS, **arguments)


@numbered
def test_a_resumed_run_is_the_straight_one(number, tmp_path):
    straight = trainer_of(number, tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight.train()
    step = random.Random(number).randint(1, straight.args.max_steps - 1)
    resumed = trainer_of(number, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert_same_end(resumed, straight)
    assert resumed.ppo_state == straight.ppo_state
    assert json.dumps(logs(resumed), sort_keys=True) == json.dumps(logs(straight), sort_keys=True)  # some are NaN
