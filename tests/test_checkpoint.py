"""A run stopped at any step and resumed equals the straight run, bit for bit: weights, optimiser and logs."""

import itertools
import json
import shutil
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from helpers.runs import (
    assert_same_end,
    assert_same_run,
    assert_same_tensors,
    count_digits,
    critic_state,
    logged,
    logs,
    read_log,
    small_trainer,
    stops_at_kl,
)
from hfppo import AdaptiveKLCallback, ClipMetricsCallback, PPOCallback, PPOTrainer, Rollout, RunPageCallback
from hfppo.checkpoint import PPOCheckpoint, RunDescription, Standing
from hfppo.collect.candidates import ScoreLine
from hfppo.metrics import Meter, merge, parts, values_of
from hfppo.saving.manifest import seal
from hfppo.state import PPOState

# 2 mini-batches × 2 epochs = 4 steps per rollout: checkpoint 8 lies between two rollouts, the others within one.
CONFIG = {"max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "weight_decay": 0.01}
CONFIG |= {"save_strategy": "steps", "save_steps": 1, "logging_steps": 3}
ROWS = Dataset.from_list([{"prompt": f"请问{a}+{b}="} for a in range(2) for b in range(3, 9)])  # fewer than are needed
HUNDRED = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)])
STREAM = ROWS.to_iterable_dataset().shuffle(seed=1, buffer_size=4)


class Narrow(PPOCallback):
    """Narrows the clip after the first rollout."""

    def on_update_end(self, args, state, control, **kwargs):
        control.cliprange = control.cliprange_high = 1e-4


VARIANTS = {
    "adapter critic, adaptive KL, metrics not yet logged": (
        {},
        {"critic": "adapter", "callbacks": lambda: [AdaptiveKLCallback(target=0.01, horizon=100)]},
    ),
    "shared critic, warmup": ({"critic_warmup": 2}, {"critic": "shared"}),
    "stopped at a KL, bypass": ({"policy_mode": "bypass"}, {"callbacks": lambda: [stops_at_kl(0.02)]}),
    "a stream, read again from its start": ({"max_prompt_length": 10}, {"train_dataset": STREAM}),
    "groups without a critic": ({"advantage_estimator": "grpo", "num_generations": 2}, {}),
    "a rollout ahead": ({"rollouts_ahead": 1}, {}),
    "epochs of the critic alone": ({"num_ppo_epochs": 1, "num_critic_epochs": 2}, {}),
    "prompts chosen by the critic": ({"prompt_candidates": 3, "num_ppo_epochs": 1}, {"train_dataset": HUNDRED}),
    "a steered rate and clip": (
        {"learning_rate": 5e-2, "cliprange": 0.05, "dual_clip": 3.0},
        {"callbacks": lambda: [ClipMetricsCallback(target=1e-3, per_mini_batch=True), Narrow()]},
    ),
    "groups ahead, stopped at a KL": (
        {"rollouts_ahead": 1, "advantage_estimator": "grpo", "num_generations": 2, "prompt_candidates": 2},
        {"callbacks": lambda: [stops_at_kl(0.02)]},
    ),
}
FAST = (
    "adapter critic, adaptive KL, metrics not yet logged",
    "shared critic, warmup",
    "a stream, read again from its start",
    "a rollout ahead",
    "prompts chosen by the critic",
    "a steered rate and clip",
)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in FAST]


@pytest.mark.parametrize("variant", [*FAST, *SLOW])
def test_resuming_equals_the_straight_run(make_trainer, tmp_path: Path, monkeypatch, variant):
    monkeypatch.setattr(ScoreLine, "may_choose", property(lambda line: line.high > line.low))  # whatever it explains
    config, kwargs = VARIANTS[variant]
    kwargs = dict(kwargs)
    callbacks = kwargs.pop("callbacks", list)

    def trainer(output_dir: str, **changes):
        fields = {**CONFIG, **config, **changes, "output_dir": output_dir}
        return make_trainer(fields, callbacks=callbacks(), **kwargs)

    straight = trainer(str(tmp_path / "straight"))
    straight.train()
    assert straight.state.global_step == 12
    assert (straight.ppo_state.passed_over > 0) == ("prompt_candidates" in config)
    for step in (1, 7, 8, 10) if variant == FAST[0] else (7, 8):
        shutil.copytree(tmp_path / "straight" / f"checkpoint-{step}", tmp_path / f"from-{step}" / f"checkpoint-{step}")
        resumed = trainer(str(tmp_path / f"from-{step}"), save_strategy="no")
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 12
        assert_same_run(straight, resumed)
        written = [[list(entry) for entry in read_log(run.args.output_dir)] for run in (straight, resumed)]
        assert written[0] == written[1]  # to the order of the names


