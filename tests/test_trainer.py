"""The steps of a run: what a mini-batch counts, how gradients are clipped, and what is logged."""

import math
from dataclasses import replace

import pytest
import torch
from gpu_memory import LiveStorages
from transformers import TrainerCallback

from helpers.runs import count_digits, gradients, logged, stops_at_kl, trainable, trained_state
from helpers.tiny import ragged_model, tiny_model
from hfppo import PPOTrainer
from hfppo.learn.loss import LossTerm
from hfppo.learn.micro_batches import MiniBatchSize
from hfppo.rollout import Rollout


def test_every_epoch_of_every_rollout_has_an_order_of_its_own(make_trainer, monkeypatch):
    seeds, take = [], Rollout.mini_batch

    def noting(rollout, index, number, seed, *sizes):
        seeds.append(seed)
        return take(rollout, index, number, seed, *sizes)

    monkeypatch.setattr(Rollout, "mini_batch", noting)
    make_trainer({"max_steps": 8}).train()
    assert seeds[0::2] == seeds[1::2]  # two mini-batches are cut from one order
    assert len(set(seeds)) == 4
    make_trainer({"max_steps": 8, "seed": 4}).train()
    assert len(set(seeds)) == 8


def test_a_mini_batch_counts_what_its_losses_count(make_trainer):
    trainer, sizes = make_trainer({"mask_truncated_completions": True, "max_steps": 4}, model=ragged_model()), []
    take = trainer.get_batch_samples

    def noting(*given):
        inputs, size = take(*given)
        masks = [piece.loss_mask for each in inputs for piece in each["pieces"]]
        counted = sum(int(m.sum()) for m in masks), sum(int(m.any(dim=1).sum()) for m in masks)
        real = sum(int(piece.mask.sum()) for each in inputs for piece in each["pieces"])
        sizes.append((counted, tuple(size.actor), real))
        return inputs, size

    trainer.get_batch_samples = noting
    trainer.train()
    assert [found for found, _, _ in sizes] == [given for _, given, _ in sizes]
    assert any(real > found[0] for found, _, real in sizes), "nothing was left out"


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3])
def test_actor_and_critic_are_clipped_apart_and_0_clips_nothing(make_trainer, max_grad_norm):
    """With SGD and a rate of 1 a step is the gradient."""
    config = {"max_grad_norm": max_grad_norm, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    trainer = make_trainer({**config, "max_steps": 1, "weight_decay": 0.0, "max_grad_norm": max_grad_norm})
    before = {name: p.clone() for name, p in trained_state(trainer.model).items()}
    trainer.train()
    moved = {True: 0.0, False: 0.0}
    for name, p in trained_state(trainer.model).items():
        moved["critic" in name.split(".")] += float((p - before[name]).square().sum())
    logs = trainer.state.log_history[0]
    for of_critic, norm in ((False, logs["grad_norm"]), (True, logs["value/grad_norm"])):
        assert norm > 1e-3
        assert math.sqrt(moved[of_critic]) == pytest.approx(max_grad_norm or norm, rel=1e-2)


@pytest.mark.parametrize("coef", [1.0, 0.0])
def test_a_term_of_a_subclass_is_logged_and_adds_its_gradient(make_trainer, coef):
    """A term equal to the policy loss: with a coefficient of 1 it doubles the actor's gradient, not the critic's."""
    trainer = make_trainer({"max_steps": 2})
    rollout = trainer.rollout([f"{a}+{b}=" for a in range(2) for b in range(2)])
    without = gradients(trainer, rollout, 1)

    class Own(type(trainer)):
        def loss_terms(self, outputs, batch):
            terms = super().loss_terms(outputs, batch)
            if outputs.logprobs is None:  # the critic's
                return terms
            return [*terms, LossTerm("my_term", coef, terms[0].per_token)]

    trainer.__class__ = Own
    for name, gradient in gradients(trainer, rollout, 1).items():
        factor = 1.0 if "critic" in name.split(".") else 1.0 + coef
        torch.testing.assert_close(gradient, factor * without[name])
    assert any(gradient.any() for name, gradient in without.items() if "critic" not in name.split("."))
    trainer.model.zero_grad()
    trainer.ppo_state.rollouts = 0
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["loss/my_term"] == pytest.approx(first["policy/loss"])
    assert first["loss"] == pytest.approx(
        (1 + coef) * first["policy/loss"] + trainer.args.vf_coef * first["value/loss"], abs=1e-6
    )


def kept(*names):
    """A trainer whose loss has only some terms, with weight 1."""

    class Only(PPOTrainer):
        def loss_terms(self, outputs, batch):
            return [replace(term, coef=1.0) for term in super().loss_terms(outputs, batch) if term.name in names]

    return Only


def moved_by(trainer) -> set[str]:
    """Which of actor and critic a run moves."""
    before = trainable(trainer)
    trainer.train()
    moved = [name for name, x in trainable(trainer).items() if not torch.equal(x, before[name])]
    return {"critic" if "critic" in name.split(".") else "actor" for name in moved}


@pytest.mark.parametrize("critic", ["adapter", "shared", "shared_detached", "model"])
def test_a_critic_whose_loss_has_no_weight_stays(make_trainer, critic):
    config = {"vf_coef": 0.0, "num_ppo_epochs": 1, "max_steps": 4}
    config |= {"gradient_accumulation_steps": 2, "weight_decay": 0.1, "critic_warmup": 1}
    trainer = make_trainer(config, critic=tiny_model() if critic == "model" else critic)
    assert moved_by(trainer) == {"actor"}


@pytest.mark.parametrize(
    ("terms", "config", "moved"),
    [
        ([], {}, set()),
        (["policy/loss"], {}, {"actor"}),
        (["policy/entropy"], {"entropy_coef": 0.1}, {"actor"}),
        (["policy/entropy"], {}, set()),  # measured without a gradient
        (["policy/kl_loss"], {"kl_loss_coef": 0.1}, {"actor"}),
        (["value/loss"], {"num_critic_epochs": 3}, {"critic"}),
    ],
)
def test_a_loss_moves_what_its_terms_reach(make_trainer, monkeypatch, terms, config, moved):
    fields = {"num_ppo_epochs": 1, "max_steps": 4, "weight_decay": 0.1} | config
    trainer = make_trainer(fields, critic="shared_detached")
    trainer.__class__ = kept(*terms)
    assert moved_by(trainer) == moved


def test_rollouts_without_a_score_move_nothing(make_trainer):
    """Neither do Adam's momentum and weight decay; steps and schedule go on."""
    rollouts = []

    def first_only(completions, trainer_state, **kwargs):
        return [None] * len(completions) if trainer_state.global_step else count_digits(completions)

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            rollouts.append(trainable(trainer))

    config = {"max_steps": 12, "weight_decay": 0.1}
    trainer = make_trainer(config, reward_funcs=first_only, callbacks=[Keep()])
    trainer.train()
    first, *others = rollouts[3:]
    assert all(torch.equal(first[name], later[name]) for later in others for name in first)
    assert logged(trainer, "learning_rate")[-1] < logged(trainer, "learning_rate")[4]


def test_actor_and_critic_have_one_graph_after_the_other(make_trainer, monkeypatch):
    """With the gradients of one graph for both, to the bit, and less memory; a piece at a time."""
    trainer = make_trainer({"max_steps": 2, "max_tokens_per_micro_batch": 64})
    rollout = trainer.rollout([f"{a}+{b}=" for a in range(4) for b in range(4)])
    size = MiniBatchSize.of(rollout, trainer.accelerator)
    inputs = {"pieces": rollout.micro_batches(2)}
    gradients, peaks = [], []
    for apart in (True, False):
        monkeypatch.setattr(type(trainer._run), "has_two_graphs", apart)
        live = LiveStorages(torch.Tensor)
        peaks.append(live.peak_of(lambda: trainer.training_step(trainer.model, inputs, size)))
        gradients.append([p.grad.clone() for p in trainer.model.parameters() if p.requires_grad])
        trainer.model.zero_grad()
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))
    assert all(gradient.any() for gradient in gradients[0][-2:])
    assert peaks[0] < 0.75 * peaks[1]


