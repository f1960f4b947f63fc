"""From scores to advantages in the trainer: every field reaches them."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from helpers.runs import assert_same_run, assert_same_tensors, count_digits, size_of
from helpers.scripted import PROMPTS, Off, always, off_trainer
from helpers.tiny import other_tokenizer, ragged_model, scorer, tiny_model
from hfppo import functional as F
from hfppo.rewards.model import RewardModel


def test_the_penalty_is_that_of_beta_as_it_is_now(make_trainer):
    given = {"ref_model": tiny_model(seed=7), "reward_funcs": always(*[0.0] * 4)}
    trainer = make_trainer({"kl_estimator": "abs", "kl_coef": 0.1}, **given)
    trainer.ppo_state.kl_coef = 0.3  # as AdaptiveKLCallback leaves it
    rollout = trainer.rollout(PROMPTS)
    kl = F.token_kl(rollout.old_logprobs, rollout.ref_logprobs, "abs").where(rollout.mask, 0.0)
    assert kl.abs().max() > 0.1
    assert_close(rollout.rewards, -0.3 * kl)


def test_a_look_compares_a_completion_with_no_other(make_trainer):
    """Advantages are not whitened: they would say how its neighbours fared."""
    trainer = make_trainer({"kl_coef": 0.0, "lam": 1.0}, reward_funcs=always(1.0, 5.0))
    rollout = trainer.rollout(PROMPTS[:2])
    assert rollout.rewards.sum(dim=1).tolist() == [1.0, 5.0]
    assert_close(rollout.advantages, (rollout.returns - rollout.values).where(rollout.mask, 0.0))


class OffBothWays(Off):
    """The first token is three times as likely for the training model as for the sampler, the second the reverse."""

    def __call__(self, *args):
        off = [(turn, [*turn.logprobs]) for turn in super().__call__(*args)]
        for _, logprobs in off:
            logprobs[1:2] = [x + math.log(3.0) for x in logprobs[1:2]]
        return [replace(turn, logprobs=logprobs) for turn, logprobs in off]


@pytest.mark.parametrize("mode", F.MISMATCH_MODES)
def test_weights_of_another_sampler_are_those_that_are_asked_for(make_trainer, mode):
    wanted = {"policy_mode": mode, "vllm_importance_sampling_clip_max": 2.9}
    trainer = make_trainer({"kl_coef": 0.0, **wanted}, model=ragged_model())
    trainer.collector = replace(trainer.collector, sampler=OffBothWays(trainer.collector.sampler))
    rollout = trainer.rollout(PROMPTS)
    given = rollout.old_logprobs, rollout.rollout_logprobs, rollout.mask, mode
    weights, kept = F.importance_weights(*given, 2.9)
    assert_close(rollout.weights, weights)
    assert torch.equal(rollout.loss_mask, kept)
    if mode == "token_truncate":
        assert not torch.equal(weights, F.importance_weights(*given)[0])  # the default limit is another


# The policy modes: what the rollout has for each, and what the loss makes of it.


def loss(trainer, rollout) -> float:
    size = size_of(rollout)
    inputs = {"batch": rollout}
    return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=size).item()


def test_decoupled_trusts_the_training_model_and_bypass_the_sampler(make_trainer):
    decoupled = off_trainer(make_trainer, "decoupled").rollout(PROMPTS)
    bypass = off_trainer(make_trainer, "bypass").rollout(PROMPTS)
    assert torch.equal(decoupled.completion_ids, bypass.completion_ids)
    gap = (decoupled.old_logprobs - bypass.old_logprobs)[:, 0]
    assert_close(gap, torch.full((4,), math.log(3.0)), rtol=1e-4, atol=0)
    assert torch.equal(bypass.old_logprobs, bypass.rollout_logprobs)
    assert decoupled.weights is None
    assert bypass.weights is None


def test_weights_multiply_the_policy_loss_alone(make_trainer):
    """At ratio 1 the policy loss of a token is −A, or −w·A; the value loss is the same."""
    trainer = off_trainer(make_trainer, "token_truncate")
    trainer.ppo_state.rollouts = 1  # before the first, the critic alone would learn
    rollout = trainer.rollout(PROMPTS)
    expected = -(rollout.advantages * (rollout.weights - 1))[rollout.mask].sum() / rollout.mask.sum()
    assert abs(float(expected)) > 1e-3
    difference = loss(trainer, rollout) - loss(trainer, replace(rollout, weights=None))
    assert_close(difference, float(expected), rtol=1e-4, atol=1e-5)


@contextmanager
def default_dtype(dtype: torch.dtype):
    """Tensors made of Python floats have this dtype unless they name one."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(make_trainer, dtype):
    bounded = {"value_range": [-999.0, 9999.0], "value_loss": "bce", "kl_coef": 0.0}
    config = {"policy_loss": "sapo", "missing_eos_penalty": 0.7, **bounded}

    def by_token(completion_ids, **kwargs):
        return [[1002.99 + i / 3 for i in range(len(ids))] for ids in completion_ids]

    funcs = [count_digits, by_token, RewardModel(scorer(), other_tokenizer("left", "<end>"))]
    trainers = [make_trainer({**config, "max_steps": 2}, reward_funcs=funcs) for _ in range(2)]
    rollouts = []
    for trainer, used in zip(trainers, (torch.float32, dtype), strict=True):
        with default_dtype(used):
            rollouts.append(trainer.rollout(PROMPTS).stored_tensors())
            trainer.train()
    assert_same_tensors(*rollouts)
    assert_same_run(*trainers)
