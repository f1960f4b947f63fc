"""Critic and actor go through a rollout as often as each is told to, and a step moves only what it should."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import TrainerCallback

from helpers.runs import assert_same_run, logged
from hfppo.models.actor_critic import EVERYTHING

CONFIG = {"num_mini_batches": 1, "max_steps": 6, "weight_decay": 0.1, "per_device_train_batch_size": 8}


class Moves(TrainerCallback):
    """Notes who has moved in each step, and which passes it took."""

    def __init__(self):
        self.steps: list[set[str]] = []
        self.passes: list[tuple[bool, bool]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.before = self.weights(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        before, self.before = self.before, self.weights(model)
        self.steps.append({name for name, now in self.before.items() if not torch.equal(before[name], now)})

    def weights(self, model):
        owned = {"actor": model.actor_parameters(), "critic": model.critic_parameters()}
        return {name: parameters_to_vector(own).detach() for name, own in owned.items()}


def train(make_trainer, config, critic="adapter", **kwargs):
    moves = Moves()
    trainer = make_trainer({**CONFIG, **config}, critic=critic, callbacks=[moves], **kwargs)
    forward = trainer.model.forward

    def watched(input_ids=None, attention_mask=None, completion_mask=None, want=EVERYTHING, **inputs):
        if torch.is_grad_enabled():
            moves.passes.append((want.policy, want.values))
        return forward(input_ids, attention_mask, completion_mask, want, **inputs)

    trainer.model.forward = watched
    trainer.train()
    return trainer, moves


BOTH, ACTOR, CRITIC = {"actor", "critic"}, {"actor"}, {"critic"}


@pytest.mark.parametrize(
    ("critic", "epochs", "steps"),
    [
        ("adapter", (1, 3), [BOTH, CRITIC, CRITIC] * 2),
        ("adapter", (3, 1), [BOTH, ACTOR, ACTOR] * 2),
        ("shared", (1, 3), [BOTH, CRITIC, CRITIC] * 2),
    ],
)
def test_each_step_moves_what_it_should(make_trainer, critic, epochs, steps):
    config = {"num_ppo_epochs": epochs[0], "num_critic_epochs": epochs[1], "kl_coef": 0.0}
    trainer, moves = train(make_trainer, config, critic)
    assert moves.steps == steps
    together = [("actor" in step, "critic" in step) for step in steps]
    apart = [(owner == "actor", owner == "critic") for step in steps for owner in ("actor", "critic") if owner in step]
    assert moves.passes == (together if critic == "shared" else apart)
    assert trainer.ppo_state.rollouts == 2
    norms = logged(trainer, "grad_norm")
    assert len(norms) == 6
    assert min(norms) > 0
    assert len(logged(trainer, "policy/loss")) == sum("actor" in step for step in steps)
    assert len(logged(trainer, "value/grad_norm")) == sum("critic" in step for step in steps)


def test_the_critic_moves_in_each_step_of_its_warmup_and_the_actor_does_not(make_trainer):
    """Exactly 2 rollouts of 3 steps; weight decay must not move the actor either."""
    config = {"num_ppo_epochs": 3, "num_critic_epochs": 1, "critic_warmup": 2, "max_steps": 9}
    assert train(make_trainer, config)[1].steps == [CRITIC] * 6 + [BOTH, ACTOR, ACTOR]


def test_as_many_epochs_as_the_actor_are_the_same_run(make_trainer):
    runs = [train(make_trainer, {"num_ppo_epochs": 2, **more})[0] for more in ({}, {"num_critic_epochs": 2})]
    assert_same_run(*runs)
