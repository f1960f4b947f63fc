"""The critic's pretraining: what it fits, what it leaves alone, when it stops, and what a kill leaves."""

from functools import cache

import pytest
import torch
from datasets import Dataset

from helpers.runs import assert_same_run, critic_state, small_trainer
from hfppo import PPOCallback
from hfppo.learn.critic_pretraining import CriticPretraining
from hfppo.models.actor_critic import Want

# Rollouts of 8, so 4 of them: 3 to train on, and a step of a mini-batch of 8 for each in an epoch.
CONFIG = {"critic_pretraining_completions": 26, "num_mini_batches": 1, "max_steps": 4, "weight_decay": 0.1}
CONFIG |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
PROMPTS = Dataset.from_list([{"prompt": f"请问{a}+{b}="} for a in range(6) for b in range(3, 9)])


class Watch(PPOCallback):
    """Keeps the weights at each epoch of pretraining and at the first rollout, and every rollout's prompts."""

    def __init__(self):
        self.epochs, self.first, self.rollouts = [], {}, []

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "critic_pretraining/epoch" in logs:
            self.epochs.append(copies(model))

    def on_rollout_end(self, args, state, control, *, transcript, model, **kwargs):
        self.rollouts.append(transcript.prompts)
        self.first = self.first or copies(model)


def copies(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in critic_state(model).items()}


