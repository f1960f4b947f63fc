"""Clip metrics by epoch, and what a callback may change during a run."""

from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from helpers.runs import assert_same_tensors, logged, trained_state, untimed_logs
from helpers.tiny import ragged_model
from hfppo import ClipMetricsCallback, PPOCallback, PPOControl
from hfppo.callbacks import PASSED, call_event
from hfppo.metrics import UpdateStep

# 4 steps to a rollout: 2 epochs of 2 mini-batches.
CONFIG = {"max_steps": 8, "learning_rate": 5e-2, "cliprange": 0.05, "dual_clip": 3.0}


class Keep(PPOCallback):
    """What the events are called with."""

    def __init__(self):
        self.steps, self.updates = [], []

    def on_mini_batch_end(self, args, state, control, *, step, **kwargs):
        self.steps.append(step)

    def on_update_end(self, args, state, control, **kwargs):
        self.updates.append(kwargs)


def test_each_epoch_is_logged_as_its_mean_over_tokens(make_trainer):
    keep = Keep()
    callbacks = [keep, ClipMetricsCallback(per_mini_batch=True)]
    trainer = make_trainer(CONFIG, model=ragged_model(), callbacks=callbacks)
    trainer.train()
    assert [(step.epoch, step.mini_batch) for step in keep.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    assert [update["steps"] for update in keep.updates] == [keep.steps[:4], keep.steps[4:]]
    tokens = [step.sums["policy/ratio"][0] for step in keep.steps]
    assert tokens[2] != tokens[3]
    names = {"frac": "policy/clip_frac", "approx_kl": "policy/approx_kl"}
    for name, metric in names.items():
        of_steps = [step.metrics[metric] for step in keep.steps]
        assert max(of_steps) > 0
        sums = [of_steps[i] * tokens[i] + of_steps[i + 1] * tokens[i + 1] for i in (2, 6)]
        means = [total / (tokens[i] + tokens[i + 1]) for total, i in zip(sums, (2, 6), strict=True)]
        assert logged(trainer, f"clip/epoch_2/{name}") == pytest.approx(means)
        assert logged(trainer, f"clip/epoch_2_batch_1/{name}") == pytest.approx([of_steps[2], of_steps[6]])
    assert logged(trainer, "clip/epoch_1_batch_1/frac") == [0.0, 0.0]  # the ratio is still 1
    assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= keep.updates[0].keys()
    first = keep.updates[0]["metrics"]
    assert first["policy/ratio_max"] == max(step.metrics["policy/ratio_max"] for step in keep.steps[:4])
    of_tokens = [step.metrics["policy/ratio"] * n for step, n in zip(keep.steps[:4], tokens[:4], strict=True)]
    assert first["policy/ratio"] == pytest.approx(sum(of_tokens) / sum(tokens[:4]))


@pytest.mark.parametrize(
    ("found", "factor", "expected"), [(0.15, 1.0, 0.8), (0.11, 0.5, 0.45), (0.0, 0.5, 0.6), (0.05, 1.0, 1.0)]
)
def test_the_learning_rate_moves_towards_the_target(found, factor, expected):
    """Target 0.1: 0.15 asks for −0.5, bounded to −0.2; 0.11 for −0.1; 0 for +1, bounded to +0.2, and at most 1."""
    control, shares = PPOControl(learning_rate_factor=factor), (0.9, found)
    steps = [UpdateStep(epoch, 0, {"policy/clip_frac": [4, 4 * x, 0, 0]}) for epoch, x in enumerate(shares)]
    args = SimpleNamespace(num_ppo_epochs=2)
    ClipMetricsCallback(target=0.1).on_update_end(args, None, control, steps=steps, ppo_state=None)
    assert control.learning_rate_factor == pytest.approx(expected)
    assert control.logs["clip/learning_rate_factor"] == pytest.approx(expected)


def sets(changes: dict) -> PPOCallback:
    """A callback that sets these attributes of `control`."""

    class Odd(PPOCallback):
        def on_rollout_end(self, args, state, control, **kwargs):
            vars(control).update(changes)

    return Odd()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"learning_rate_factor": -1}, ValueError, "learning_rate_factor=-1.0; set a finite number of at least 0"),
        ({"cliprange": float("nan")}, ValueError, "Odd.on_rollout_end set control.cliprange=nan; set a finite number"),
        ({"logs": {"custom/mine": "text"}}, ValueError, "could not convert string to float: 'text'"),
        ({"beta": 0.5}, AttributeError, "control.beta, which nothing reads; it may set .*kl_coef"),
    ],
)
def test_a_callback_that_sets_what_it_cannot_is_named(changes, error, words):
    handler = SimpleNamespace(callbacks=[sets(changes)], **dict.fromkeys(PASSED))
    trainer = SimpleNamespace(callback_handler=handler, args=None, state=None)
    with pytest.raises(error, match=words):
        call_event(trainer, "on_rollout_end", PPOControl(), ppo_state=None)


