"""Two runs in one output folder."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hfppo.saving import lock

HOLD = """
import runpy, sys, time
print(runpy.run_path(sys.argv[1])["OutputLock"](sys.argv[2]).acquire(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_run(tmp_path) -> Iterator[subprocess.Popen]:
    """Another process that has the output folder."""
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", HOLD, lock.__file__, str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "None\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_folder_that_another_run_has_is_refused_until_that_one_has_ended(make_trainer, tmp_path, other_run):
    trainer = make_trainer({"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    with pytest.raises(ValueError, match=rf"in use by another run \(process {other_run.pid} on .*\); give"):
        trainer.train()
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    other_run.kill()
    other_run.wait()
    trainer.train()
    assert (tmp_path / "out/checkpoint-1").is_dir()
    assert not (tmp_path / "out" / lock.LOCK).exists()


def test_the_lock_is_given_back_when_training_fails(make_trainer, tmp_path):
    trainer = make_trainer()
    with pytest.raises(ValueError, match="is not a folder"):
        trainer.train(resume_from_checkpoint="nowhere")
    assert not (tmp_path / "out" / lock.LOCK).exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path, monkeypatch, other_run):
    """Two runs open the file of a third, which ends; a fourth has locked a new file by then."""
    removed, real = os.open(tmp_path / "old", os.O_RDWR | os.O_CREAT), os.open
    (tmp_path / "old").unlink()
    opened = iter([removed])
    monkeypatch.setattr(lock.os, "open", lambda *given: next(opened, None) or real(*given))
    assert f"process {other_run.pid}" in lock.OutputLock(tmp_path / "out").acquire()


def test_a_folder_that_cannot_be_locked_is_trained_into(tmp_path, monkeypatch):
    unlocked = lock.OutputLock(tmp_path / "missing")
    assert unlocked.acquire() is None
    unlocked.release()

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "lockf", unsupported)
    assert lock.OutputLock(tmp_path).acquire() is None
