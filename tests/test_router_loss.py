"""The load-balancing loss of mixtures of experts is transformers' own, for every layout, and reaches the update."""

import pytest
import torch
from torch.testing import assert_close

from helpers.runs import gradients, logged, untimed_logs
from helpers.tiny import EXPERTS, LORA, tiny_experts, tiny_model
from hfppo import ActorCritic
from hfppo.models.actor_critic import Want


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("prompt", [3, 20], ids=["rows apart", "a tree"])
def test_it_is_that_of_transformers_on_the_same_tokens(kind, prompt):
    model = ActorCritic(tiny_experts(kind), LORA, "shared").eval()
    ids = torch.arange(2, 2 + prompt + 4).remainder(20).add(2).repeat(3, 1)
    ids[1:, -4:] += 1
    ids[2, -2:] += 1
    mask, sampled = torch.ones_like(ids), torch.ones(3, 4, dtype=torch.bool)
    mask[1, -1] = 0
    sampled[1, -1] = False
    with torch.no_grad():
        got = model(ids, mask, sampled, Want(router_loss=True)).router_loss
        expected = model.causal_lm(input_ids=ids, attention_mask=mask).aux_loss
    assert_close(got, 0.5 * expected)


@pytest.mark.parametrize("kind", EXPERTS)
def test_it_is_trained_and_logged_and_the_sampler_agrees(make_trainer, kind):
    trainer = make_trainer({"max_steps": 2}, model=tiny_experts(kind))
    trainer.train()
    rollout = trainer.rollout(["1+2=", "3="])
    assert_close(rollout.old_logprobs, rollout.rollout_logprobs, rtol=0.0, atol=1e-4)
    assert all(0.5 < x < 2 for x in logged(trainer, "loss/aux"))
    assert trainer.model.causal_lm.config.output_router_logits
    without = make_trainer({"max_steps": 2}, model=tiny_experts(kind, routed=False))
    without.train()
    assert not logged(without, "loss/aux")
    assert untimed_logs(without)[0]["loss"] != untimed_logs(trainer)[0]["loss"]


@pytest.mark.parametrize(
    "changes", [{}, {"loss_reduction": "seq-mean-token-sum"}, {"activation_checkpointing": True}], ids=str
)
def test_its_gradient_is_added_once_whatever_the_reduction(make_trainer, changes):
    def gradient(routed: bool):
        trainer = make_trainer({"max_steps": 1, **changes}, model=tiny_experts("mixtral", routed), critic="shared")
        if changes.get("activation_checkpointing"):
            trainer.model.train()
            trainer.model.activation_checkpointing_enable()
        return trainer, gradients(trainer, trainer.rollout(["1+2=", "3="]), 1)

    (trainer, both), (_, without) = gradient(True), gradient(False)
    rollout = trainer.rollout(["1+2=", "3="])
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    mask = torch.cat([rollout.prompt_mask, rollout.mask], dim=1)
    trainer.model.zero_grad()
    (0.5 * trainer.model.causal_lm(input_ids=ids, attention_mask=mask.long()).aux_loss).backward()
    for name, parameter in trainer.model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert_close(both[name] - without[name], own, rtol=1e-3, atol=1e-5)


def test_a_model_without_routers_is_refused(make_trainer):
    model = tiny_model()
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": 0.1})
    with pytest.raises(ValueError, match=r"output_router_logits=True .* leave it out"):
        make_trainer(model=model).rollout(["1+1="])
