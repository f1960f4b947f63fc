"""Checkpoints are whole or not there, and a killed run comes back bit for bit."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SMALL, tiny_model
from test_resume import final_state, logs

from hfppo import AdaptiveKLCallback, PPOCallback
from hfppo.crash_safe import MANIFEST, damage, last_intact, seal

TESTS = Path(__file__).parent
CONFIG = {**SMALL, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
BEST = {
    **{**CONFIG, "eval_strategy": "steps", "eval_steps": 1},
    **{"load_best_model_at_end": True, "greater_is_better": False, "metric_for_best_model": "eval_reward"},
}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-1"
    (folder / "critic").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"123")
    (folder / "critic/b.bin").write_bytes(b"456")
    seal(folder)
    return folder


def test_a_sealed_folder_is_whole_and_any_change_shows(sealed):
    assert damage(sealed) is None
    assert set(json.loads((sealed / MANIFEST).read_text())) == {"a.bin", "critic/b.bin"}
    (sealed / "a.bin").write_bytes(b"124")
    assert damage(sealed) == "has a changed a.bin"
    (sealed / "critic/b.bin").unlink()
    (sealed / "a.bin").write_bytes(b"123")
    assert damage(sealed) == "lacks critic/b.bin"
    (sealed / MANIFEST).write_text("{")
    assert damage(sealed).startswith("has no readable manifest.json")


def test_the_last_whole_checkpoint_is_found_by_its_number(tmp_path, caplog):
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/x").write_text(str(step))
        seal(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-11/x").write_text("?")
    assert last_intact(tmp_path) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-11 is passed over: it has a changed x" in caplog.text
    assert last_intact(tmp_path / "checkpoint-9") is None


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(make_trainer, tmp_path):
    straight = make_trainer(CONFIG)
    straight.train()
    weights = tmp_path / "out/checkpoint-6/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=True)
    expected, got = final_state(straight), final_state(resumed)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert damage(tmp_path / "out/checkpoint-6") is None  # written anew


def test_a_new_start_takes_nothing_of_an_earlier_run(make_trainer, tmp_path, caplog):
    config = {**CONFIG, "max_steps": 3, "save_total_limit": 1}
    make_trainer({**config, "save_total_limit": None}).train()
    first = {path.name: (path / MANIFEST).read_text() for path in (tmp_path / "out").glob("checkpoint-*")}
    again = make_trainer({**config, "max_steps": 2, "seed": 7})
    again.train()
    assert "the last as " + str(tmp_path / "out/_earlier_1/checkpoint-3") in caplog.text
    kept = {path.name: path for path in (tmp_path / "out/_earlier_1").iterdir()}
    assert {name: (path / MANIFEST).read_text() for name, path in kept.items()} == first
    assert [damage(path) for path in kept.values()] == [None, None, None]
    assert last_intact(tmp_path / "out") == str(tmp_path / "out/checkpoint-2")
    make_trainer(config).train()
    assert [path.name for path in (tmp_path / "out/_earlier_2").iterdir()] == ["checkpoint-2"]


def test_a_run_keeps_what_it_goes_on_from_and_makes_way_for_the_rest(make_trainer, tmp_path, caplog):
    straight = make_trainer(CONFIG)
    straight.train()
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert sorted(path.name for path in (tmp_path / "out/_earlier_1").iterdir()) == ["checkpoint-5", "checkpoint-6"]
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in range(1, 7)
    ]
    caplog.clear()
    make_trainer(CONFIG).train(resume_from_checkpoint=True)
    assert "does not go on from" not in caplog.text
    assert not (tmp_path / "out/_earlier_2").exists()


def test_the_best_checkpoint_is_found_where_it_was_moved_to(make_trainer, dataset, tmp_path):
    straight = make_trainer(BEST, eval_dataset=dataset)
    straight.train()
    assert straight.state.best_global_step < 5
    make_trainer({**BEST, "max_steps": 5, "seed": 7}, eval_dataset=dataset).train()  # has one of that name, too
    resumed = make_trainer(BEST, eval_dataset=dataset)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/_earlier_1/checkpoint-5"))
    name = Path(straight.state.best_model_checkpoint).name
    assert resumed.state.best_model_checkpoint == str(tmp_path / "out/_earlier_1" / name)
    expected, got = final_state(straight), final_state(resumed)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_the_best_checkpoint_stays(make_trainer, dataset, tmp_path):
    straight = make_trainer(BEST, eval_dataset=dataset)
    straight.train()
    step = straight.state.best_global_step
    assert 1 < step < 5
    make_trainer(BEST, eval_dataset=dataset).train(resume_from_checkpoint=str(tmp_path / f"out/checkpoint-{step}"))
    resumed = make_trainer(BEST, eval_dataset=dataset)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/_earlier_1/checkpoint-5"))
    assert resumed.state.best_model_checkpoint == str(tmp_path / f"out/checkpoint-{step}")
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == [
        f"checkpoint-{step}",
        "checkpoint-6",
    ]


def test_nothing_moves_before_a_run_has_a_checkpoint_of_its_own(make_trainer, tmp_path):
    make_trainer(CONFIG).train()
    saved = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    with pytest.raises(ValueError, match="kl_coef=0 stays 0"):
        make_trainer({**CONFIG, "kl_coef": 0.0}, callbacks=[AdaptiveKLCallback()]).train()
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == saved
    assert not list((tmp_path / "out").glob("_earlier*"))


@pytest.mark.parametrize("argument", ["model", "critic"])
def test_a_checkpoint_that_the_run_stands_on_is_refused(make_trainer, tmp_path, argument):
    folder = tmp_path / "out/checkpoint-3"
    if argument == "model":
        tiny_model().save_pretrained(folder)
    else:
        make_trainer().model.save_pretrained(folder)
    trainer = make_trainer(**{argument: str(folder)})
    with pytest.raises(
        ValueError, match=f"^{argument}='.*' is a checkpoint in output_dir=.*; give another output_dir"
    ):
        trainer.train()


class FullDisk:
    """Lets torch.save work a few times, then no more."""

    def __init__(self, times: int):
        self.times, self.save = times, torch.save

    def __call__(self, *args, **kwargs):
        self.times -= 1
        if self.times < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.save(*args, **kwargs)


@pytest.mark.parametrize("times", [9, 10, 11])
def test_a_full_disk_leaves_what_was_saved_before(make_trainer, tmp_path, monkeypatch, times):
    """A checkpoint makes four calls, for arguments, optimiser, schedule and random state: the third is cut off."""
    straight = make_trainer({**CONFIG, "output_dir": str(tmp_path / "straight")})
    straight.train()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", FullDisk(times))
        with pytest.raises(OSError, match="No space left") as full:
            make_trainer(CONFIG).train()
    assert "The checkpoint at step 3 could not be written" in full.value.__notes__[0]
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert folders == ["checkpoint-1", "checkpoint-2"]
    assert damage(tmp_path / "out/checkpoint-2") is None
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=True)
    expected, got = final_state(straight), final_state(resumed)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_best_checkpoint_has_its_final_name(make_trainer, dataset, tmp_path, save_only_model):
    config = {**CONFIG, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    config["save_only_model"] = save_only_model
    trainer = make_trainer(config, eval_dataset=dataset)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path / "out"
    assert damage(best) is None
    states = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("checkpoint-*/trainer_state.json")]
    assert states
    assert not any("_saving" in str(state["best_model_checkpoint"]) for state in states)


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_step_end"])
def test_a_just_in_time_checkpoint_is_whole_and_resumes(make_trainer, tmp_path, event):
    """What Trainer does on SIGTERM, asked for in the middle of a rollout and between two logs."""

    def terminate(args, state, control, **kwargs):
        if state.global_step == 3:
            manager.is_checkpoint_requested = True

    config = {**CONFIG, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 2}
    config["save_strategy"] = "no"
    straight = make_trainer(config)
    straight.train()
    callback = PPOCallback()
    setattr(callback, event, terminate)
    trainer = make_trainer({**config, "enable_jit_checkpoint": True}, callbacks=[callback])
    (manager,) = [c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager")]
    trainer.train()
    assert trainer.state.global_step < 6
    assert last_intact(tmp_path / "out") == str(tmp_path / "out/checkpoint-3")
    assert not (tmp_path / "out/_earlier_1").exists()
    resumed = make_trainer(config)
    resumed.train(resume_from_checkpoint=True)
    expected, got = final_state(straight), final_state(resumed)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert logs(resumed) == logs(straight)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kills", "variants"), [(1, 3, 3), (2, 2, 1)])
def test_killed_runs_come_back_bit_for_bit(processes, kills, variants):
    """The short version of what docs/reliability.md tells of."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "recipes"), str(TESTS.parent)])
    flags = f"--kills {kills} --processes {processes} --variants {variants}".split()
    found = subprocess.run(
        [sys.executable, str(TESTS / "chaos.py"), *flags],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    assert json.loads(found.stdout)["runs compared"] >= variants
