"""Configurations drawn at random: a resumed run is the straight one bit for bit, and no cut changes a step.

The tests draw a few; `EXAMPLES=300 pytest tests/test_random_configurations.py` looks further.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from build_arithmetic_base import character_tokenizer
from conftest import LORA, SMALL, count_digits, trained_state
from datasets import Dataset
from hypothesis import HealthCheck, Phase, event, given, reject, settings
from hypothesis import strategies as st
from test_resume import final_state, logs
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from hfppo import AdaptiveKLCallback, PPOConfig, PPOTrainer
from hfppo.functional import GROUP_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS

EXAMPLES = int(os.environ.get("EXAMPLES", "8"))
some = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=EXAMPLES < 100,
    phases=[Phase.generate],  # a run takes a second, and shrinking hundreds of them
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ROWS = Dataset.from_list([{"prompt": f"请问{'1+' * (a % 3)}{a}+{b}="} for a in range(4) for b in range(3, 7)])
SHAPE = {
    **{"vocab_size": 26, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}
ARCHITECTURES = {
    **{name: {"num_key_value_heads": 1, "head_dim": 16} for name in ("llama", "qwen3", "gemma2", "phi3", "granite")},
    "gpt_neox": {},
}


async def waits(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.1 * len(text) for text in completions]


def leaves_out(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if len(text) % 3 == 2 else float(len(text)) for text in completions]


def per_token(completion_ids: list[list[int]], **kwargs: Any) -> list[list[float]]:
    return [[0.1 * (token % 3) for token in ids] for ids in completion_ids]


def one_of(*values: Any) -> st.SearchStrategy:
    return st.sampled_from(values)


EVERY_RUN = st.fixed_dictionaries(
    {
        "num_mini_batches": one_of(1, 2),
        "num_ppo_epochs": one_of(1, 2, 3),
        "max_steps": one_of(4, 5, 7),
        "max_completion_length": one_of(3, 6, 9),
        "temperature": one_of(1.0, 0.7),
        "kl_coef": one_of(0.05, 0.3, 0.0),
        "kl_estimator": one_of(*KL_ESTIMATORS),
        "policy_loss": one_of(*POLICY_LOSSES),
        "policy_mode": one_of("decoupled", "bypass", "corrected"),
        "loss_reduction": one_of(*REDUCTIONS),
        "max_grad_norm": one_of(1.0, 0.1, 0.0),
        "lr_scheduler_type": one_of("linear", "cosine"),
        "logging_steps": one_of(1, 3),
        "seed": st.integers(0, 1000),
    },
    optional={
        "kl_loss_coef": st.just(0.1),
        "kl_loss_straight_through": st.booleans(),
        "entropy_coef": st.just(0.01),
        "missing_eos_penalty": st.just(1.0),
        "normalize_scores": st.just(True),
        "positive_nll_coef": st.just(0.1),
        "reward_clip": st.just(0.5),
        "whiten_rewards": st.just(True),
        "whiten_advantages": st.booleans(),
        "mask_truncated_completions": st.just(True),
        "gamma": st.just(0.9),
        "target_kl": one_of(1e-4, 1e-2),
        "cliprange_high": st.just(0.28),
        "dual_clip": st.just(3.0),
        "mismatch_level": st.just("sequence"),
        "mismatch_correction": one_of("mask", "reject"),
        "max_tokens_per_micro_batch": one_of(16, 32),
        "activation_checkpointing": st.just(True),
        "local_rollout_forward_batch_size": one_of(1, 3),
        "on_nonfinite": st.just("skip"),
        "weight_decay": st.just(0.01),
    },
)
WITH_CRITIC = st.fixed_dictionaries(
    {"advantage_estimator": st.just("gae")},
    optional={
        "critic_warmup": one_of(1, 2),
        "bootstrap_truncated": st.just(True),
        "lam_critic": st.just(1.0),
        "lam_alpha": st.just(0.1),
        "cliprange_value": one_of(None, 0.05),
        "critic_learning_rate": st.just(5e-3),
        "num_generations": st.just(2),
    },
)
WITHOUT = st.fixed_dictionaries(
    {"advantage_estimator": one_of(*GROUP_ESTIMATORS, "reinforce_plus_plus", "remax"), "num_generations": one_of(2, 4)}
)
FIELDS = st.builds(lambda every, own: {**every, **own}, EVERY_RUN, st.one_of(WITH_CRITIC, WITHOUT))
PARTS = st.fixed_dictionaries(
    {
        "architecture": one_of(*ARCHITECTURES),
        "critic": one_of("adapter", "shared"),
        "reward_funcs": st.lists(one_of(count_digits, waits, leaves_out, per_token), min_size=1, max_size=2),
        "adaptive_kl": st.booleans(),
    }
)


def trainer_of(folder: Path, fields: dict[str, Any], parts: dict[str, Any], **changed: Any) -> PPOTrainer:
    set_seed(1)
    name = parts["architecture"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE, **ARCHITECTURES[name]))
    model.generation_config.eos_token_id = [1, 2, 3]  # so that some completions end early
    given = {**SMALL, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, **fields, **changed}
    try:
        args = PPOConfig(output_dir=str(folder), **given)
    except ValueError as refused:
        event(f"refused: {refused}"[:60])
        reject()
    return PPOTrainer(
        model=model,
        reward_funcs=parts["reward_funcs"],
        args=args,
        train_dataset=ROWS,
        processing_class=character_tokenizer(),
        peft_config=LORA,
        critic=parts["critic"],
        callbacks=[AdaptiveKLCallback(target=0.01, horizon=100)] if parts["adaptive_kl"] and fields["kl_coef"] else [],
    )


@some
@given(FIELDS, PARTS, st.data())
def test_a_resumed_run_is_the_straight_one(fields, parts, data):
    with tempfile.TemporaryDirectory() as folder:
        straight = trainer_of(Path(folder) / "straight", fields, parts, save_strategy="steps", save_steps=1)
        straight.train()
        step = data.draw(st.integers(1, fields["max_steps"]))
        checkpoint = Path(folder) / "straight" / f"checkpoint-{step}"
        resumed = trainer_of(Path(folder) / "resumed", fields, parts)
        resumed.train(resume_from_checkpoint=str(checkpoint))
    expected, found = final_state(straight), final_state(resumed)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert json.dumps(logs(resumed), sort_keys=True) == json.dumps(logs(straight), sort_keys=True)  # some are NaN


@some
@given(FIELDS, PARTS)
def test_no_cut_into_micro_batches_changes_a_step(fields, parts):
    once = {**fields, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "critic_warmup": 0}
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer_of(Path(folder) / "whole", once, parts)
        before = {name: p.clone() for name, p in trained_state(whole.model).items()}
        cut = trainer_of(
            *(Path(folder) / "cut", once, parts),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            max_tokens_per_micro_batch=None,
        )
        whole.train()
        cut.train()
    found = trained_state(cut.model)
    for name, weight in trained_state(whole.model).items():
        steps = [(after - before[name]).double() for after in (weight, found[name])]
        torch.testing.assert_close(*steps, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
