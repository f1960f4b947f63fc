"""Checkpoints are whole or not there, and a killed run comes back bit for bit."""

import errno
import json
import os
import resource
import shutil
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Trainer

from helpers.processes import HELPERS, run_python
from helpers.runs import SMALL, Killed, assert_same_end, count_digits, read_log, small_trainer
from helpers.tiny import tiny_model
from hfppo import PPOCallback, PPOTrainer
from hfppo.saving.checkpoint_folders import find_last_intact, finish_renames, publish, rotate
from hfppo.saving.manifest import MANIFEST, find_damage, seal

CONFIG = {**SMALL, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
BEST = {
    **{**CONFIG, "eval_strategy": "steps", "eval_steps": 1},
    **{"load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "eval_reward"},
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> PPOTrainer:
    """A run of CONFIG that nothing disturbs."""
    made = small_trainer(tmp_path_factory.mktemp("straight"), CONFIG)
    made.train()
    return made


@pytest.fixture
def finished(straight, tmp_path) -> Path:
    """The folder of such a run, where `make_trainer` goes on."""
    return shutil.copytree(straight.args.output_dir, tmp_path / "out")


def names(folder: Path, pattern: str = "checkpoint-*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def damage(file: Path) -> None:
    """Change the last byte."""
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-1"
    (folder / "critic").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"123")
    (folder / "critic/b.bin").write_bytes(b"456")
    seal(folder)
    return folder


def test_a_sealed_folder_is_whole_and_any_change_shows(sealed):
    assert find_damage(sealed) is None
    assert set(json.loads((sealed / MANIFEST).read_text())) == {"a.bin", "critic/b.bin"}
    (sealed / "a.bin").write_bytes(b"124")
    assert find_damage(sealed) == "has a changed a.bin"
    (sealed / "critic/b.bin").unlink()
    (sealed / "a.bin").write_bytes(b"123")
    assert find_damage(sealed).endswith("critic/b.bin")
    for text in ("", "{", "{}", "[]", "null"):
        (sealed / MANIFEST).write_text(text)
        assert find_damage(sealed).startswith("has no readable manifest.json")


def test_a_file_that_cannot_be_read_is_damage(sealed, monkeypatch):
    def unreadable(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("hfppo.saving.manifest.hash_file", unreadable)
    assert find_damage(sealed) == "lacks a readable a.bin"


def test_the_last_whole_checkpoint_is_found_by_its_number(tmp_path, caplog):
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/x").write_text(str(step))
        seal(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-11/x").write_text("?")
    assert find_last_intact(tmp_path) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-11 is passed over: it has a changed x" in caplog.text
    assert find_last_intact(tmp_path / "checkpoint-9") is None


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_checkpoint_written_again_is_never_missing(tmp_path, sealed, monkeypatch, renames):
    """A kill between the renames leaves the new one, the old one, or both; what comes next finds one of them."""
    new = tmp_path / "_saving/checkpoint-1"
    shutil.copytree(sealed, new)
    rename, left = Path.rename, [renames]

    def rename_until_killed(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_until_killed)
        if renames < 2:
            with pytest.raises(KeyboardInterrupt):
                publish(new, sealed)
        else:
            publish(new, sealed)
    finish_renames(tmp_path)
    assert find_last_intact(tmp_path) == str(sealed)


def test_what_a_killed_save_left_is_neither_the_last_checkpoint_nor_in_another(make_trainer, tmp_path):
    """`enable_jit_checkpoint` makes a folder, with a mark, before it saves."""
    out = tmp_path / "out"
    (out / "checkpoint-99").mkdir(parents=True)
    (out / "checkpoint-99/checkpoint-is-incomplete.txt").touch()
    left = out / "_saving/checkpoint-3/optimizer.bin"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    make_trainer({**CONFIG, "max_steps": 3, "save_total_limit": 1}).train()
    assert find_last_intact(out) == str(out / "checkpoint-3")
    assert not (out / "checkpoint-3/optimizer.bin").exists()


def test_only_whole_checkpoints_get_their_name_later(tmp_path, sealed):
    """A run that was killed after a checkpoint was written goes on from it, unless there is a whole one already."""
    (tmp_path / "_saving").mkdir()
    half = tmp_path / "_saving/checkpoint-3"
    shutil.copytree(sealed, half)
    (half / "a.bin").unlink()
    whole = tmp_path / "_saving/checkpoint-2"
    shutil.copytree(sealed, whole)
    finish_renames(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert find_last_intact(tmp_path) == str(tmp_path / "checkpoint-2")


def test_the_limit_goes_by_steps_and_touches_nothing_else(tmp_path):
    for number, step in enumerate((2, 3, 10, 11)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (1e9 - number, 1e9 - number))  # a clock that is set back
    for name in ("checkpoint-best", "checkpoint-2-backup"):
        (tmp_path / name).mkdir()
    rotate(tmp_path, 2, tmp_path / "checkpoint-11", best=str(tmp_path / "x/../checkpoint-3"))
    others = ["checkpoint-2-backup", "checkpoint-3", "checkpoint-best"]
    assert names(tmp_path) == ["checkpoint-11", *others]
    rotate(tmp_path, None, tmp_path / "checkpoint-11", best=None)
    assert names(tmp_path) == ["checkpoint-11", *others]
    rotate(tmp_path, 1, tmp_path / "checkpoint-3", best=None)  # the later one was never saved
    assert names(tmp_path) == others


def test_a_run_killed_before_a_checkpoint_got_its_name_goes_on_from_it(make_trainer, finished):
    (finished / "_saving").mkdir()
    (finished / "checkpoint-6").rename(finished / "_saving/checkpoint-6")
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert find_last_intact(finished) == str(finished / "checkpoint-6")


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(make_trainer, straight, finished):
    damage(finished / "checkpoint-6/adapter_model.safetensors")
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, straight)
    assert find_damage(finished / "checkpoint-6") is None  # written anew


def test_a_new_start_takes_nothing_of_an_earlier_run(make_trainer, tmp_path, caplog):
    config = {**CONFIG, "max_steps": 3, "save_total_limit": 1}
    make_trainer({**config, "save_total_limit": None}).train()
    first = {path.name: (path / MANIFEST).read_text() for path in (tmp_path / "out").glob("checkpoint-*")}
    again = make_trainer({**config, "max_steps": 2, "seed": 7})
    again.train()
    assert "the last one is " + str(tmp_path / "out/_earlier_1/checkpoint-3") in caplog.text
    kept = {path.name: path for path in (tmp_path / "out/_earlier_1").iterdir()}
    assert {name: (path / MANIFEST).read_text() for name, path in kept.items()} == first
    assert [find_damage(path) for path in kept.values()] == [None, None, None]
    assert find_last_intact(tmp_path / "out") == str(tmp_path / "out/checkpoint-2")
    make_trainer(config).train()
    assert names(tmp_path / "out/_earlier_2", "*") == ["checkpoint-2"]


def test_a_run_keeps_what_it_goes_on_from_and_makes_way_for_the_rest(make_trainer, finished, caplog):
    make_trainer(CONFIG).train(resume_from_checkpoint=str(finished / "checkpoint-4"))
    assert names(finished / "_earlier_1", "*") == ["checkpoint-5", "checkpoint-6"]
    assert names(finished) == [f"checkpoint-{n}" for n in range(1, 7)]
    assert "had checkpoints of another run" in caplog.text
    caplog.clear()
    make_trainer(CONFIG).train(resume_from_checkpoint=True)
    assert "had checkpoints of another run" not in caplog.text
    assert names(finished, "_earlier*") == ["_earlier_1"]


def test_auto_starts_anew_or_resumes(make_trainer, straight, finished, tmp_path):
    shutil.rmtree(finished / "checkpoint-6")
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint="auto")
    assert names(finished, "_earlier*") == []
    assert_same_end(resumed, straight)
    shutil.rmtree(finished)
    anew = make_trainer(CONFIG)
    anew.train(resume_from_checkpoint="auto")
    assert_same_end(anew, straight)


def test_the_best_checkpoint_stays(make_trainer, dataset, tmp_path):
    straight = make_trainer(BEST, eval_dataset=dataset)
    straight.train()
    step = straight.state.best_global_step
    assert 1 < step < 5
    make_trainer(BEST, eval_dataset=dataset).train(resume_from_checkpoint=str(tmp_path / f"out/checkpoint-{step}"))
    resumed = make_trainer(BEST, eval_dataset=dataset)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/_earlier_1/checkpoint-5"))
    assert resumed.state.best_model_checkpoint == str(tmp_path / f"out/checkpoint-{step}")
    assert names(tmp_path / "out") == [f"checkpoint-{step}", "checkpoint-6"]


def test_a_reward_may_change_the_working_folder(make_trainer, dataset, tmp_path, monkeypatch):
    """A relative output folder and a relative checkpoint stay where the run began."""
    (tmp_path / "other").mkdir()

    def moving(completions, **kwargs):
        monkeypatch.chdir(tmp_path / "other")
        return [float(len(text)) for text in completions]

    monkeypatch.chdir(tmp_path)
    config = {**BEST, "output_dir": "out", "lr_scheduler_type": "constant", "save_total_limit": 2}
    make_trainer({**config, "max_steps": 2}, reward_funcs=moving, eval_dataset=dataset).train()
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(config, reward_funcs=moving, eval_dataset=dataset)
    trainer.train(resume_from_checkpoint="out/checkpoint-2")
    assert Path(trainer.state.best_model_checkpoint).is_absolute()
    assert find_damage(trainer.state.best_model_checkpoint) is None
    assert list((tmp_path / "other").iterdir()) == []


def test_a_path_is_checked_as_a_text_is(make_trainer, finished):
    folder = finished / "checkpoint-6"
    make_trainer({**CONFIG, "max_steps": 7}).train(resume_from_checkpoint=folder)
    assert names(finished, "_earlier*") == []
    damage(folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has a changed adapter_model\.safetensors; name an earlier checkpoint"):
        make_trainer(CONFIG).train(resume_from_checkpoint=folder)


@pytest.mark.parametrize(
    ("argument", "folder"),
    [("model", "out"), ("critic", "out/checkpoint-3"), ("ref_model", "out"), ("the base's path", "out/checkpoint-3")],
)
def test_a_run_does_not_write_where_its_parts_are(make_trainer, tmp_path, argument, folder):
    base, path = tiny_model(), str(tmp_path / folder)
    if argument == "critic":
        make_trainer().model.save_pretrained(path)
    else:
        base.save_pretrained(path)
        base.name_or_path = path
    trainer = make_trainer(**({"model": base} if argument == "the base's path" else {argument: path}))
    remedy = "set another output_dir" if "/" in folder else "where saving may overwrite"
    with pytest.raises(ValueError, match=f"^{argument}='.*' is in output_dir=.*{remedy}"):
        trainer.train()


def test_an_output_folder_may_be_called_as_a_kind_of_critic(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer({"output_dir": "shared", "max_steps": 1}, critic="shared").train()
    assert (tmp_path / "shared/metrics.jsonl").is_file()


def test_ctrl_c_ends_with_the_way_back(make_trainer, tmp_path):
    with pytest.raises(KeyboardInterrupt) as pressed:
        make_trainer(CONFIG, callbacks=[Killed(3)]).train()
    how = "resume_from_checkpoint=True, or a recipe with --resume_from_checkpoint true"
    note = f"The last checkpoint is {tmp_path}/out/checkpoint-2: resume with {how}."
    assert traceback.format_exception(pressed.value)[-1] == f"{note}\n"


def test_a_disk_that_is_full_for_torch_and_safetensors_names_the_step(make_trainer, tmp_path):
    """They raise errors of their own kinds, of which some do not say what was wrong."""
    trainer = make_trainer({**CONFIG, "logging_steps": 3}, callbacks=[limit := PPOCallback()])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(args, state, control, **kwargs):
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))

    limit.on_step_begin = fill
    try:
        with pytest.raises(Exception, match=r"large|inline_container") as full:
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not isinstance(full.value, OSError)
    assert "The checkpoint at step 3 could not be written; its disk has " in full.value.__notes__[0]
    assert find_last_intact(tmp_path / "out") == str(tmp_path / "out/checkpoint-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "kills", "steps", "variants"),
    [
        (2, 2, 6, ["adapter", "environment"]),
        pytest.param(2, 3, 12, ["chosen", "chosen groups"], marks=pytest.mark.nightly),
        pytest.param(1, 4, 10, ["adapter", "shared", "groups", "pretraining"], marks=pytest.mark.nightly),
        pytest.param(1, 6, 10, ["environment"], marks=pytest.mark.nightly),
        pytest.param(1, 6, 10, ["ahead", "environment ahead"], marks=pytest.mark.nightly),
        pytest.param(2, 3, 10, ["chosen ahead"], marks=pytest.mark.nightly),
        pytest.param(2, 3, 10, ["agent"], marks=pytest.mark.nightly),
    ],
)
def test_killed_runs_come_back_bit_for_bit(processes, kills, steps, variants):
    """The short version of what docs/reliability.md tells of."""
    flags = f"--seed 1 --kills {kills} --steps {steps} --processes {processes}".split()
    found = run_python(HELPERS / "chaos.py", *flags, "--variants", *variants, timeout=500)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    counts = json.loads(found.stdout)
    assert counts["runs compared"] >= len(variants)
    assert "environment" not in variants or counts["kills in an episode"] * counts["kills in an update"]


@pytest.mark.parametrize("stage", ["construction", "resuming", "first rollout"])
def test_a_refused_run_leaves_the_files_of_a_folder(make_trainer, tmp_path, monkeypatch, stage):
    """A missing sampler shows only once Trainer has made the output folder."""

    def fails(*args, **kwargs):
        raise ValueError(f"no {stage}")

    (tmp_path / "old").mkdir()
    (tmp_path / "old/notes.txt").write_text("mine")
    if stage == "construction":
        monkeypatch.setattr(PPOTrainer, "create_sampler", fails)
    with pytest.raises(ValueError, match=r"no construction|no whole checkpoint|no first rollout"):
        make_trainer({"output_dir": str(tmp_path / "old")}, reward_funcs=fails).train(
            resume_from_checkpoint=stage == "resuming"
        )
    assert names(tmp_path / "old", "*") == ["notes.txt"]


def test_a_trainer_whose_first_rollout_failed_can_train_again(make_trainer, tmp_path, run_page):
    failures = [RuntimeError]

    def fails_once(completions, **kwargs):
        if failures:
            raise failures.pop()
        return count_digits(completions)

    trainer = make_trainer({"max_steps": 2}, reward_funcs=fails_once)
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer.train()
    assert names(tmp_path / "out", "*") == ["metrics.jsonl", "run.html"]
    assert [entry["step"] for entry in read_log(tmp_path / "out")] == [1, 2, 2]


@pytest.mark.parametrize("always", [False, True])
def test_a_push_in_progress_is_not_disturbed(make_trainer, monkeypatch, tmp_path, always):
    """Without `hub_always_push` the next push is left out, with it the next one waits."""
    events = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: events.append("push"))
    trainer = make_trainer({"hub_always_push": always})
    trainer.save_model(str(tmp_path / "checkpoint-1"))
    trainer.push_in_progress = SimpleNamespace(
        is_done=lambda: "waited" in events, wait_until_done=lambda: events.append("waited"), jobs=[]
    )
    trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert events == (["waited", "push"] if always else [])
    assert (tmp_path / "out/critic/critic.safetensors").is_file() is always
    assert (tmp_path / "out/README.md").is_file() is always


def test_a_run_has_ten_checkpoints_and_resumes_without_a_warning_of_their_steps(make_trainer, tmp_path, monkeypatch):
    config = {"max_steps": 20, "save_strategy": "steps", "eval_steps": 0.5}
    make_trainer(config).train()
    folders = sorted(int(folder.name.partition("-")[2]) for folder in tmp_path.glob("**/checkpoint-*"))
    assert folders == list(range(2, 21, 2))
    said: list[str] = []
    monkeypatch.setattr("transformers.trainer_utils.logger.warning_once", said.append)
    trainer = make_trainer(config)
    trainer.train(str(next(tmp_path.glob("**/checkpoint-14"))))
    assert (trainer.state.save_steps, trainer.state.eval_steps) == (2, 10)
    assert said == []
