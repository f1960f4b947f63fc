"""The three policy modes: what the rollout holds for each, and what the loss makes of it."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from helpers.scripted import PROMPTS, off_trainer
from hfppo.learn.micro_batches import MiniBatchSize
from hfppo.models.actor_critic import EVERYTHING


def loss(trainer, rollout) -> float:
    size = MiniBatchSize(float(rollout.loss_mask.sum()), float(rollout.loss_mask.any(dim=1).sum()))
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


@pytest.mark.parametrize(
    ("correction", "weight", "counts"), [("truncate", 2.0, True), ("mask", 0.0, True), ("reject", 0.0, False)]
)
def test_correction_bounds_the_weights_and_keeps_the_credit(make_trainer, correction, weight, counts):
    plain = off_trainer(make_trainer, "decoupled").rollout(PROMPTS)
    rollout = off_trainer(make_trainer, f"token_{correction}").rollout(PROMPTS)
    assert rollout.weights[:, 0].tolist() == pytest.approx([weight] * 4)
    assert_close(rollout.weights[:, 1:][rollout.mask[:, 1:]], torch.ones(int(rollout.mask[:, 1:].sum())))
    assert rollout.loss_mask[:, 0].tolist() == [counts] * 4
    assert torch.equal(rollout.loss_mask[:, 1:], rollout.mask[:, 1:])
    for name in ("rewards", "advantages", "returns"):
        assert torch.equal(getattr(rollout, name), getattr(plain, name)), name


def test_weights_multiply_the_policy_loss_alone(make_trainer):
    """At ratio 1 the policy loss of a token is −A, or −w·A; the value loss is the same."""
    trainer = off_trainer(make_trainer, "token_truncate")
    trainer.ppo_state.rollouts = 1  # before the first, the critic alone would learn
    rollout = trainer.rollout(PROMPTS)
    expected = -(rollout.advantages * (rollout.weights - 1))[rollout.mask].sum() / rollout.mask.sum()
    assert abs(float(expected)) > 1e-3
    difference = loss(trainer, rollout) - loss(trainer, replace(rollout, weights=None))
    assert_close(difference, float(expected), rtol=1e-4, atol=1e-5)


def test_metrics_of_the_mismatch(make_trainer):
    trainer = off_trainer(make_trainer, "token_mask", max_steps=1)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["mismatch/max"] == pytest.approx(math.log(3.0), rel=1e-4)
    assert 0 < logs["mismatch/cut_frac"] == pytest.approx(1 / logs["completions/mean_length"])
    assert logs["mismatch/ess"] == pytest.approx(1 - logs["mismatch/cut_frac"], abs=1e-5)
    assert logs["mismatch/weight_max"] == pytest.approx(1.0, abs=1e-4)


def test_without_mismatch_all_modes_train_alike(make_trainer):
    weights = []
    for mode in ("decoupled", "bypass", "token_truncate"):
        trainer = make_trainer({"policy_mode": mode, "max_steps": 4})
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.actor_parameters()]))
    for other in weights[1:]:
        assert_close(other, weights[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("critic", ["shared", "adapter"])
def test_bypass_reads_the_values_in_a_pass_without_logprobs(make_trainer, critic):
    trainer = make_trainer({"policy_mode": "bypass"}, critic=critic)
    for parameter in trainer.model.critic_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    wants, forward = set(), trainer.model.forward

    def watched(*args, want=EVERYTHING, completion_mask=None, **kwargs):
        if completion_mask is not None and completion_mask.shape[0] == len(PROMPTS):
            wants.add((want.policy, want.values))
        return forward(*args, want=want, completion_mask=completion_mask, **kwargs)

    trainer.rollout(PROMPTS)  # the model's outputs are checked before the first one
    trainer.model.forward = watched
    assert trainer.rollout(PROMPTS).values.any()
    assert wants == {(True, False), (False, True)}, "log-probs of the reference only"
