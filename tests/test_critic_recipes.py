"""Values in a range, their losses, the order of the critic's steps, and its own adapter, in whole runs."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from helpers.runs import Keep, assert_same_run, assert_same_tensors, critic_state, logged, stops_at_kl
from helpers.tiny import lora, scorer
from hfppo import PPOCallback
from hfppo.models.actor_critic import ActorCritic, TokenOutputs, Want

UNIT = {"value_range": [0.0, 1.0], "kl_coef": 0.0}
BCE = {**UNIT, "value_loss": "bce"}
DIS = {"policy_loss": "dis", "cliprange": 0.3, "cliprange_high": 5.0}
GRPO = {"advantage_estimator": "grpo", "num_generations": 2}


class RaisesBeta(PPOCallback):
    def on_update_end(self, args, state, control, **kwargs):
        control.kl_coef = 0.1


def test_a_callback_may_not_put_a_kl_into_bounded_returns(make_trainer):
    with pytest.raises(ValueError, match=r"kl_coef=0.1 subtracts a KL"):
        make_trainer(UNIT, callbacks=[RaisesBeta()]).train()


@pytest.mark.parametrize("critic", ["adapter", "shared", "model"])
@pytest.mark.parametrize("config", [UNIT, BCE, {**BCE, "value_range": [-1.0, 4.0], "bootstrap_truncated": True}])
def test_values_start_in_the_middle_of_their_range_and_stay_inside(make_trainer, critic, config):
    keep = Keep()
    settings = {**config, "max_steps": 8, "critic_learning_rate": 0.3}
    trainer = make_trainer(settings, critic=scorer() if critic == "model" else critic, callbacks=[keep])
    trainer.train()
    low, high = config["value_range"]
    first, last = (rollout.values[rollout.mask] for rollout in keep.rollouts)
    assert_close(first, torch.full_like(first, (low + high) / 2))
    assert low < last.min() < last.max() < high
    if "bootstrap_truncated" not in config:  # a score and the value after it may add up to more
        assert logged(trainer, "value/outside_frac") == [0.0, 0.0]


def test_returns_outside_the_range_are_counted(make_trainer):
    """Four of eight scores are outside, and completions have equal lengths."""
    scores = iter([[0.0, 1.0, 1.5, -0.5] * 2] * 2)
    trainer = make_trainer({**BCE, "max_steps": 4, "lam": 1.0}, reward_funcs=lambda completions, **_: next(scores))
    trainer.collector.args.lam_critic = 1.0
    trainer.train()
    assert 0.3 < logged(trainer, "value/outside_frac")[0] < 0.7


def test_a_saved_critic_keeps_its_range(make_trainer, tmp_path):
    trainer = make_trainer({**BCE, "max_steps": 4})
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved/critic/critic_config.json").read_text())
    assert saved["value_range"] == {"low": 0.0, "high": 1.0, "link": "sigmoid"}
    batch = trainer.rollout(["1+1="])
    loaded = make_trainer(BCE, critic=str(tmp_path / "saved")).model
    # Without fields.
    alone = ActorCritic(loaded.unload(), trainer.model.peft_config["default"], str(tmp_path / "saved"))
    for model in (trainer.model, alone):
        model.eval()
    inputs = {**batch.joined(), "completion_mask": batch.mask, "want": Want(policy=False)}
    found, expected = (model(**inputs) for model in (alone, trainer.model))
    assert torch.equal(found.values, expected.values)
    assert_close(found.values, found.value_logits.sigmoid().where(batch.mask, 0.0))
    for other in ({}, UNIT, {**BCE, "value_range": [0.0, 2.0]}):
        with pytest.raises(ValueError, match=r"contains a critic with .*value_range.* value_loss, peft_config"):
            make_trainer(other, critic=str(tmp_path / "saved"))


def test_a_checkpoint_of_another_range_is_refused(make_trainer):
    saving = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer({**UNIT, **saving}).train()
    with pytest.raises(ValueError, match=r"was written with value_loss='mse', this run has 'bce'"):
        make_trainer({**BCE, **saving}).train(resume_from_checkpoint=True)


def test_dis_takes_the_samplers_policy_as_old_also_when_it_is_one_rollout_older(make_trainer, recwarn):
    keep = Keep()
    config = {**DIS, "cliprange": 0.01, "cliprange_high": 0.01, "rollouts_ahead": 1, "learning_rate": 0.1}
    trainer = make_trainer({**config, "max_steps": 8}, callbacks=[keep])
    trainer.train()
    assert trainer.args.policy_mode == "bypass"
    assert all(torch.equal(rollout.old_logprobs, rollout.rollout_logprobs) for rollout in keep.rollouts)
    assert max(logged(trainer, "policy/first_ratio_deviation_mean")) > 0.05
    assert max(logged(trainer, "policy/clip_frac")) > 0.5
    assert not any("first-ratio" in str(warning.message) for warning in recwarn)


ALIGNED = {"critic_update": "policy_aligned", "lam_critic": 1.0}
LATE = {"num_ppo_epochs": 2, "num_critic_epochs": 1, "num_mini_batches": 2, "weight_decay": 0.1}


class Moved(PPOCallback):
    """Notes after each step whether actor and critic have moved in it, and the rollout's ratios."""

    def __init__(self):
        self.steps, self.before, self.ratios = [], None, []

    def on_mini_batch_end(self, args, state, control, *, model, step, **kwargs):
        owned = {"a": model.actor_parameters(), "c": model.critic_parameters()}
        now = {name: parameters_to_vector(own).detach() for name, own in owned.items()}
        if self.before is not None:
            self.steps.append("".join(x for x in now if not torch.equal(now[x], self.before[x])))
        self.before = now

    def on_update_end(self, args, state, control, *, rollout, **kwargs):
        self.ratios.append(None if rollout.value_ratio is None else rollout.value_ratio[rollout.fitted])


