"""How far a run is: a bar on a terminal, plain lines from time to time in a log file."""

import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

REDRAWN = 0.5  # seconds between two looks at a rollout that is being collected
STEP_REDRAWN = 0.1  # the least number of seconds between two drawn steps
SHOWN_AFTER = 2.0  # seconds that a phase of it lasts before it gets a bar of its own
LINE_EVERY = 30.0  # seconds between two lines where there is no terminal

# What a log line on a terminal shows: metric, name, format.
SHORT = (
    ("reward", "reward", ".3f"),
    ("kl", "KL", ".4f"),
    ("kl_coef", "β", ".3g"),
    ("completions/mean_length", "length", ".1f"),
    ("completions/truncated_frac", "cut", ".1%"),
    ("policy/entropy", "entropy", ".3f"),
    ("policy/clip_frac", "clipped", ".1%"),
    ("value/explained_variance", "explained", ".2f"),
)


class RunBar(tqdm):
    """A tqdm bar that is told the time that is left: rollouts and steps alternate, so no rate of steps tells it."""

    seconds_left: float | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """What the bar's format may name."""
        left = "?" if self.seconds_left is None else clock(self.seconds_left)
        return super().format_dict | {"left": left}


class RunProgress(ProgressCallback):
    """Shows the whole run, and within a rollout its phases; in the place of Trainer's ProgressCallback.

    The trainer says which phase of a rollout runs (`phase`) and the sampler how far it has got (`advance`). A thread
    that lives as long as the rollout is collected does the drawing, so that time goes on in what cannot be asked: a
    reward function, an engine.

    Args:
        updates_per_rollout: optimiser steps that follow a rollout.
    """

    training_bar: Any  # a `RunBar`, or None where there is no terminal or no training; upstream says None alone

    def __init__(self, updates_per_rollout: int):
        super().__init__()
        self.updates_per_rollout = updates_per_rollout
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by phase; those of "rollout" hold the others
        self.rollouts = 0  # collected since training began here
        self.phase_bar: tqdm | None = None
        self._active = False
        self._phases: list[tuple[str, float]] = []  # that run now, outermost first, and since when
        self._share = 0.0
        self._last_drawn = self._last_line = 0.0
        self._lock = threading.RLock()

    @classmethod
    def of(cls, trainer: Trainer, updates_per_rollout: int) -> "RunProgress":
        """Takes the place of the trainer's own bar; where there is none, as with disable_tqdm, it stays silent."""
        made = cls(updates_per_rollout)
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(made)
        return made

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Start where the run is."""
        self._active = state.is_world_process_zero
        self.seconds.clear()
        self.rollouts = 0
        self._first = self._step = state.global_step
        self._max_steps = state.max_steps
        self._began = time.monotonic()
        self._last_line = time.monotonic()
        if self._active and sys.stderr.isatty():
            self.training_bar = RunBar(
                total=state.max_steps,
                initial=state.global_step,
                dynamic_ncols=True,
                file=sys.stderr,
                bar_format="{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix} [{elapsed}<{left}]",
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Move on by a step."""
        if self._active:
            self._step = state.global_step
            if time.monotonic() - self._last_drawn >= STEP_REDRAWN:
                self._draw()

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Trainer's bar for evaluations, on a terminal."""
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """One line on a terminal; elsewhere, and for what is no log of training steps, all numbers as Trainer does."""
        if not state.is_world_process_zero:
            return
        if self.training_bar is not None and "loss" in logs:
            with self._lock:
                self.training_bar.write(short_line(state.global_step, logs))
        elif self.training_bar is not None:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif self._active:
            shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in logs.items() if k != "total_flos"}
            print(shown, flush=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Say where the time went."""
        if not self._active:
            return
        self._draw()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None
        self._active = False
        print(self._summary(time.monotonic() - self._began), file=sys.stderr)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, a part of a rollout is going on; the outermost is the rollout itself.

        Args:
            name: the metric that measures it, "time/generation".
        """
        if not self._active:
            yield
            return
        name = name.removeprefix("time/")
        start = time.monotonic()
        outermost = not self._phases
        with self._lock:
            self._close_phase_bar()  # of the phase around it
            self._phases.append((name, start))
            self._share = 0.0
        done = threading.Event()
        if outermost:
            thread = threading.Thread(target=self._keep_drawing, args=(done,), daemon=True)
            thread.start()
        try:
            yield
        finally:
            if outermost:
                done.set()
                thread.join()
                self.rollouts += 1
            with self._lock:
                self._phases.pop()
                self._share = 0.0
                self._close_phase_bar()
            self.seconds[name] += time.monotonic() - start

    def advance(self, share: float) -> None:
        """Note how much of the current phase is done, from 0 to 1."""
        self._share = share

    def _keep_drawing(self, done: threading.Event) -> None:
        while not done.wait(REDRAWN):
            self._draw()

    def _draw(self) -> None:
        """Show where the run is."""
        with self._lock:
            now = self._last_drawn = time.monotonic()
            left = self._seconds_left(now)
            if self.training_bar is not None:
                self.training_bar.seconds_left = left
                self.training_bar.n = self._step
                self.training_bar.set_postfix_str(self._doing(), refresh=False)
                self.training_bar.refresh()
                self._draw_phase(now)
            elif now - self._last_line >= LINE_EVERY:
                self._last_line = now
                print(self._line(now, left), file=sys.stderr, flush=True)

    def _doing(self) -> str:
        return (
            " ".join([f"rollout {self.rollouts + 1}", *(name for name, _ in self._phases[1:])]) if self._phases else ""
        )

    def _draw_phase(self, now: float) -> None:
        """A second bar below, for a phase that takes its time."""
        if not self._phases:
            return
        name, since = self._phases[-1]
        if now - since < SHOWN_AFTER:
            return
        if self.phase_bar is None:
            self.phase_bar = tqdm(
                total=1.0, leave=False, dynamic_ncols=True, file=sys.stderr, position=1, desc=f"  {name}"
            )
            self.phase_bar.start_t -= now - since
        known = "{percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]" if self._share else "[{elapsed}]"
        self.phase_bar.bar_format = "{desc} " + known
        self.phase_bar.n = self._share
        self.phase_bar.refresh()

    def _close_phase_bar(self) -> None:
        if self.phase_bar is not None:
            self.phase_bar.close()
            self.phase_bar = None

    def _line(self, now: float, left: float | None) -> str:
        """The same in one line of plain text."""
        parts = [f"step {self._step}/{self._max_steps}"]
        if self._phases:
            since = self._phases[-1][1]
            share = f", {self._share:.0%} done" if self._share else ""
            parts.append(f"{self._doing()} for {clock(now - since)}{share}")
        parts.append(f"{clock(now - self._began)} gone")
        if left is not None:
            parts.append(f"about {clock(left)} left")
        return "; ".join(parts)

    def _seconds_left(self, now: float) -> float | None:
        rollouts = self.seconds["rollout"]
        current = now - self._phases[0][1] if self._phases else 0.0
        return seconds_left(
            steps=self._max_steps - self._step,
            steps_done=self._step - self._first,
            steps_seconds=now - self._began - rollouts - current,
            rollouts_done=self.rollouts,
            rollouts_seconds=rollouts,
            current=current,
            updates_per_rollout=self.updates_per_rollout,
        )

    def _summary(self, total: float) -> str:
        """Seconds by phase."""
        collecting = self.seconds["rollout"]
        parts = ", ".join(f"{name} {s:.1f} s" for name, s in self.seconds.items() if name != "rollout")
        return (
            f"{self._step - self._first} steps in {total:.1f} s: {self.rollouts} rollouts {collecting:.1f} s "
            f"({parts}), updates and all else {total - collecting:.1f} s"
        )


def seconds_left(
    *,
    steps: int,
    steps_done: int,
    steps_seconds: float,
    rollouts_done: int,
    rollouts_seconds: float,
    current: float,
    updates_per_rollout: int,
) -> float | None:
    """An estimate of the end, from what a step and what a rollout took so far. None before there was a step.

    Args:
        steps: that are left.
        steps_done, rollouts_done: of this process.
        steps_seconds, rollouts_seconds: that these took.
        current: seconds since the rollout began that is being collected now; 0 if none is.
        updates_per_rollout: steps that follow a rollout.
    """
    if not steps_done:
        return None
    rollout = rollouts_seconds / rollouts_done if rollouts_done else 0.0
    rollouts = math.ceil(steps / updates_per_rollout) if current else steps // updates_per_rollout
    return steps * steps_seconds / steps_done + rollouts * rollout - min(current, rollout)


def short_line(step: int, logs: dict[str, Any]) -> str:
    """The numbers of a log that people look at, in one line."""
    shown = [f"{name} {logs[metric]:{form}}" for metric, name, form in SHORT if metric in logs]
    return "  ".join([f"step {step}", *shown])


def clock(seconds: float) -> str:
    """1:02:03, or 02:03 below an hour."""
    return str(timedelta(seconds=int(seconds))).removeprefix("0:")
