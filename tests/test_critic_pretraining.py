"""The critic's pretraining: what it fits, what it leaves alone, when it stops, and what a kill leaves."""

import pytest
import torch
from datasets import Dataset

from helpers.runs import critic_state, final_state, untimed_logs
from hfppo import PPOCallback, Rollout
from hfppo.learn.critic_pretraining import CriticPretraining
from hfppo.models.actor_critic import Want
from hfppo.models.critic import CRITIC_FOLDER

# Rollouts of 8, so 4 of them: 3 to train on, and a step of a mini-batch of 8 for each in an epoch.
CONFIG = {
    "critic_pretraining_completions": 26,
    "num_mini_batches": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "weight_decay": 0.1,
}
PROMPTS = Dataset.from_list([{"prompt": f"请问{a}+{b}="} for a in range(6) for b in range(3, 9)])


class Watch(PPOCallback):
    """Keeps the weights at each epoch of pretraining and at the first rollout, and every rollout's prompts."""

    def __init__(self):
        self.epochs, self.first, self.rollouts = [], {}, []
        self.model = None

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "critic_pretraining/epoch" in logs:
            self.epochs.append({name: p.clone() for name, p in critic_state(model).items()})

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state, **kwargs):
        self.rollouts.append(transcript.prompts)
        if self.model is not None and not self.first:
            self.first = {name: p.clone() for name, p in critic_state(self.model).items()}


def pretrained(make_trainer, config=None, **kwargs):
    trainer = make_trainer({**CONFIG, **(config or {})}, train_dataset=PROMPTS, **kwargs)
    trainer.train()
    return trainer


def collected(monkeypatch) -> list[Rollout]:
    """Return a list that will hold the rollouts of the pretraining."""
    kept, fit = [], CriticPretraining.fit

    def keep(self, rollouts, *args):
        kept.extend(rollouts)
        return fit(self, rollouts, *args)

    monkeypatch.setattr(CriticPretraining, "fit", keep)
    return kept


def logged_epochs(trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "critic_pretraining/epoch" in entry]


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_the_critic_alone_moves(make_trainer, critic):
    watch = Watch()
    trainer = make_trainer({**CONFIG, "learning_rate": 0.0, "critic_learning_rate": 1e-2}, critic=critic)
    trainer.add_callback(watch)
    others = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not n.startswith("critic.")}
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert [name for name, before in others.items() if not torch.equal(before, now[name])] == []
    assert not torch.equal(watch.epochs[0]["value_head.weight"], watch.epochs[1]["value_head.weight"])
    assert all(p.grad is None for p in trainer.model.parameters())


def test_the_weights_after_the_best_epoch_are_kept(make_trainer):
    """An epoch without gain is taken back: the next one begins with the best weights so far."""
    watch = Watch()
    trainer = make_trainer({**CONFIG, "critic_learning_rate": 2e-2}, train_dataset=PROMPTS, callbacks=[watch])
    watch.model = trainer.model
    trainer.train()
    explained = [entry["critic_pretraining/r2"] for entry in logged_epochs(trainer)]
    best = explained.index(max(explained))
    assert 0 < best < len(explained) - 1, "a later epoch has to be worse"
    for epoch, weights in enumerate(watch.epochs):
        best_so_far = watch.epochs[explained.index(max(explained[: epoch + 1]))]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in best_so_far.items()), epoch
    for name, tensor in watch.first.items():
        assert torch.equal(tensor, watch.epochs[best][name]), name
    results = trainer.ppo_state.pretraining_results
    assert results["critic_pretraining_r2"] == max(explained)
    assert results["critic_pretraining_completions"] == 32
    assert results["critic_pretraining_epochs"] == len(explained) - 1


def pretrained_to(make_trainer, monkeypatch, explained: list[float], fields: dict):
    """Return a trainer whose epochs have these R², and the learning rates of the epochs."""
    measures, used = iter(explained), []
    monkeypatch.setattr(CriticPretraining, "r_squared", lambda self, held_out: next(measures))
    step = CriticPretraining.step

    def note(self, *args):
        used.append([group["lr"] for group in self.optimizer.param_groups])
        step(self, *args)

    monkeypatch.setattr(CriticPretraining, "step", note)
    trainer = pretrained(make_trainer, {**fields, "max_steps": 1})
    assert next(measures, "over") == "over"
    assert all(len(set(rates)) == 1 for rates in used)
    return trainer, [rate for rate, *_ in used[::3]]