def logged_steps(trainer, metric: str) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if metric in entry]


class Stop(TrainerCallback):
    """Stops a run after a step that is not logged otherwise."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 5


@pytest.mark.parametrize(
    ("config", "callbacks", "steps"),
    [
        ({"max_steps": 8}, [], [4, 8]),
        ({"max_steps": 6}, [], [4, 6]),  # the second rollout is cut
        ({"max_steps": 6, "num_critic_epochs": 3}, [], [6]),
        # Each rollout ends with its second step, the first whose ratio is not 1.
        ({"max_steps": 6}, [stops_at_kl(1e-9)], [2, 4, 6]),
        ({"max_steps": 8, "logging_steps": 3}, [], [3, 6, 8]),  # the last steps too
        ({"max_steps": 8, "logging_steps": 10}, [Stop], [5]),
        ({"max_steps": 4, "logging_strategy": "no"}, [], []),
    ],
)
def test_each_rollout_has_one_log_unless_the_user_wants_others(make_trainer, config, callbacks, steps):
    trainer = make_trainer({"logging_steps": None, **config}, callbacks=callbacks)
    trainer.train()
    assert logged_steps(trainer, "loss") == steps
    if config.get("logging_steps") is None:
        assert logged_steps(trainer, "reward") == steps


def test_the_checkpoint_of_the_last_step_has_the_last_log(make_trainer):
    config = {"max_steps": 4, "logging_steps": 3, "save_strategy": "steps", "save_steps": 1}
    make_trainer(config).train()
    resumed = make_trainer(config)
    resumed.train(resume_from_checkpoint=True)
    assert logged_steps(resumed, "loss") == [3, 4]


def test_the_loss_of_a_run_is_the_mean_over_its_steps(make_trainer):
    """Steps that a log of ten leaves over count as those of a log of one."""
    results = []
    for logging_steps in (1, 10):
        trainer = make_trainer(
            {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": logging_steps}
        )
        results.append(trainer.train())
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert results[0].training_loss == pytest.approx(results[1].training_loss)
    assert losses == pytest.approx([results[1].training_loss])


def test_a_callbacks_own_log_stays(make_trainer):
    class Log(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_log = state.global_step in (1, 4)

    trainer = make_trainer({"logging_steps": None, "max_steps": 4}, callbacks=[Log()])
    trainer.train()
    assert logged_steps(trainer, "loss") == [1, 4]


def test_processes_that_trainer_does_not_connect_are_named(make_trainer, monkeypatch):
    monkeypatch.setattr("hfppo.checks.engine.is_initialized", lambda: True)
    monkeypatch.setattr("hfppo.checks.engine.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="started 2 processes, but Trainer connects only 1; on CPUs set use_cpu=True"):
        make_trainer()
