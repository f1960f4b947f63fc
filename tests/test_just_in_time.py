"""Checkpoints when a process is told to end."""

import json
import random
from pathlib import Path

import pytest

from helpers.runs import SMALL, assert_same_end, untimed_logs
from hfppo import PPOCallback
from hfppo.saving.checkpoint_folders import find_last_intact
from hfppo.saving.just_in_time import JustInTimeCallback

CONFIG = {**SMALL, "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CONFIG |= {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def train_until_told(make_trainer, config, event, step, callbacks=(), resume=None, **kwargs):
    """Train, and ask for the checkpoint as upstream's signal handler does, in an event at a step."""
    callback = PPOCallback()

    def terminate(args, state, control, model=None, **kwargs):
        if state.global_step == step:
            just_in_time.jit_manager.is_checkpoint_requested = True

    setattr(callback, event, terminate)
    config = {**config, "enable_jit_checkpoint": True}
    trainer = make_trainer(config, callbacks=[callback, *callbacks], **kwargs)
    (just_in_time,) = [c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager")]
    assert isinstance(just_in_time, JustInTimeCallback)
    trainer.train(resume_from_checkpoint=resume)
    assert not just_in_time.jit_manager.is_checkpoint_requested
    return trainer


@pytest.mark.parametrize("event", ["on_substep_end", "on_step_end"])
def test_the_checkpoint_is_whole_and_resumes(make_trainer, dataset, tmp_path, event):
    """Between two logs."""
    straight = make_trainer(CONFIG, eval_dataset=dataset)
    straight.train()
    told = train_until_told(make_trainer, CONFIG, event, 3, eval_dataset=dataset)
    assert find_last_intact(tmp_path / "out") == str(tmp_path / f"out/checkpoint-{told.state.global_step}")
    assert told.state.global_step == 3 + (event == "on_substep_end"), "between two steps"
    assert not (tmp_path / "out/_earlier_1").exists()
    resumed = make_trainer(CONFIG, eval_dataset=dataset)
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, straight)
    assert untimed_logs(resumed) == untimed_logs(straight)


def test_no_rollout_is_collected_first(make_trainer, tmp_path):
    rollouts = []

    def reward(completions, **kwargs):
        rollouts.append(len(completions))
        return [1.0] * len(completions)

    config = {**CONFIG, "eval_strategy": "no"}  # 4 steps are made on a rollout
    train_until_told(make_trainer, config, "on_step_end", 4, reward_funcs=reward)
    assert len(rollouts) == 1
    assert find_last_intact(tmp_path / "out") == str(tmp_path / "out/checkpoint-4")


def test_epochs_are_logged_and_evaluated_when_they_are_over_and_only_then(make_trainer, dataset, tmp_path):
    config = {**CONFIG, "max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch"}
    config |= {"save_strategy": "epoch", "output_dir": str(tmp_path / "straight")}
    dataset = dataset.select(range(8))
    straight = make_trainer(config, train_dataset=dataset, eval_dataset=dataset)
    straight.train()
    assert straight.state.max_steps == 8
    config["output_dir"] = str(tmp_path / "out")
    told = train_until_told(make_trainer, config, "on_step_end", 4, train_dataset=dataset, eval_dataset=dataset)
    assert told.state.global_step == 4
    resumed = make_trainer(config, train_dataset=dataset, eval_dataset=dataset)
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, straight)
    seen = [entry for entry in untimed_logs(resumed) if "loss" in entry or "eval_reward" in entry]
    assert seen == [entry for entry in untimed_logs(straight) if "loss" in entry or "eval_reward" in entry]


def test_the_last_step_is_saved_with_what_it_logs(make_trainer, dataset, tmp_path):
    train_until_told(make_trainer, CONFIG, "on_step_end", 6, eval_dataset=dataset)
    folder = Path(find_last_intact(tmp_path / "out"))
    assert folder.name == "checkpoint-6"
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_reward" in entry] == [2, 4, 6]


def test_a_run_that_a_callback_stops_at_that_step_is_saved(make_trainer, dataset, tmp_path):
    stop = PPOCallback()
    stop.on_evaluate = lambda args, state, control, **_: setattr(control, "should_training_stop", True)
    train_until_told(make_trainer, CONFIG, "on_step_end", 2, [stop], eval_dataset=dataset)
    assert find_last_intact(tmp_path / "out") == str(tmp_path / "out/checkpoint-2")


def test_a_run_told_to_end_while_it_is_loaded_loses_nothing(make_trainer, tmp_path):
    """Not even the state of Python's random numbers, which is loaded late."""

    def lottery(completions, **kwargs):
        return [random.random() for _ in completions]

    config = {**CONFIG, "eval_strategy": "no"}
    straight = make_trainer(config, reward_funcs=lottery)
    straight.train()
    train_until_told(make_trainer, config, "on_step_end", 2, reward_funcs=lottery)
    again = train_until_told(make_trainer, config, "on_train_begin", 2, resume=True, reward_funcs=lottery)
    assert again.state.global_step == 3, "random numbers are loaded in the first step"
    resumed = make_trainer(config, reward_funcs=lottery)
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, straight)
    assert untimed_logs(resumed) == untimed_logs(straight)
