"""Rollouts that are sampled during the update on the one before: by which policy, how errors and the end come through.

What waits for a step of the update would never return if the update did not go on meanwhile.
"""

import asyncio
import random
import threading
import time
import traceback
from collections import defaultdict

import pytest
import torch
from transformers import PreTrainedTokenizerFast, TrainerCallback

from helpers.agents import Chatter, talking_trainer
from helpers.runs import PROMPTS, SMALL, chat_tokenizer, count_digits, logged, stops_at_kl, untimed_logs
from helpers.scripted import training_rows
from helpers.tiny import tiny_model
from hfppo import PPOCallback, PPOConfig, PPOTrainer
from hfppo.collect.collector import Collector
from hfppo.generation.generate import TransformersSampler
from hfppo.support.calls import event_loop

AHEAD = {"rollouts_ahead": 1, "max_steps": 16}
FAR = 60  # seconds that no test waits


class Rollouts(PPOCallback):
    """Keeps rollouts, and the actor's weights when each was taken."""

    def __init__(self):
        self.rollouts, self.weights = [], []

    def on_rollout_end(self, args, state, control, *, rollout, model, **kwargs):
        self.rollouts.append(rollout)
        self.weights.append(model.actor_weights())


class Steps(TrainerCallback):
    """Tells of each step that has been made, and keeps the state of Python's generator in it."""

    def __init__(self):
        self.made = [threading.Event() for _ in range(AHEAD["max_steps"])]
        self.luck: list[tuple] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.luck.append(random.getstate())
        self.made[state.global_step - 1].set()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    event_loop()  # its thread stays for all tests
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and "tqdm" not in thread.name]
    for thread in left:
        thread.join(FAR)
    assert not any(thread.is_alive() for thread in left)


def test_a_rollout_is_sampled_by_the_policy_of_one_rollout_before(make_trainer):
    seen = Rollouts()
    trainer = make_trainer(AHEAD, callbacks=[seen])
    trainer.train()
    assert len(seen.rollouts) == 4
    plain = make_trainer({})
    for number, rollout in enumerate(seen.rollouts):
        plain.model.load_actor_weights(seen.weights[max(0, number - 1)])
        rows = training_rows(plain.collector, plain._train_prompts, number)
        again = plain.collector.collect(rows, plain.ppo_state, plain.state).rollout
        assert torch.equal(again.completion_ids, rollout.completion_ids)
        assert torch.equal(again.rollout_logprobs, rollout.rollout_logprobs)
        plain.model.load_actor_weights(seen.weights[number])
        now = plain.collector.collect(rows, plain.ppo_state, plain.state).rollout
        assert number == 0 or not torch.equal(now.rollout_logprobs, rollout.rollout_logprobs)
        if torch.equal(now.completion_ids, rollout.completion_ids):
            assert torch.equal(now.old_logprobs, rollout.old_logprobs), "today's model recomputes them"
    assert logged(trainer, "ahead/age") == [0, 4, 4, 4]
    assert all(0 <= share < 1 for share in logged(trainer, "mismatch/cut_frac"))


def test_the_next_rollout_is_scored_during_the_update(make_trainer):
    steps, calls = Steps(), []

    def slow(completions, trainer_state, **kwargs):
        calls.append(trainer_state.global_step)
        if len(calls) > 1:
            assert steps.made[4 * len(calls) - 6].wait(FAR)  # the third step on the rollout before
        return count_digits(completions)

    make_trainer(AHEAD, callbacks=[steps], reward_funcs=slow).train()
    assert calls == [0, 0, 4, 8], "the step at which it began; nothing is sampled that is not used"


def test_environments_play_during_the_update(tmp_path):
    steps, begun = Steps(), []

    class Slow(Chatter):
        def reset(self, **row):
            begun.append(threading.current_thread())
            return super().reset(**row)

        def step(self, text):
            assert len(begun) <= 8 or steps.made[0].wait(FAR)
            return super().step(text)

    config = {**SMALL, **AHEAD, "max_steps": 8, "max_completion_length": 40}
    trainer = talking_trainer(tmp_path, config, environment_factory=Slow, callbacks=[steps])
    steps.luck = [random.getstate()]
    trainer.train()
    assert len(begun) == 16
    assert all(state == steps.luck[0] for state in steps.luck), "the update's generators are left alone"
    assert threading.main_thread() not in begun


def test_the_two_threads_share_no_tokenizer(tmp_path, monkeypatch):
    """A call with truncation, as in a callback, would change another thread's call."""
    in_main, encode = defaultdict(set), PreTrainedTokenizerFast._encode_plus

    def spy(self, *args, **kwargs):
        in_main[id(self)].add(threading.current_thread() is threading.main_thread())
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", spy)
    config = {**SMALL, **AHEAD, "max_steps": 8, "max_completion_length": 40}
    talking_trainer(tmp_path, config, environment_factory=Chatter).train()
    assert list(in_main.values()) == [{True}, {False}]