@pytest.mark.parametrize("deepspeed", [False, True])
def test_deepspeed_loads_the_best_critic_itself(make_trainer, tmp_path, monkeypatch, deepspeed):
    fields = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer({**fields, "eval_steps": 1}, eval_dataset=ROWS)
    trainer.is_deepspeed_enabled = deepspeed
    loaded: list[str] = []
    monkeypatch.setattr(trainer.model, "load_critic", loaded.append)
    with trainer.training_context():
        trainer.state.best_model_checkpoint = str(tmp_path)
    assert loaded == ([] if deepspeed else [str(tmp_path)])


def test_a_target_for_the_kl_leaves_the_number_of_completions_as_it_is(make_trainer, tmp_path):
    """Of each rollout's 4 steps it leaves out two, from the checkpoints on and in a second run as well."""
    config = {**CONFIG, "max_steps": -1, "total_episodes": 20}
    made: list[int] = []

    def trainer(output_dir: Path):
        run = make_trainer(
            {**config, "output_dir": str(output_dir)},
            train_dataset=ROWS,
            callbacks=[stops_at_kl(1e-9)],
            reward_funcs=lambda completions, **_: (made.append(len(completions)), count_digits(completions))[1],
        )
        made.clear()
        return run

    straight = trainer(tmp_path / "straight")
    straight.train()
    assert made == [8, 8, 8]  # 20 rounded up to rollouts
    assert straight.state.global_step == straight.state.max_steps == 6
    assert (tmp_path / "straight" / "checkpoint-6").is_dir()
    for step, left in ((1, 2), (3, 1), (6, 0)):
        shutil.copytree(tmp_path / "straight" / f"checkpoint-{step}", tmp_path / f"from-{step}" / f"checkpoint-{step}")
        resumed = trainer(tmp_path / f"from-{step}")
        resumed.train(resume_from_checkpoint=True)
        assert made == [8] * left
        assert resumed.state.global_step == resumed.state.max_steps == 6
        assert resumed.ppo_state == straight.ppo_state
    made.clear()
    straight.train()
    assert made == [8, 8, 8]


def test_adaptive_kl_moves_beta_after_the_rollout_it_was_measured_on(make_trainer):
    trainer = make_trainer({"kl_coef": 0.1, "max_steps": 12}, callbacks=[AdaptiveKLCallback(target=1e-6, horizon=100)])
    trainer.train()
    betas = [entry["kl_coef"] for entry in trainer.state.log_history if "kl_coef" in entry]
    # KL is 0 in the first rollout (error −0.2) and far above the target in the others (error +0.2); n = 8.
    expected = [0.1, 0.1 * (1 - 0.2 * 8 / 100), 0.1 * (1 - 0.2 * 8 / 100) * (1 + 0.2 * 8 / 100)]
    assert betas == pytest.approx(expected)
    assert trainer.ppo_state.kl_coef == pytest.approx(expected[-1] * (1 + 0.2 * 8 / 100))


def test_best_model_is_loaded_with_its_critic(make_trainer):
    """Each score is lower than the one before, so that the first checkpoint is the best."""
    scores = itertools.count(0, -1)
    fields = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    fields |= {"metric_for_best_model": "eval_reward", "greater_is_better": True}
    trainer = make_trainer(
        CONFIG | fields,
        reward_funcs=lambda completions, **_: [float(next(scores)) for _ in completions],
        eval_dataset=ROWS,
    )
    trainer.train()
    assert trainer.state.best_global_step == 1
    best = Path(trainer.state.best_model_checkpoint)
    assert_same_tensors(critic_state(trainer.model), load_file(best / "critic/critic.safetensors"))
    assert_same_tensors(get_peft_model_state_dict(trainer.model), load_file(best / "adapter_model.safetensors"))


