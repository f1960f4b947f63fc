"""What a run shows of how far it is: on a terminal, in a log file, after a resume."""

import io
import re
from types import SimpleNamespace

import pytest
from conftest import count_digits
from transformers import PrinterCallback, ProgressCallback

from hfppo.reporting import progress
from hfppo.reporting.progress import RunProgress, clock, seconds_left, short_line

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
    """Nothing is left out because it came too soon after what was drawn before."""
    monkeypatch.setattr(progress, "STEP_REDRAWN", 0.0)


def of(trainer) -> RunProgress:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback))


def test_it_takes_the_place_of_trainers_bar(make_trainer):
    kinds = [type(c) for c in make_trainer({"disable_tqdm": False}).callback_handler.callbacks]
    assert RunProgress in kinds
    assert ProgressCallback not in kinds


def test_disable_tqdm_and_quiet_logs_show_no_bar(make_trainer, terminal):
    trainer = make_trainer({"disable_tqdm": True, "max_steps": 2})
    trainer.train()
    assert any(isinstance(c, PrinterCallback) for c in trainer.callback_handler.callbacks)
    assert "step" not in terminal.getvalue()


def test_the_bar_ends_at_the_last_step_and_says_where_the_time_went(make_trainer, terminal, every_step):
    trainer = make_trainer(FOUR_STEPS)
    trainer.train()
    shown = terminal.getvalue()
    assert [f"step {n}/4" in shown for n in range(1, 5)] == [True] * 4
    assert re.search(r"4 steps in .* s: 1 rollouts .*generation .* rewards .* passes .* updates", shown)
    assert shown.count("\n") == shown.rstrip().count("\n") + 1  # the prompt comes on a line of its own


def test_a_resumed_bar_starts_where_the_run_is(make_trainer, terminal, every_step):
    make_trainer({**FOUR_STEPS, "save_strategy": "steps", "save_steps": 2}).train()
    terminal.truncate(0)
    resumed = make_trainer({**FOUR_STEPS, "max_steps": 8})
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    steps = [int(n) for n in re.findall(r"step (\d)/8", terminal.getvalue())]
    assert min(steps) == 2
    assert max(steps) == 8
    assert "6 steps in" in terminal.getvalue()


def test_a_log_file_gets_plain_lines(make_trainer, capfd, every_step, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    make_trainer(FOUR_STEPS).train()
    out, err = capfd.readouterr()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out + err)
    assert "step 2/4; " in err
    assert "about 00:00 left" in err
    assert out.count("'policy/ratio_max': ") == 4  # the whole log, as Trainer prints it


def test_a_log_file_is_quiet_between_two_lines(make_trainer, capfd):
    make_trainer(FOUR_STEPS).train()
    assert "left" not in capfd.readouterr().err


def test_a_long_phase_shows_on_a_terminal_and_in_a_log_file(monkeypatch, make_trainer, terminal):
    """The phase is held up until what is to be seen was seen."""
    monkeypatch.setattr(progress, "REDRAWN", 0.001)
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    seen = []

    def patient(completions, **kwargs):
        for _ in range(5000):
            if "  rewards [" in terminal.getvalue():
                break
            progress.time.sleep(0.001)
        seen.append("  rewards [" in terminal.getvalue())
        return count_digits(completions)

    make_trainer({**FOUR_STEPS, "max_steps": 1}, reward_funcs=patient).train()
    assert seen == [True]


def test_the_sampler_tells_how_much_is_done(make_trainer):
    trainer = make_trainer({"local_rollout_forward_batch_size": 5})  # batches of 5 and 3
    shares = []
    trainer.collector.sampler.on_progress = shares.append
    rollout = trainer.rollout(["请问1+1=？"] * 8)
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(5 / 8 / 6)  # the first of 6 tokens of the first batch
    assert shares[-1] <= 1.0
    if rollout.truncated[5:].any():
        assert shares[-1] == 1.0


def test_no_thread_outlives_its_rollout_even_if_a_reward_function_fails(make_trainer, terminal):
    def fails(completions, **kwargs):
        raise RuntimeError("mine")

    trainer = make_trainer(FOUR_STEPS, reward_funcs=fails)
    before = progress.threading.active_count()
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    assert progress.threading.active_count() == before
    assert of(trainer)._phases == []


@pytest.mark.parametrize(
    ("steps", "current", "wanted"),
    [
        (8, 0.0, 8 * 2 + 2 * 10),  # between two rollouts: both are to come
        (8, 4.0, 8 * 2 + 2 * 10 - 4),  # 4 seconds into the first of them
        (8, 60.0, 8 * 2 + 10),  # it takes longer than those before
        (7, 0.0, 7 * 2 + 10),  # its first step is done
        (0, 0.0, 0),
    ],
)
def test_the_estimate_counts_rollouts_and_steps_apart(steps, current, wanted):
    """A step takes 2 seconds, a rollout 10, and 4 steps follow a rollout."""
    done = {"steps_done": 4, "steps_seconds": 8.0, "rollouts_done": 1, "rollouts_seconds": 10.0}
    assert seconds_left(steps=steps, current=current, updates_per_rollout=4, **done) == wanted


def test_there_is_no_estimate_before_the_first_step():
    rollout = {"rollouts_done": 1, "rollouts_seconds": 9.0, "current": 0.0}
    assert seconds_left(steps=4, steps_done=0, steps_seconds=0.0, updates_per_rollout=4, **rollout) is None


def test_short_lines():
    assert short_line(7, {"reward": 0.51234, "kl": 0.1, "policy/clip_frac": 0.021, "x": 3}) == (
        "step 7  reward 0.512  KL 0.1000  clipped 2.1%"
    )
    assert [clock(s) for s in (0, 61.9, 3601)] == ["00:00", "01:01", "1:00:01"]


def test_the_estimate_of_a_resumed_run_counts_its_own_steps(make_trainer):
    shown = RunProgress(updates_per_rollout=4)
    shown._first, shown._step, shown._max_steps, shown._began = 100, 104, 108, 0.0
    shown.seconds["rollout"], shown.rollouts = 10.0, 1
    assert shown._seconds_left(18.0) == 4 * 2 + 10
    assert "1 rollouts 10.0 s (), updates and all else 8.0 s" in shown._summary(18.0)
