"""Run by test_faulty_processes.py under torchrun: faults on one of two processes; writes JSON, then fails."""

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import hfppo.collect.collector
import hfppo.trainer
from helpers.processes import freeze_imports
from helpers.runs import count_digits, final_state, small_trainer
from helpers.tiny import tiny_model
from hfppo import PPOTrainer, TolerantReward
from hfppo.collect.check_finite import NonFiniteError
from hfppo.reporting.run_page import RunPageCallback

freeze_imports()
OUT, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
PASSES, TERMS = hfppo.collect.collector.forward_passes, hfppo.trainer.ppo_terms


def make(name: str, reward=count_digits, **config) -> PPOTrainer:
    config = {"per_device_train_batch_size": 2, "max_steps": 6, **config}
    trainer = small_trainer(OUT / name, config, model=tiny_model(seed=1), reward_funcs=reward)
    trainer.remove_callback(RunPageCallback)  # half of the time of so small a run
    return trainer


def nan_in_rollout(number: int, rank: int) -> None:
    """In the passes of one process."""
    calls = iter(range(100))

    def passes(*args):
        found = PASSES(*args)
        if next(calls) == number and rank == RANK:
            found.values[1] = math.nan
        return found

    hfppo.collect.collector.forward_passes = passes


def nan_in_loss(number: int, rank: int) -> None:
    """In a loss of one process that leaves every gradient finite."""
    calls = iter(range(100))

    def terms(*args):
        policy, *others = TERMS(*args)
        if next(calls) == number and rank == RANK:
            loss = policy.per_token
            policy = replace(policy, per_token=torch.where(loss.detach().isfinite(), math.nan, loss))  # with its graph
        return [policy, *others]

    hfppo.trainer.ppo_terms = terms


def state(trainer: PPOTrainer) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in final_state(trainer).items()}


@TolerantReward
def picky(completions, **kwargs):
    """Fails for one row on the second process."""
    return [math.nan if RANK == 1 and row == 0 else reward for row, reward in enumerate(count_digits(completions))]


def skip() -> dict:
    """Rows that one process alone has reason to leave out."""
    trainer = make("skip", picky)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "state": state(trainer),
        "ppo_state": trainer.ppo_state.state_dict(),
        "failed": [entry["rewards/picky/failed"] for entry in logs if "rewards/picky/failed" in entry],
    }


def stop() -> dict:
    """What each process says when one has found something."""
    said = {}
    # The third loss is the policy's in step 2: each step has one of the policy, and one of the critic.
    for name, inject in (("rollout", lambda: nan_in_rollout(0, 1)), ("step", lambda: nan_in_loss(2, 1))):
        hfppo.collect.collector.forward_passes, hfppo.trainer.ppo_terms = PASSES, TERMS
        inject()
        try:
            make(name).train()
        except NonFiniteError as error:
            said[name] = str(error)
    hfppo.collect.collector.forward_passes, hfppo.trainer.ppo_terms = PASSES, TERMS
    return said


def hangs(completions, **kwargs):
    if RANK == 1:
        time.sleep(600)
    return count_digits(completions)


(OUT / f"result_{RANK}.json").write_text(json.dumps({"skip": skip(), "stop": stop()}))
make("fatal", TolerantReward(hangs, max_failed=0.0, timeout=0.5)).train()