def test_a_callback_that_sets_the_configuration_instead_of_control_is_told(make_trainer):
    class Odd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.kl_coef = 0.5

    with pytest.raises(AttributeError, match=r"args\.kl_coef was changed .* set control\.kl_coef in a PPOCallback"):
        make_trainer({"max_steps": 9}, callbacks=[Odd()]).train()


def test_such_a_callback_ends_the_run(make_trainer):
    with pytest.raises(ValueError, match="'mine' is not a metric; use 'custom/mine'"):
        make_trainer({"max_steps": 1}, callbacks=[sets({"logs": {"mine": 1.0}})]).train()


def test_half_the_factor_is_half_the_actors_rate_and_not_the_critics(make_trainer):
    config = {"max_steps": 6, "critic_learning_rate": 2e-2, "learning_rate": 1e-2}
    scaled = make_trainer(config, callbacks=[sets({"learning_rate_factor": 0.5})])
    scaled.train()
    plain = make_trainer({**config, "learning_rate": 5e-3})
    plain.train()
    assert_same_tensors(trained_state(scaled.model), trained_state(plain.model))
    for name in ("learning_rate", "critic_learning_rate"):
        assert logged(scaled, name) == logged(plain, name)


def test_a_callback_can_raise_beta_from_0(make_trainer):
    """From the second rollout on the reference is computed, and the KL counts in the rewards."""
    saving = {"max_steps": 12, "kl_coef": 0.0, "save_strategy": "steps", "save_steps": 6, "critic_layers": 1}
    trainer = make_trainer(saving, callbacks=[sets({"kl_coef": 5.0})])
    trainer.train()
    assert logged(trainer, "kl_coef") == [5.0, 5.0]
    assert min(map(abs, logged(trainer, "kl"))) > 0
    first, *others = [log for log in trainer.state.log_history if "reward" in log]
    assert first["rlhf_reward"] == pytest.approx(first["reward"])
    for log in others:
        assert log["rlhf_reward"] == pytest.approx(log["reward"] - 5 * log["kl"] * log["completions/mean_length"])
    resumed = make_trainer(saving, callbacks=[sets({"kl_coef": 5.0})])  # in the middle of the second rollout
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-6")
    assert untimed_logs(resumed) == untimed_logs(trainer)


class Narrow(PPOCallback):
    """Narrows the clip after the first rollout."""

    def on_update_end(self, args, state, control, **kwargs):
        control.cliprange = control.cliprange_high = 1e-4


def test_a_callback_changes_the_clip_of_the_next_rollout(make_trainer):
    config = {"max_steps": 8, "cliprange": 0.9, "cliprange_high": 9.0, "learning_rate": 1e-3}
    trainer = make_trainer(config, callbacks=[Narrow()])
    trainer.train()
    fractions = logged(trainer, "policy/clip_frac")
    assert fractions[:4] == [0.0] * 4
    assert max(fractions[5:]) > 0.3
