"""The embedded task is learnt: a shorter version of recipes/arithmetic/arithmetic.py."""

import warnings
from pathlib import Path

import pytest
from arithmetic import FOLDER, accuracy, right_answer
from datasets import load_dataset
from peft import LoraConfig

from helpers.runs import logged, small_trainer
from hfppo import HealthWarning


@pytest.mark.parametrize("critic", ["adapter", pytest.param("shared", marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_arithmetic_is_learnt_in_a_dozen_rollouts(tmp_path: Path, critic):
    """12 rollouts of 96 take held-out accuracy at temperature 1 from about 0.4 to 0.75 at least."""
    data = load_dataset("json", data_files={s: str(FOLDER / f"{s}.jsonl") for s in ("train", "test")})
    config = {"max_steps": 48, "per_device_train_batch_size": 48, "max_completion_length": 12, "learning_rate": 2e-3}
    config |= {"kl_coef": 0.02, "vf_coef": 1.0, "local_rollout_forward_batch_size": 128, "seed": 0}
    trainer = small_trainer(
        tmp_path,
        {**config, "per_device_eval_batch_size": 128},
        model=str(FOLDER / "base"),
        processing_class=None,
        reward_funcs=right_answer,
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
    assert max(logged(trainer, "policy/first_ratio_deviation")) < 1e-5
