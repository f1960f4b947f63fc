"""Two runs in one output folder."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from hfppo.saving import lock, shared_folder

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


@pytest.mark.parametrize(("host", "tries"), [("elsewhere", 3), (socket.gethostname(), 1)])
def test_only_the_lock_of_another_machine_is_waited_for(tmp_path, monkeypatch, host, tries):
    answers = iter([f"process 7 on {host}", f"process 7 on {host}", None])
    monkeypatch.setattr(lock.OutputLock, "acquire", lambda self: next(answers))
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: None)
    waited = lock.OutputLock(tmp_path).wait()
    assert (waited is None, 3 - len([*answers])) == (tries == 3, tries)


@pytest.mark.parametrize(
    ("other_saves", "other_has_this_folder", "words"),
    [
        (True, True, ".*/out' of process 0 on .* is also that of a process on b, and with save_on_each_node=True"),
        (True, False, None),  # each machine a folder of its own
        (False, True, None),
        (False, False, "elsewhere' of process 1 on b is another folder than .*/out' of process 0 on .* no checkpoint"),
    ],
)
def test_processes_must_see_one_that_saves(tmp_path, monkeypatch, other_saves, other_has_this_folder, words):
    """Process 0 is this one, process 1 is on another machine."""
    folder = tmp_path / "out"
    folder.mkdir()
    if other_saves and other_has_this_folder:
        (folder / "token").touch()
    path = str(folder) if other_has_this_folder else "elsewhere"
    theirs = ("b", path, "token" if other_saves else None)
    calls = iter([lambda mine: theirs, lambda mine: mine if other_has_this_folder else [theirs] * other_saves])
    monkeypatch.setattr(shared_folder, "gather_object", lambda mine: [*mine, next(calls)(*mine)])
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        shared_folder.check_shared(folder, saves=True)
    assert {path.name for path in folder.iterdir()} <= {"token"}


def test_a_folder_that_cannot_be_locked_is_trained_into(tmp_path, monkeypatch):
    unlocked = lock.OutputLock(tmp_path / "missing")
    assert unlocked.acquire() is None
    unlocked.release()

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "lockf", unsupported)
    assert lock.OutputLock(tmp_path).acquire() is None
