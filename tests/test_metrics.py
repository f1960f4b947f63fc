"""Sums and counts, divided once."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import TrainerCallback

from helpers.agents import EPISODE_METRICS
from helpers.runs import Keep, logged
from helpers.scripted import off_trainer
from helpers.tiny import tiny_model
from hfppo import ClipMetricsCallback, TolerantReward
from hfppo.collect.collector import Phases
from hfppo.collect.rollout_metrics import prompts_without_signal
from hfppo.learn.loss import LossTerm
from hfppo.metrics import METRICS, Meter, parts, parts_of, reduction_of


def test_parts_of_unequal_size_are_divided_once_and_padding_does_not_count():
    meter = Meter()
    meter.update({"kl": parts(torch.tensor([[1.0, 2.0], [3.0, 100.0]]), torch.tensor([[True, True], [True, False]]))})
    meter.update({"kl": parts(torch.tensor([[6.0]]), torch.tensor([[True]]))})
    meter.update({"reward_std": parts(torch.tensor([1.0, 3.0]))})
    meter.update({"reward_std": parts(torch.tensor([5.0]))})
    meter.update({"policy/ratio_max": parts(torch.tensor([-5.0, -2.0, 9.0]), torch.tensor([True, True, False]))})
    read = meter.read()
    assert read["kl"] == pytest.approx((1 + 2 + 3 + 6) / 4)
    assert read["reward_std"] == pytest.approx(math.sqrt(8 / 3))
    assert read["policy/ratio_max"] == -2.0
    assert meter.read() == {}


def test_the_deviation_of_equal_numbers_is_zero():
    assert Meter({"reward_std": parts(torch.full((1000,), 0.7))}).read()["reward_std"] == pytest.approx(0.0, abs=1e-6)


def test_an_empty_part_leaves_no_metric():
    assert Meter({"kl": parts(torch.zeros(0))}).read() == {}


def test_last_keeps_the_last():
    meter = Meter({"kl_coef": parts_of(0.1)})
    meter.update({"kl_coef": parts_of(0.2)})
    meter.update({"kl_coef": parts_of(0.3)})
    assert meter.read()["kl_coef"] == pytest.approx(0.3)


def test_state_goes_on_where_it_was_saved():
    first, second, whole = Meter(), Meter(), Meter()
    for meter in (first, whole):
        meter.update({"kl": parts(torch.tensor([1.0, 2.0]))})
    second.load_state_dict(first.state_dict())
    for meter in (second, whole):
        meter.update({"kl": parts(torch.tensor([6.0]))})
    assert second.read() == whole.read() == {"kl": 3.0}


def test_names_must_be_in_the_table():
    with pytest.raises(ValueError, match="typo"):
        Meter({"typo": torch.zeros(4)})


def test_every_metric_of_the_table_appears_in_a_log_and_no_other(make_trainer, dataset):
    def scores(completions, log_metric, **kwargs):
        log_metric("length", sum(map(len, completions)))
        return [float(len(text)) for text in completions]

    config = {"kl_loss_coef": 0.1, "dual_clip": 3.0, "policy_mode": "token_truncate"}
    config |= {"num_generations": 2, "max_steps": 8, "rollouts_ahead": 1, "value_range": [0.0, 9.0], "kl_coef": 0.0}
    config |= {"critic_update": "policy_aligned", "lam_critic": 1.0}
    trainer = make_trainer(config, reward_funcs=TolerantReward(scores), callbacks=[ClipMetricsCallback()])
    given = trainer.loss_terms

    def more_terms(outputs, batch):
        return [*given(outputs, batch), LossTerm("length", 0.0, torch.zeros_like(batch.advantages))]

    trainer.loss_terms = more_terms
    trainer.train()
    seen = {name for entry in trainer.state.log_history if "loss" in entry for name in entry}
    seen = {name for name in seen if not name.startswith("clip/epoch_2/")}  # as those of the first epoch
    elsewhere = {name for name in METRICS if name.startswith("critic_pretraining") or "candidates" in name}
    expected = (
        METRICS.keys() - elsewhere - EPISODE_METRICS - {"time/straggler", "agent/failed_frac", "agent/conversations"}
    )
    assert seen - {"epoch", "step", "grad_norm"} == {
        name.format(function="scores", name="length", part="epoch_1", third=third)
        for name in expected
        for third in ("first", "middle", "last")
    }


@pytest.mark.parametrize(
    ("scores", "scorable", "counts", "expected"),
    [
        ([1.0, 1.0], [True, True], [True, True], True),
        ([0.0, 1.0], [True, True], [True, True], False),
        ([0.0, 1.0], [True, True], [True, False], False),  # cut by the length limit, and compared all the same
        ([0.0, 1.0], [True, True], [False, False], True),
        ([0.0, 1.0], [True, False], [True, False], True),
        ([0.0, 0.0], [False, False], [False, False], True),
    ],
)
def test_a_prompt_gives_no_signal_where_no_advantage_counts(make_trainer, scores, scorable, counts, expected):
    """As the estimators have it: they compare what has a score, and the loss counts what is not masked."""
    rollout = make_trainer().rollout(["请问1+1="] * 2)
    scores, scorable, counts = torch.tensor(scores), torch.tensor(scorable)[:, None], torch.tensor(counts)[:, None]
    rollout = replace(rollout, scores=scores, loss_mask=rollout.mask & counts)
    assert prompts_without_signal(rollout, rollout.mask & scorable, 2).tolist() == [expected]


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"values.*\(2, 3\).*mask.*\(2, 1\)"):
        parts(torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool))


@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (1.0, math.nan), (1.0, math.nan, 2.0)])
def test_a_largest_number_that_is_none_is_not_hidden_by_others(numbers):
    meter = Meter()
    for number in numbers:
        meter.update({"policy/ratio_max": parts(torch.tensor([number]))})
        meter.state_dict()  # which adds up what there is
    assert math.isnan(meter.read()["policy/ratio_max"])


def test_stretches_of_time_add_up(monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 12.0])
    monkeypatch.setattr("hfppo.collect.collector.time.perf_counter", lambda: next(clock))
    phases = Phases(False, lambda name: nullcontext())
    for _ in range(2):
        with phases("generation"):
            pass
    assert Meter(phases.measures(14.0)).read() == {"time/generation": 7.0, "time/tokens_per_second": 2.0}


def test_a_name_made_from_a_pattern_is_reduced_like_the_pattern():
    names = ("rewards/a/b/std", "rewards/f/mean", "custom/x", "loss/own")
    assert [reduction_of(name) for name in names] == ["std", "mean", "mean", "mean"]


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step"])
def test_the_rates_that_a_callback_sets_are_logged_as_they_are(make_trainer, event):
    def choose(args, state, control, optimizer, **kwargs):
        for group, rate in zip(optimizer.param_groups, (1e-4, 1e-4, 2e-4, 2e-4), strict=True):
            group["lr"] = rate * (1 + state.global_step)

    callback = TrainerCallback()
    setattr(callback, event, choose)
    trainer = make_trainer({"max_steps": 2}, callbacks=[callback])
    trainer.train()
    assert logged(trainer, "learning_rate") == [1e-4, 2e-4]
    assert logged(trainer, "critic_learning_rate") == [2e-4, 4e-4]


def test_rewards_advantages_and_values_by_hand(make_trainer):
    keep = Keep()
    config = {"kl_coef": 0.1, "max_steps": 8, "per_device_train_batch_size": 8}
    make_trainer(config, ref_model=tiny_model(seed=7), callbacks=[keep]).train()
    rollout, found = keep.rollouts[-1], keep.metrics[-1]  # by then the values are not 0
    difference = (rollout.returns - rollout.values)[rollout.mask]
    paid = 0.1 * found["kl"] * found["completions/mean_length"]
    assert abs(paid) > 0.01
    assert found["rlhf_reward"] == pytest.approx(found["reward"] - paid, rel=1e-4)
    assert found["advantage_mean"] == pytest.approx(difference.mean().item(), rel=1e-4)
    assert found["value/std"] == pytest.approx(rollout.values[rollout.mask].std(correction=0).item(), rel=1e-4)
    assert found["value/std"] > 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_kl_and_mismatch_by_hand(make_trainer, estimator):
    keep = Keep()
    given = {"ref_model": tiny_model(seed=7), "model": tiny_model(seed=1), "callbacks": [keep]}
    config = {"kl_coef": 0.1, "kl_estimator": estimator, "mask_truncated_completions": True, "max_steps": 1}
    off_trainer(partial(make_trainer, **given), "token_truncate", **config).train()
    (rollout,), (found,) = keep.rollouts, keep.metrics
    assert 0 < rollout.truncated.sum() < 8
    x = (rollout.old_logprobs - rollout.ref_logprobs)[rollout.mask]
    y = (rollout.rollout_logprobs - rollout.old_logprobs)[rollout.mask]
    expected = {
        "kl": (x if estimator == "k1" else x.square() / 2).mean(),
        "kl_k3": (x.neg().exp() - 1 + x).mean(),
        "mismatch/mean": y.abs().mean(),
        "mismatch/kl": (y.neg().exp() - 1 + y).mean(),
        "mismatch/weight_mean": y.neg().exp().clamp(max=2.0).mean(),
    }
    assert {n: found[n] for n in expected} == pytest.approx({n: float(v) for n, v in expected.items()}, rel=1e-4)