def pretrained(make_trainer, config=None, **kwargs):
    trainer = make_trainer({**CONFIG, **(config or {})}, train_dataset=PROMPTS, **kwargs)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Undisturbed runs with a checkpoint after each step, by the kind of critic."""

    @cache
    def of(critic: str):
        config = {**CONFIG, "save_strategy": "steps", "save_steps": 1}
        trainer = small_trainer(tmp_path_factory.mktemp(critic), config, train_dataset=PROMPTS, critic=critic)
        trainer.train()
        return trainer

    return of


def logged_epochs(trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "critic_pretraining/epoch" in entry]


def test_the_critic_alone_moves(make_trainer):
    watch = Watch()
    trainer = make_trainer({**CONFIG, "learning_rate": 0.0, "critic_learning_rate": 1e-2}, critic="shared")
    trainer.add_callback(watch)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert [n for n, x in before.items() if "critic" not in n.split(".") and not torch.equal(x, now[n])] == []
    assert not torch.equal(watch.epochs[0]["value_head.weight"], watch.epochs[1]["value_head.weight"])
    assert all(p.grad is None for p in trainer.model.parameters())


def test_the_best_epochs_average_of_the_weights_is_kept(make_trainer, monkeypatch):
    """With three steps in an epoch, each moves the average by a third of its distance to the weights."""
    watch, weights, step = Watch(), [], CriticPretraining.step

    def keep(self, *args):
        step(self, *args)
        weights.append(copies(self.run.model))

    monkeypatch.setattr(CriticPretraining, "step", keep)
    trainer = pretrained(make_trainer, {"critic_learning_rate": 2e-2}, callbacks=[watch])
    explained = [entry["critic_pretraining/r2"] for entry in logged_epochs(trainer)]
    best = explained.index(max(explained))
    assert 0 < best < len(explained) - 1, "a later epoch has to be worse"
    for name, tensor in watch.first.items():
        assert torch.equal(tensor, watch.epochs[best][name]), name
        first, second, third = (x[name] for x in weights[:3])
        average = (8 * watch.epochs[0][name] + 4 * first + 6 * second + 9 * third) / 27
        torch.testing.assert_close(watch.epochs[1][name], average)
    assert trainer.ppo_state.pretraining_results == {
        "critic_pretraining_r2": max(explained),
        "critic_pretraining_completions": 32,
        "critic_pretraining_epochs": len(explained) - 1,
    }


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
        ([0.0, 0.1, 0.2, 0.2, 0.1, 0.15, 0.1, 0.2, 0.0], [0.8] * 5 + [0.4] * 3),  # equal is no gain
        ([0.0, -0.1, -0.2, -0.3, -0.3, -0.2, -0.1], [0.8] * 3 + [0.4] * 3),
        ([0.0, -0.1, -0.2, 0.1, *[0.0] * 4, 0.2, *[0.1] * 6], [0.8] * 6 + [0.4] * 5 + [0.2] * 3),
    ],
)
def test_three_epochs_without_gain_halve_the_rate_and_three_more_end_it(make_trainer, monkeypatch, explained, rates):
    trainer, used = pretrained_to(make_trainer, monkeypatch, explained, {"critic_learning_rate": 0.8})
    assert used == rates
    assert trainer.ppo_state.pretraining_results["critic_pretraining_r2"] == max(explained)


def test_it_ends_after_the_most_epochs(make_trainer, monkeypatch):
    monkeypatch.setattr("hfppo.learn.critic_pretraining.MAX_EPOCHS", 4)
    trainer, _ = pretrained_to(make_trainer, monkeypatch, [0.0, 0.1, 0.2, 0.3, 0.4], {})
    assert trainer.ppo_state.pretraining_results["critic_pretraining_epochs"] == 4


def test_returns_that_do_not_vary_end_it(make_trainer):
    trainer = pretrained(make_trainer, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    assert [entry["critic_pretraining/r2"] for entry in logged_epochs(trainer)] == [0.0] * 7


def test_r_squared_and_the_loss_are_those_of_the_formulas(make_trainer, monkeypatch):
    """Over two held-out and many trained rollouts of unequal numbers of tokens."""
    fits, measure = [], CriticPretraining.r_squared

    def keep(self, held_out):
        inputs = [{**x.joined(), "completion_mask": x.mask, "want": Want(policy=False)} for x in held_out]
        fits.append((held_out, [self.run.model(**given).values.detach() for given in inputs]))
        return measure(self, held_out)

    monkeypatch.setattr(CriticPretraining, "r_squared", keep)
    config = {"critic_pretraining_completions": 8 * 9, "critic_learning_rate": 3e-3}
    trainer = pretrained(make_trainer, {**config, "max_steps": 1})
    for (held_out, values), entry in zip(fits, logged_epochs(trainer), strict=True):
        assert len(held_out) == 2
        returns = torch.cat([x.returns[x.loss_mask] for x in held_out])
        predicted = torch.cat([v[x.loss_mask] for v, x in zip(values, held_out, strict=True)])
        expected = 1 - (predicted - returns).square().mean() / returns.var(correction=0)
        assert entry["critic_pretraining/r2"] == pytest.approx(float(expected), abs=1e-4)
    losses = [entry["critic_pretraining/loss"] for entry in logged_epochs(trainer)[1:]]
    assert min(losses) < losses[0] / 2


def test_it_is_fitted_to_all_rewards_that_follow(make_trainer, monkeypatch):
    """λ = 1 whatever PPO uses."""
    rollouts, fit = [], CriticPretraining.fit

    def keep(self, given):
        rollouts.extend(given)
        return fit(self, given)

    monkeypatch.setattr(CriticPretraining, "fit", keep)
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

    trainer = make_trainer({**CONFIG, "warmup_steps": 2}, train_dataset=PROMPTS, callbacks=[Look()])
    trainer.train()
    assert seen["rates"] == {0.0}
    assert seen["with moments"] == {id(p) for p in trainer.model.critic_parameters()}
    assert not any("time/update" in entry for entry in logged_epochs(trainer))


def test_its_prompts_come_first_and_count_as_episodes(make_trainer):
    watch, plain = Watch(), Watch()
    config = {"max_steps": -1, "total_episodes": 48}
    trainer = pretrained(make_trainer, config, callbacks=[watch])
    pretrained(make_trainer, {**config, "critic_pretraining_completions": 0}, callbacks=[plain])
    assert trainer.state.max_steps == 2 * 2  # 48 completions are 6 rollouts; 4 of them for the critic
    assert watch.rollouts == plain.rollouts[4:]


class Killed(Exception):
    """Ends a run as a kill does: nothing is saved after it."""


@pytest.mark.parametrize("critic", ["adapter", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_in_it_begins_it_again_and_ends_in_the_same_bits(
    make_trainer, tmp_path, straight, critic
):
    def run(name, **kwargs):
        config = {**CONFIG, "output_dir": str(tmp_path / name), "save_strategy": "steps", "save_steps": 1}
        return make_trainer(config, train_dataset=PROMPTS, critic=critic, **kwargs)

    def kill(args, state, control, logs=None, **kwargs):
        if logs.get("critic_pretraining/epoch") == 2:
            raise Killed

    callback = PPOCallback()
    callback.on_log = kill
    with pytest.raises(Killed):
        run("killed", callbacks=[callback]).train()
    assert not list((tmp_path / "killed").glob("checkpoint-*"))
    again = run("killed")
    again.train()
    after_it = run("resumed")
    after_it.train(resume_from_checkpoint=f"{straight(critic).args.output_dir}/checkpoint-0")
    for other in (again, after_it):
        assert_same_run(straight(critic), other)
        assert logged_epochs(other) == logged_epochs(straight(critic))


def test_a_signal_within_it_ends_the_run_with_a_checkpoint_after_it(make_trainer, tmp_path, straight):
    """As upstream's signal handler asks for it, while an epoch is logged."""
    config = {"enable_jit_checkpoint": True, "output_dir": str(tmp_path / "told")}
    callback = PPOCallback()
    trainer = make_trainer({**CONFIG, **config}, train_dataset=PROMPTS, callbacks=[callback])

    def on_log(args, state, control, logs=None, **kwargs):
        if logs.get("critic_pretraining/epoch") == 2:
            trainer._just_in_time.jit_manager.is_checkpoint_requested = True

    callback.on_log = on_log
    trainer.train()
    assert trainer.state.global_step == 0
    assert trainer.ppo_state.pretraining_results == straight("adapter").ppo_state.pretraining_results
    resumed = make_trainer({**CONFIG, **config}, train_dataset=PROMPTS)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(straight("adapter"), resumed)


def test_the_saved_critic_is_where_the_next_run_begins(make_trainer, straight):
    second = pretrained(make_trainer, critic=f"{straight('adapter').args.output_dir}/checkpoint-0")
    best = straight("adapter").ppo_state.pretraining_results["critic_pretraining_r2"]
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