@pytest.mark.parametrize(
    ("explained", "rates"),
    [
        ([0.0, 0.1, 0.2, 0.2, 0.1, 0.15], [0.8, 0.8, 0.8, 0.4, 0.2]),  # equal is no gain
        ([0.0, -0.1, -0.2, -0.3], [0.8, 0.4, 0.2]),
        ([0.0, -0.1, -0.2, 0.1, 0.0, 0.05, 0.1], [0.8, 0.4, 0.2, 0.2, 0.1, 0.05]),
    ],
)
def test_three_epochs_without_gain_end_it_and_each_halves_the_rate(make_trainer, monkeypatch, explained, rates):
    trainer, used = pretrained_to(make_trainer, monkeypatch, explained, {"critic_learning_rate": 0.8})
    assert used == rates
    assert trainer.ppo_state.pretraining_results["critic_pretraining_r2"] == max(explained)


def test_it_ends_after_the_most_epochs(make_trainer, monkeypatch):
    monkeypatch.setattr("hfppo.learn.critic_pretraining.MAX_EPOCHS", 4)
    trainer, _ = pretrained_to(make_trainer, monkeypatch, [0.0, 0.1, 0.2, 0.3, 0.4], {})
    assert trainer.ppo_state.pretraining_results["critic_pretraining_epochs"] == 4


def test_returns_that_do_not_vary_end_it(make_trainer):
    trainer = pretrained(make_trainer, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    assert [entry["critic_pretraining/r2"] for entry in logged_epochs(trainer)] == [0.0] * 4


def test_r_squared_and_the_loss_are_those_of_the_formulas(make_trainer, monkeypatch):
    """Over three held-out and many trained rollouts of unequal numbers of tokens; a value clip changes neither."""
    fits, measure = [], CriticPretraining.r_squared

    def keep(self, held_out):
        fits.append(
            (held_out, [self.run.model(**inputs_of(x), want=Want(policy=False)).values.detach() for x in held_out])
        )
        return measure(self, held_out)

    monkeypatch.setattr(CriticPretraining, "r_squared", keep)
    config = {"critic_pretraining_completions": 8 * 17, "cliprange_value": 1e-3, "critic_learning_rate": 3e-3}
    trainer = pretrained(make_trainer, {**config, "max_steps": 1})
    for (held_out, values), entry in zip(fits, logged_epochs(trainer), strict=True):
        assert len(held_out) == 3
        returns = torch.cat([x.returns[x.loss_mask] for x in held_out])
        predicted = torch.cat([v[x.loss_mask] for v, x in zip(values, held_out, strict=True)])
        expected = 1 - (predicted - returns).square().mean() / returns.var(correction=0)
        assert entry["critic_pretraining/r2"] == pytest.approx(float(expected), abs=1e-4)
    losses = [entry["critic_pretraining/loss"] for entry in logged_epochs(trainer)[1:]]
    assert min(losses) < losses[0] / 2


def inputs_of(rollout: Rollout) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1),
        "attention_mask": torch.cat([rollout.prompt_mask, rollout.mask], dim=1),
        "completion_mask": rollout.mask,
    }


def test_it_is_fitted_to_all_rewards_that_follow(make_trainer, monkeypatch):
    """λ = 1 whatever PPO uses."""
    rollouts = collected(monkeypatch)
    pretrained(make_trainer, {"lam": 0.5, "lam_critic": 0.3, "gamma": 0.9})
    assert len(rollouts) == 4
    for rollout in rollouts:
        expected = torch.zeros(len(rollout))
        for t in reversed(range(rollout.mask.shape[1])):
            expected = torch.where(rollout.mask[:, t], rollout.rewards[:, t] + 0.9 * expected, expected)
            got = rollout.returns[:, t][rollout.mask[:, t]]
            torch.testing.assert_close(got, expected[rollout.mask[:, t]], rtol=1e-5, atol=1e-6)


def test_ppo_begins_with_its_moments_and_the_rates_of_the_schedule(make_trainer):
    """In warmup the schedule's first rate is 0."""
    seen = {}

    class Look(PPOCallback):
        def on_rollout_end(self, args, state, control, **kwargs):
            if not seen:
                optimizer = trainer.optimizer.optimizer
                seen["rates"] = {group["lr"] for group in optimizer.param_groups}
                seen["with moments"] = {id(p) for p, moments in optimizer.state.items() if moments}

    config = {"warmup_steps": 2}
    trainer = make_trainer({**CONFIG, **config}, train_dataset=PROMPTS, callbacks=[Look()])
    trainer.train()
    assert seen["rates"] == {0.0}
    assert seen["with moments"] == {id(p) for p in trainer.model.critic_parameters()}
    assert not any("time/update" in entry for entry in logged_epochs(trainer))