def test_an_error_comes_at_its_use_with_its_own_traceback(make_trainer):
    calls = []

    def fails_later(completions, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise LookupError("the judge is gone")
        return count_digits(completions)

    trainer = make_trainer(AHEAD, reward_funcs=fails_later)
    with pytest.raises(LookupError, match="the judge is gone") as found:
        trainer.train()
    assert trainer.state.global_step == 8, "both rollouts before it are learned from"
    assert "fails_later" in "".join(traceback.format_tb(found.tb))
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("is_async", "error"), [(False, KeyboardInterrupt), (False, ZeroDivisionError), (True, KeyboardInterrupt)]
)
def test_an_interrupt_ends_the_sampling_and_its_reward(make_trainer, is_async, error):
    asleep, cancelled, outcome = threading.Event(), threading.Event(), []

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert asleep.wait(FAR)
            time.sleep(0.5)  # an interrupt while the thread still starts the reward would not cancel it
            raise error

    def sleeps(completions, **kwargs):
        if outcome:
            asleep.set()
            for _ in range(FAR * 100):
                time.sleep(0.01)
        outcome.append("scored")
        return count_digits(completions)

    async def sleeps_async(completions, **kwargs):
        if outcome:
            asleep.set()
            try:
                await asyncio.sleep(FAR)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        outcome.append("scored")
        return count_digits(completions)

    reward = sleeps_async if is_async else sleeps
    with pytest.raises(error):
        make_trainer(AHEAD, reward_funcs=reward, callbacks=[Stops()]).train()
    assert outcome == ["scored"]
    assert not is_async or cancelled.wait(FAR)


def test_prompts_are_chosen_after_those_of_the_rollout_in_use(make_trainer, monkeypatch):
    windows, choose = [], Collector.choose_prompts

    def spy(self, *args):
        windows.append(choose(self, *args).positions)
        return choose(self, *args)

    monkeypatch.setattr(Collector, "choose_prompts", spy)
    groups = {"advantage_estimator": "grpo", "num_generations": 2, "prompt_candidates": 3}
    hard = {"reward_funcs": lambda prompts, **_: [float(i % 2 and text[0] == "1") for i, text in enumerate(prompts)]}
    make_trainer({**AHEAD, **groups}, **hard).train()
    assert len(windows) == 4
    assert max(map(len, windows)) > 4, "more than a rollout has"
    assert [window.start for window in windows] == [0, *(window.stop for window in windows[:-1])]


def test_a_rollout_that_ends_early_makes_one_more_necessary(make_trainer):
    seen = Rollouts()
    trainer = make_trainer({**AHEAD, "max_steps": 6}, callbacks=[seen, stops_at_kl(1e-9)])
    trainer.train()
    assert trainer.state.global_step == 6
    first, *later = logged(trainer, "ahead/age")
    assert first == 0
    assert len(seen.rollouts) == 1 + len(later) > 2
    assert max(later) < 4


def test_evaluations_and_looks_change_nothing(make_trainer):
    class Looks(PPOCallback):
        def on_rollout_end(self, args, state, control, **kwargs):
            if len(trainers) == 2:
                trainers[1].rollout(["1+1="])

    trainers = []
    for evaluates in ({}, {"eval_strategy": "steps", "eval_steps": 3}):
        given = {"eval_dataset": PROMPTS.select(range(4)), "callbacks": [Looks()]}
        trainers.append(make_trainer({**AHEAD, "max_steps": 12, **evaluates}, **given))
        trainers[-1].train()
    logs = [[log for log in untimed_logs(trainer) if "loss" in log] for trainer in trainers]
    assert logs[0] == logs[1]


def test_one_caller_at_a_time(make_trainer):
    """An evaluation that begins while a reward function scores the rollout ahead waits for it."""
    busy, began = threading.Lock(), threading.Event()

    class Evaluates(PPOCallback):
        def on_rollout_end(self, args, state, control, **kwargs):
            assert began.wait(FAR)
            trainer.evaluate()

    def alone(completions, **kwargs):
        assert busy.acquire(blocking=False), "called twice at once"
        if len(completions) == 8:
            began.set()
            time.sleep(0.3)
        busy.release()
        return count_digits(completions)

    given = {"eval_dataset": PROMPTS.select(range(2)), "reward_funcs": alone, "callbacks": [Evaluates()]}
    trainer = make_trainer({**AHEAD, "max_steps": 8}, **given)
    trainer.train()


def test_samplers_that_read_trained_weights_are_refused(tmp_path):
    class Own(TransformersSampler):
        pass

    class Trainer(PPOTrainer):
        def create_sampler(self, eos_ids):
            return Own(self.model, super().create_sampler(eos_ids).sampling, None)

    args = PPOConfig(str(tmp_path), **SMALL, rollouts_ahead=1)
    with pytest.raises(ValueError, match="rollouts_ahead=1 samples while the actor is trained, and Own may read"):
        Trainer(tiny_model(), count_digits, args, PROMPTS, None, chat_tokenizer())