def test_a_resumed_run_has_the_rates_that_it_is_given(make_trainer):
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    config |= {"learning_rate": 1e-2, "critic_learning_rate": 2e-2, "weight_decay": 0.1, "adam_beta2": 0.99}
    make_trainer(config).train()
    changed = {"learning_rate": 1e-3, "critic_learning_rate": 4e-2, "weight_decay": 0.3, "adam_beta2": 0.999}
    trainer = make_trainer(config | changed | {"adam_epsilon": 1e-6})
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    rates = [(entry["learning_rate"], entry["critic_learning_rate"]) for entry in logs(trainer) if "loss" in entry]
    # Half and a quarter of the rate, in steps 3 and 4.
    assert rates[-2:] == [pytest.approx((1e-3 * x, 4e-2 * x)) for x in (0.5, 0.25)]
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups if group["params"]} <= {0.0, 0.3}
    assert {(group["betas"], group["eps"]) for group in trainer.optimizer.param_groups} == {((0.9, 0.999), 1e-6)}


FINISHED = {**CONFIG, "max_steps": 4, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> PPOTrainer:
    """A finished run of one rollout, with a checkpoint after each step."""
    trainer = small_trainer(tmp_path_factory.mktemp("finished"), FINISHED, train_dataset=ROWS)
    trainer.remove_callback(RunPageCallback)
    trainer.train()
    return trainer


@pytest.fixture
def resume(make_trainer, finished):
    """Continue the finished run from a checkpoint, with other fields."""

    def run(folder: Path, **changes) -> PPOTrainer:
        trainer = make_trainer({**FINISHED, **changes}, train_dataset=ROWS)
        trainer.train(resume_from_checkpoint=str(folder))
        return trainer

    return run


def test_a_checkpoint_of_another_run_is_refused_before_anything_is_loaded(finished, resume, monkeypatch):
    """Whoever loads it: DeepSpeed does so by itself."""
    monkeypatch.setattr(PPOTrainer, "_load_from_checkpoint", lambda *_: None)
    with pytest.raises(ValueError, match="was written with num_ppo_epochs=2, this run has 3"):
        resume(Path(finished.args.output_dir) / "checkpoint-4", num_ppo_epochs=3)


def test_a_field_that_is_newer_than_the_checkpoint_had_its_default(finished, resume, tmp_path):
    folder = shutil.copytree(Path(finished.args.output_dir) / "checkpoint-3", tmp_path / "checkpoint-3")
    content = json.loads((folder / "ppo_state_0.json").read_text())
    del content["run"]["structure"]["rollouts_ahead"], content["ahead"]
    (folder / "ppo_state_0.json").write_text(json.dumps(content))
    seal(folder)
    with pytest.raises(ValueError, match="was written with rollouts_ahead=0, this run has 1"):
        resume(folder, rollouts_ahead=1)
    assert resume(folder).state.global_step == 4


def checkpoint_of(process: int, processes: int, **structure) -> PPOCheckpoint:
    settings = {"kl_coef": 0.1, "cliprange": 0.2, "cliprange_high": None, "number of processes": processes}
    return PPOCheckpoint(RunDescription(structure, settings, "2026-11-28"), process)


@pytest.fixture
def of_two(tmp_path) -> Path:
    """A checkpoint of two processes with 4 rows each, the second's longer, and 8 prompts of the rollout ahead."""
    required = [f.name for f in fields(Rollout) if f.default is MISSING]
    for process in range(2):
        some = dict.fromkeys(required, torch.ones(4, 1 + process, dtype=torch.bool))
        rollout = Rollout(**{**some, "scores": torch.arange(4.0) + 4 * process})
        choice = {"positions": [20 + 4 * process, 24 + 4 * process], "taken": [0, 1, 2, 3], "uniform": [True] * 4}
        metrics = Meter({"reward": parts(rollout.scores)}).state_dict()
        choice["measures"] = {"candidates/chosen": metrics["reward"]}
        ahead = ({"choice": choice, "state": {}}, {"weight": torch.zeros(1)})
        standing = Standing(PPOState(kl_coef=0.1), metrics, [], rollout, ahead)
        checkpoint_of(process, 2).save(tmp_path, standing)
    return tmp_path


def test_a_checkpoint_that_does_not_say_its_engine_is_resumed_by_any(of_two):
    for engine in ("FSDP", "DDP or one process"):
        checkpoint_of(0, 2, engine=engine).check(of_two)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_another_number_of_processes_shares_out_the_rows_prompts_and_metrics(of_two, processes):
    found = [checkpoint_of(process, processes).load(of_two) for process in range(processes)]
    assert [len(one.rollout) for one in found] == [8 // processes] * processes
    assert [row for one in found for row in one.rollout.scores.tolist()] == list(range(8))
    assert [int(one.rollout.mask.sum()) for one in found][-1] == {1: 12, 2: 8, 4: 4}[processes]
    choices = [one.ahead[0]["choice"] for one in found]
    assert [choice["positions"][0] + i for choice in choices for i in choice["taken"]] == list(range(20, 28))
    assert [len(choice["uniform"]) for choice in choices] == [8 // processes] * processes
    sums = merge([*(one.metrics for one in found), *(choice["measures"] for choice in choices)])
    assert values_of(sums) == {"reward": 3.5, "candidates/chosen": 3.5}
    assert sums["reward"][0] == sums["candidates/chosen"][0] == 8


def test_what_a_checkpoint_of_another_number_needs(of_two, caplog):
    checkpoint_of(0, 1).check(of_two)
    assert "resuming with number of processes=1, the checkpoint was written with 2" in caplog.text
    with pytest.raises(ValueError, match="was written with number of processes=None, this run has 1"):
        checkpoint_of(0, 1, **{"number of processes": 1}).check(of_two)
    (of_two / "ppo_state_1.json").unlink()
    with pytest.raises(ValueError, match=r"has no ppo_state_1\.json"):
        checkpoint_of(0, 1).check(of_two)


def test_only_runs_that_need_it_fix_their_number_of_processes(finished, make_trainer):
    groups = {"advantage_estimator": "grpo", "num_generations": 2, "prompt_candidates": 2}
    chosen = make_trainer(groups)
    structures = [trainer._checkpoint.run.structure for trainer in (finished, chosen)]
    assert ["number of processes" in structure for structure in structures] == [False, True]


def test_resuming_a_finished_run_makes_no_further_step(finished, resume):
    again = resume(Path(finished.args.output_dir) / "checkpoint-4")
    assert again.state.global_step == 4
    assert_same_end(again, finished)


STEP = {"num_mini_batches": 1, "num_ppo_epochs": 1, "save_strategy": "steps", "save_steps": 1}  # one per rollout


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"cliprange": 0.3}, {"cliprange": 0.05}, (0.05, 0.05, 0.7)),
        ({"cliprange": 0.3}, {"cliprange": 0.3, "cliprange_high": 0.4}, (0.1, 0.4, 0.7)),
        ({"cliprange": 0.3, "cliprange_high": 0.4}, {"cliprange": 0.3}, (0.1, 0.3, 0.7)),
        ({"cliprange": 0.3}, {"cliprange": 0.3, "cliprange_high": 0.3}, (0.1, 0.15, 0.7)),  # nothing has changed
        ({}, {"kl_coef": 0.3}, (0.1, 0.15, 0.3)),
    ],
)
def test_a_resumed_run_has_the_clips_and_the_beta_that_it_is_given(make_trainer, before, now, found):
    """A callback's hold where the settings have not changed since."""

    class Narrow(PPOCallback):
        def on_update_end(self, args, state, control, **kwargs):
            control.cliprange, control.cliprange_high, control.kl_coef = 0.1, 0.15, 0.7

    make_trainer(STEP | before | {"max_steps": 1}, callbacks=[Narrow()]).train()
    resumed = make_trainer(STEP | now | {"max_steps": 2})
    resumed.train(resume_from_checkpoint=True)
    state = resumed.ppo_state
    assert (state.cliprange, state.cliprange_high, state.kl_coef) == found
    assert logged(resumed, "kl_coef") == [before.get("kl_coef", 0.05), found[2]]