@pytest.mark.parametrize("critic", ["adapter", "shared_detached"])
@pytest.mark.parametrize("config", [{"critic_update": "after_actor"}, {**ALIGNED, **BCE}])
def test_the_critics_steps_follow_the_actors_and_both_resume_within_each_phase(make_trainer, tmp_path, critic, config):
    """Four steps of the actor and two of the critic; in the first rollout, a warmup, the critic moves alone."""
    config = {**LATE, **config, "critic_warmup": 1, "max_steps": 12, "save_strategy": "steps", "save_steps": 1}
    moved = Moved()
    straight = make_trainer(config, critic=critic, callbacks=[moved])
    straight.train()
    assert moved.steps == ["c"] * 5 + ["a"] * 4 + ["c"] * 2
    for step in (8, 10, 11):  # in the actor's steps, between both, and in the critic's
        resumed = make_trainer({**config, "output_dir": str(tmp_path / str(step))}, critic=critic)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"out/checkpoint-{step}"))
        assert_same_run(straight, resumed)
    if config["critic_update"] == "after_actor":
        assert moved.ratios == [None, None]
        return
    warmup, ratio = moved.ratios
    assert_close(warmup, torch.ones_like(warmup), rtol=0, atol=1e-4)
    assert (ratio - 1).abs().max() > 0.05
    assert logged(straight, "value/ratio_mean")[1] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert logged(straight, "value/rejected_frac") == pytest.approx([0.0, float((ratio > 6).float().mean())])


def test_a_stop_in_the_actors_steps_leaves_the_critic_its_own(make_trainer):
    """The second of four steps exceeds the target; the critic's two follow, and the length counts completions."""
    moved = Moved()
    config = {**LATE, "critic_update": "after_actor", "max_steps": -1, "total_episodes": 16}
    trainer = make_trainer({**config, "learning_rate": 0.05}, callbacks=[moved, stops_at_kl(1e-9)])
    trainer.train()
    assert moved.steps == ["a", "c", "c", "a", "a", "c", "c"]
    assert trainer.state.global_step == trainer.state.max_steps == 8
    assert trainer.ppo_state.skipped_steps == 4


def test_aligned_targets_reach_the_loss_and_tokens_above_the_bound_do_not(make_trainer):
    trainer = make_trainer({**ALIGNED, "value_range": [-1.0, 3.0], "kl_coef": 0.0})
    rollout = trainer.rollout(["1+1="])
    ratio = torch.full_like(rollout.values, 1.5)
    ratio[0, 0] = 6.5
    outputs = TokenOutputs(values=rollout.values)
    (term,) = trainer.loss_terms(outputs, replace(rollout, value_ratio=ratio))
    expected = (rollout.values - (1.5 * (rollout.returns + 1) - 1)).square() / 2
    expected[0, 0] = 0.0
    assert_close(term.per_token, expected)


MLP = lora(r=2, target_modules=["gate_proj", "up_proj", "down_proj"])


def test_a_critic_may_have_an_adapter_of_its_own(make_trainer, tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(saving, critic_peft_config=MLP)
    trainer.train()
    names = [name for name in trainer.model.critic_names() if ".lora_" in name]
    assert len(names) == 12  # two layers, three modules, A and B
    assert not any("attn" in name for name in names)
    ranks = {name: p.shape[0] for name, p in trainer.model.named_parameters() if ".lora_A." in name}
    assert set(ranks.values()) == {2, 4}
    with pytest.raises(ValueError, match=r"was written with critic_peft_config=.*'r': 2"):
        make_trainer({**saving, "max_steps": 6}).train(resume_from_checkpoint=True)
    resumed = make_trainer({**saving, "output_dir": str(tmp_path / "again")}, critic_peft_config=MLP)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert_same_run(trainer, resumed)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = make_trainer(critic=str(tmp_path / "saved"))  # without the argument
    assert_same_tensors(critic_state(loaded.model), critic_state(trainer.model))
    assert loaded.model.critic.config() == trainer.model.critic.config()
    with pytest.raises(ValueError, match=r"contains a critic with .*'r': 2.*critic_peft_config"):
        make_trainer(critic=str(tmp_path / "saved"), critic_peft_config=lora(r=3))


def test_a_critic_on_another_model_may_have_one_too(make_trainer):
    made = make_trainer(critic=scorer(), critic_peft_config=MLP).model
    assert {p.shape[0] for name, p in made.named_parameters() if ".lora_A.critic" in name} == {2}
