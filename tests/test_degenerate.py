"""Rollouts at the edge of what there is: a step is made, and every number it gives is finite and makes sense."""

import math

import pytest
import torch
from datasets import Dataset

from helpers.runs import trainable
from helpers.scripted import always, answering
from helpers.tiny import tiny_model

ROLLOUT = {"max_steps": 4, "kl_coef": 0.1, "weight_decay": 0.0}  # 8 completions, 4 steps


def one_rollout(make_trainer, *completions, config=None, **kwargs):
    """Train on a rollout of given completions; the trainer, its first log, and how far any weight has moved."""
    trainer = make_trainer({**ROLLOUT, **(config or {})}, **kwargs)
    if completions:
        answering(trainer, *completions)
    before = trainable(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == trainer.state.max_steps
    assert [name for entry in logged for name, x in entry.items() if not math.isfinite(x)] == []
    moved: dict[str, float] = {}
    for name, weight in trainable(trainer).items():
        owner = "critic" if "critic" in name.split(".") else "actor"
        moved[owner] = max(moved.get(owner, 0.0), float((weight - before[name]).abs().max()))
    assert all(math.isfinite(distance) for distance in moved.values())
    return trainer, logged[0], moved


def test_completions_that_end_at_once(make_trainer):
    """Empty texts of one token, EOS; a reward function sees "" eight times."""

    def empty(completions, **kwargs):
        assert completions == [""] * 8
        return [float(i) for i in range(len(completions))]

    _, logs, moved = one_rollout(make_trainer, ".", reward_funcs=empty)
    assert (logs["completions/mean_length"], logs["completions/max_length"]) == (1.0, 1.0)
    assert logs["completions/truncated_frac"] == 0.0
    assert logs["reward"] == 3.5
    assert moved["actor"] > 0


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_completions_that_are_all_cut_and_masked_teach_the_critic_only(make_trainer, estimator):
    config = {"mask_truncated_completions": True, "advantage_estimator": estimator, "num_generations": 2}
    _, logs, moved = one_rollout(make_trainer, "123456", "234567", config=config)
    assert logs["completions/truncated_frac"] == 1.0
    assert moved.pop("actor") == 0.0
    assert all(distance > 0.0 for distance in moved.values())
    assert "policy/loss" not in logs
    assert "policy/clip_frac" not in logs  # a mean over nothing


@pytest.mark.parametrize("estimator", ["gae", "grpo", "reinforce_plus_plus"])
def test_one_single_token_that_counts(make_trainer, estimator):
    """Seven rows without a score, and one of a single token: a variance over one number."""
    config = {"advantage_estimator": estimator, "num_generations": 2 if estimator == "grpo" else 1}
    _, logs, _ = one_rollout(make_trainer, ".", reward_funcs=always(1.0, *[None] * 7), config=config)
    assert logs["unscorable_frac"] == 7 / 8
    assert (logs["reward"], logs["reward_std"]) == (1.0, 0.0)


def test_prompts_of_one_token_and_at_the_limit(make_trainer):
    """Together with the completion they fill the model's positions to the last."""
    prompts = ["1", "1" * 10]
    config, dataset = {"max_prompt_length": 10, "max_completion_length": 6}, Dataset.from_dict({"prompt": prompts})
    model = tiny_model(max_position_embeddings=16)
    trainer, logs, moved = one_rollout(make_trainer, config=config, model=model, train_dataset=dataset)
    rollout = trainer.rollout(prompts)
    assert rollout.prompt_mask.sum(dim=1).tolist() == [1, 10]
    assert logs["completions/max_length"] <= 6
    assert moved["actor"] > 0
    with pytest.raises(ValueError, match="together exceed the model's 15 positions"):
        make_trainer(config, model=tiny_model(max_position_embeddings=15), train_dataset=dataset)


ROPE = {"factor": 2.0, "rope_theta": 1e4}
WITH_BEFORE = {**ROPE, "original_max_position_embeddings": 16}
BY_LENGTH = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("kind", "rope", "longest", "refused"),
    [  # with 6 tokens of the completion the longest prompt fills 32 or 16 positions
        ("yarn", WITH_BEFORE, 26, "exceed the model's 32 positions"),
        ("llama3", {**WITH_BEFORE, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 26, "the model's 32 positions"),
        ("dynamic", ROPE, 10, "16 positions before dynamic"),
        ("longrope", {**ROPE, **BY_LENGTH}, 10, "16 positions before longrope"),
    ],
)
def test_positions_count_as_scaled_unless_the_longest_row_scales_them(make_trainer, kind, rope, longest, refused):
    def trainer_of(length: int):
        model = tiny_model(max_position_embeddings=16, rope_parameters={"rope_type": kind, **rope})
        return make_trainer(model=model, train_dataset=Dataset.from_dict({"prompt": ["1" * length]}))

    rollout = trainer_of(longest).rollout(["1" * longest, "2"])
    assert torch.allclose(rollout.old_logprobs, rollout.rollout_logprobs, atol=1e-4)
    with pytest.raises(ValueError, match=refused):
        trainer_of(longest + 1)
