"""What a run shows of how far it is: on a terminal, in a log file, after a resume."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from trl import RichProgressCallback

from hfppo.reporting import progress
from hfppo.reporting.progress import RunProgress

FOUR_STEPS = {"disable_tqdm": False, "max_steps": 4}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))  # pytest sets the real one anew
    return made


@pytest.fixture
def every_step(monkeypatch):
    """Draw each step, however soon it comes after the one before."""

    class Eager(progress.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, mininterval=0.0)

    monkeypatch.setattr(progress, "tqdm", Eager)


class MyBar(ProgressCallback):
    pass


BARS = {RunProgress, ProgressCallback, RichProgressCallback, MyBar, PrinterCallback}


@pytest.mark.parametrize(
    ("callbacks", "disabled", "shown"),
    [
        ([], False, RunProgress),
        ([], True, PrinterCallback),
        ([RichProgressCallback], False, RichProgressCallback),
        ([MyBar()], False, MyBar),
    ],
)
def test_there_is_one_bar_and_a_users_own_comes_first(make_trainer, callbacks, disabled, shown):
    trainer = make_trainer({"disable_tqdm": disabled}, callbacks=callbacks)
    assert [type(c) for c in trainer.callback_handler.callbacks if type(c) in BARS] == [shown]


def test_a_terminal_gets_a_bar_up_to_the_last_step_and_a_line_per_log(make_trainer, terminal, every_step, capsys):
    make_trainer(FOUR_STEPS).train()
    shown = terminal.getvalue()
    assert [f"step {n}/4" in shown for n in range(1, 5)] == [True] * 4
    assert shown.endswith("\n"), "the prompt comes on a line of its own"
    assert re.search(r", rollout generation [1-9]\d*% \[", shown), "how much the sampler has done"
    for phase in ("generation", "passes", "rewards"):
        assert f", rollout {phase}" in shown
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2", "step 3", "step 4"]
    assert re.fullmatch(r"step 1  reward 0\.\d{3}  KL -?0\.0000  .*clipped 0\.0%  explained .*", lines[0])


def test_a_resumed_run_says_first_where_it_begins(make_trainer, terminal, every_step):
    """With a bar and without one. A rollout has 4 steps."""
    config = {"disable_tqdm": False, "max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    make_trainer(config).train()
    assert "resumed" not in terminal.getvalue()
    for step, rollout, disabled in ((2, 1, False), (4, 2, True)):
        terminal.truncate(0)
        terminal.seek(0)
        resumed = make_trainer(config | {"max_steps": 6, "disable_tqdm": disabled, "save_strategy": "no"})
        checkpoint = f"{resumed.args.output_dir}/checkpoint-{step}"
        resumed.train(resume_from_checkpoint=checkpoint)
        first, *others = terminal.getvalue().splitlines()
        assert first == f"resumed from {checkpoint}, rollout {rollout}, step {step} of 6"
        assert "resumed" not in "".join(others)
        steps = [int(n) for n in re.findall(r"step (\d)/6", terminal.getvalue())]
        assert [min(steps, default=None), max(steps, default=None)] == ([None, None] if disabled else [2, 6])


def test_a_log_file_gets_plain_lines(make_trainer, capfd, monkeypatch):
    make_trainer({**FOUR_STEPS, "max_steps": 1}).train()
    sizes, *others = capfd.readouterr().err.splitlines()
    assert sizes == "1 rollout of 8 completions (8 per process), 4 optimizer steps each"
    assert "step 1" not in "".join(others), "quiet for 30 seconds"
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    make_trainer({**FOUR_STEPS, "max_steps": 5}).train()  # the second rollout is cut
    out, err = capfd.readouterr()
    assert err.startswith("2 rollouts of 8 completions")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out + err)
    assert "step 0/5, rollout rewards [00:00<?]" in err
    assert re.search(r"step 2/5 \[00:\d\d<00:\d\d\]", err)
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == [f"step {n}" for n in range(1, 6)]
    assert re.fullmatch(r"step 1  reward \S+  KL \S+ .* length 6\.0 .* time \d+\.\d s", lines[0])
    assert "policy/ratio_max" not in out, "the rest of the log is in metrics.jsonl"
    assert "train_runtime" in out


def test_the_line_has_no_penalty_of_zero_and_the_time_that_passes():
    log = {"reward": 1.0, "kl_coef": 0.0, "time/rollout": 5.0, "time/passes": 1.0, "time/update": 2.0}
    assert progress.short_cells(log) == {"reward": "1.000", "time": "7.0 s"}
    assert progress.short_cells({**log, "kl_coef": 0.05})["β"] == "0.05"
    assert progress.short_cells({**log, "time/candidates": 0.5})["time"] == "7.5 s"
    waited = {**log, "time/trainer_waited": 0.5}  # the rest passed in the update
    assert progress.short_cells(waited)["time"] == "3.5 s"


@pytest.mark.parametrize(("given", "rows"), [(None, "as free memory allows"), (32, "32")])
def test_a_run_on_a_gpu_begins_with_what_followed_from_it(given, rows):
    chosen = {"activation_checkpointing": True, "gradient_checkpointing": True, "mixed_precision": "bf16"}
    sizes = {"rollout_size_per_process": 12, "world_size": 8, "updates_per_rollout": 4}
    args = SimpleNamespace(device=torch.device("cuda"), local_rollout_forward_batch_size=given, **chosen, **sizes)
    assert progress.describe_rollouts(args, TrainerState(max_steps=4)).startswith("1 rollout of 96 completions")
    assert progress.describe_rollouts(args, TrainerState(max_steps=5)).splitlines() == [
        "2 rollouts of 96 completions (12 per process), 4 optimizer steps each",
        f"autocast: bf16, activation_checkpointing: True, rows sampled at once: {rows}",
    ]


def test_other_processes_print_nothing(make_trainer, terminal, capsys):
    class Second(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            state.is_world_process_zero = False

    trainer = make_trainer({**FOUR_STEPS, "max_steps": 1})
    trainer.callback_handler.callbacks.insert(0, Second())
    trainer.train()
    assert terminal.getvalue() == ""
    assert "step" not in capsys.readouterr().out