def test_its_prompts_come_first_and_count_as_episodes(make_trainer):
    watch = Watch()
    trainer = pretrained(make_trainer, {"max_steps": -1, "total_episodes": 48}, callbacks=[watch])
    plain = Watch()
    config = {"critic_pretraining_completions": 0, "max_steps": -1, "total_episodes": 48}
    pretrained(make_trainer, config, callbacks=[plain])
    assert trainer.state.max_steps == 2 * 2  # 48 completions are 6 rollouts; 4 of them for the critic
    assert watch.rollouts == plain.rollouts[4:]
    with pytest.raises(ValueError, match=r"critic_pretraining_completions=26, .* uses up total_episodes=32"):
        make_trainer({**CONFIG, "total_episodes": 32})


class Killed(Exception):
    """Ends a run as a kill does: nothing is saved after it."""


@pytest.mark.parametrize("critic", ["adapter", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_in_it_begins_it_again_and_ends_in_the_same_bits(make_trainer, tmp_path, critic):
    def run(name, **kwargs):
        config = {**CONFIG, "output_dir": str(tmp_path / name), "save_strategy": "steps", "save_steps": 1}
        return make_trainer(config, train_dataset=PROMPTS, critic=critic, **kwargs)

    def kill(args, state, control, logs=None, **kwargs):
        if logs.get("critic_pretraining/epoch") == 2:
            raise Killed

    straight = run("straight")
    straight.train()
    callback = PPOCallback()
    callback.on_log = kill
    with pytest.raises(Killed):
        run("killed", callbacks=[callback]).train()
    assert not list((tmp_path / "killed").glob("checkpoint-*"))
    again = run("killed")
    again.train()
    after_it = run("resumed")
    after_it.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-0"))
    expected = final_state(straight)
    for other in (again, after_it):
        assert other.ppo_state == straight.ppo_state
        got = final_state(other)
        assert expected.keys() == got.keys()
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
        assert untimed_logs(other)[:-1] == untimed_logs(straight)[:-1]


def test_a_signal_within_it_ends_the_run_with_a_checkpoint_after_it(make_trainer, tmp_path):
    """As upstream's signal handler asks for it, while an epoch is logged."""
    straight = pretrained(make_trainer)
    config = {"enable_jit_checkpoint": True, "output_dir": str(tmp_path / "told")}
    callback = PPOCallback()
    trainer = make_trainer({**CONFIG, **config}, train_dataset=PROMPTS, callbacks=[callback])

    def on_log(args, state, control, logs=None, **kwargs):
        if logs.get("critic_pretraining/epoch") == 2:
            trainer._just_in_time.jit_manager.is_checkpoint_requested = True

    callback.on_log = on_log
    trainer.train()
    assert trainer.state.global_step == 0
    assert trainer.ppo_state.pretraining_results == straight.ppo_state.pretraining_results
    resumed = make_trainer({**CONFIG, **config}, train_dataset=PROMPTS)
    resumed.train(resume_from_checkpoint=True)
    expected, got = final_state(straight), final_state(resumed)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_the_saved_critic_is_where_the_next_run_begins(make_trainer, tmp_path):
    first = pretrained(make_trainer, {"save_strategy": "steps", "save_steps": 100})
    folder = tmp_path / "out/checkpoint-0"
    assert (folder / CRITIC_FOLDER).is_dir()
    second = pretrained(make_trainer, {"output_dir": str(tmp_path / "second")}, critic=str(folder))
    best = first.ppo_state.pretraining_results["critic_pretraining_r2"]
    assert logged_epochs(second)[0]["critic_pretraining/r2"] == pytest.approx(best, abs=1e-5)


def test_a_second_training_does_not_repeat_it(make_trainer):
    trainer = pretrained(make_trainer)
    results = trainer.ppo_state.pretraining_results
    trainer.train()
    assert trainer.ppo_state.pretraining_results is results
    assert logged_epochs(trainer) == []


def test_an_optimizer_that_diverges_is_an_error(make_trainer):
    with pytest.raises(FloatingPointError, match=r"in step 0, .*in row \d+ of micro-batch 0 is not finite"):
        pretrained(make_trainer, reward_funcs=lambda completions, **_: [1e25 * len(c) for c in completions])


def test_without_a_critic_it_is_refused(make_trainer):
    with pytest.raises(ValueError, match="critic_pretraining_completions=26 has no effect with"):
        make_trainer({**CONFIG, "advantage_estimator": "reinforce_plus_plus"})
