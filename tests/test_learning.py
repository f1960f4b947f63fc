"""The embedded task is learnt: a shorter version of recipes/arithmetic/arithmetic.py."""

import warnings
from pathlib import Path

import pytest
from arithmetic import FOLDER, accuracy, right_answer
from datasets import load_dataset
from peft import LoraConfig

from hfppo import HealthWarning, PPOConfig, PPOTrainer


@pytest.mark.parametrize("critic", ["adapter", pytest.param("shared", marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_arithmetic_is_learnt_in_a_dozen_rollouts(tmp_path: Path, critic):
    """12 rollouts of 96 take held-out accuracy at temperature 1 from about 0.4 to 0.75 at least."""
    data = load_dataset("json", data_files={s: str(FOLDER / f"{s}.jsonl") for s in ("train", "test")})
    args = PPOConfig(
        output_dir=str(tmp_path),
        max_steps=48,
        per_device_train_batch_size=48,
        num_mini_batches=2,
        num_ppo_epochs=2,
        max_completion_length=12,
        learning_rate=2e-3,
        kl_coef=0.02,
        vf_coef=1.0,
        local_rollout_forward_batch_size=128,
        per_device_eval_batch_size=128,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = PPOTrainer(
        model=str(FOLDER / "base"),
        reward_funcs=right_answer,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"].select(range(256)),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        critic=critic,
        compute_metrics=accuracy,
    )
    with trainer.eval_sampling(True):
        before = trainer.evaluate()["eval_accuracy"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", HealthWarning)
        trainer.train()
    with trainer.eval_sampling(True):
        after = trainer.evaluate()["eval_accuracy"]
    assert before <= 0.5
    assert after >= 0.75
    deviations = [
        e["policy/first_ratio_deviation"] for e in trainer.state.log_history if "policy/first_ratio_deviation" in e
    ]
    assert max(deviations) < 1e-5
