"""What is written beside a run ends none: a full disk and folders in the way, for each file in turn."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.testing import assert_close
from transformers import TrainerCallback

from helpers.runs import final_state, read_log
from hfppo import TokenTraceCallback
from hfppo.support.files import write_atomically

CONFIG = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "log_completions": True}  # 3 rollouts of 4 steps

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is full by itself")


class FullDisk(TrainerCallback):
    """The log finds the disk full from step 4 to step 8."""

    def on_step_begin(self, args, state, control, **kwargs):
        log = Path(args.output_dir) / "metrics.jsonl"
        if state.global_step == 4:
            log.unlink()
        for file in (log, log.with_name("_metrics.jsonl")):
            if state.global_step == 4:
                file.symlink_to("/dev/full")
            if state.global_step == 8 and file.is_symlink():
                file.unlink()


@pytest.mark.usefixtures("run_page")
def test_files_that_cannot_be_written_are_warned_of(make_trainer, tmp_path, caplog):
    straight = make_trainer(CONFIG | {"output_dir": str(tmp_path / "straight")})
    straight.train()
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "_run.html").symlink_to("/dev/full")
    (folder / "_traces").touch()
    (folder / "completions").touch()
    trainer = make_trainer(CONFIG, callbacks=[FullDisk(), TokenTraceCallback(every=1)])
    trainer.train()
    assert trainer.state.global_step == 12
    files = ("metrics.jsonl", "run.html", "_traces/rollout-000001.jsonl", "completions/completions_00000.parquet")
    for file in files:
        assert f"{folder / file} could not be written; training continues" in caplog.text
    assert_close(final_state(trainer), final_state(straight), rtol=0, atol=0)
    assert read_log(folder) == trainer.state.log_history  # whole again


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch, fails):
    file = tmp_path / "page.html"
    file.write_text("before")
    if fails:
        monkeypatch.setattr("os.replace", lambda aside, _: pytest.fail(aside.name))
    with pytest.raises(pytest.fail.Exception, match=r"_page\.html") if fails else nullcontext():
        write_atomically(file, "after")  # under a name that a push does not upload
    assert file.read_text() == ("before" if fails else "after")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
