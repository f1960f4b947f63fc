"""The page of a run: `run.html` in the output folder, one file that loads nothing else."""

import html
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers.utils import is_in_notebook

from hfppo.callbacks import PPOCallback
from hfppo.config import PPOConfig
from hfppo.reporting.card import changed_settings, installed_versions
from hfppo.reporting.health import HealthCallback
from hfppo.reporting.traces import Trace, first_traces
from hfppo.support.files import ignore_write_errors, write_atomically
from hfppo.support.log_entries import numbers_of

logger = logging.getLogger(__name__)

PAGE = "run.html"
TEMPLATE = Path(__file__).with_name("run_page.html")
DATA = re.compile(r"^const runs = (.*);$", re.MULTILINE)

MOST_POINTS = 500  # of a curve; more logs become means of neighbours
MOST_ROLLOUTS = 16  # whose completions the page has; more are thinned to every second
MOST_COMPLETIONS = 4  # of a rollout
MOST_TOKENS = 2500  # of a rollout's completions; the end of a longer one is left out
WRITE_EVERY = 5.0  # seconds
SHARE_OF_TIME = 0.01  # that writing may take


class RunPageCallback(PPOCallback):
    """Keep `run.html` in the output folder: curves, warnings, settings and completions, token by token. On by default.

    The page is written while the run goes, at most every five seconds and in at most 1 % of the run's time, and when
    training ends. A run that is resumed goes on with the completions of its page. In a notebook the page appears below
    the cell. It has the first completions of some rollouts. A push to the Hub takes them out of the page: they may be
    private. `trainer.remove_callback(RunPageCallback)` turns it off.

    Args:
        health: the callback whose warnings the page shows.
    """

    def __init__(self, health: HealthCallback | None = None):
        self.health = health or HealthCallback()
        self._traces: list[Trace] = []  # in the order of the rollouts
        self._history: list[dict[str, float]] = []  # the numbers of the logs
        self._next = 0.0  # when to write again
        self._is_public = False  # pushed
        self._display: Any = None  # in a notebook

    def on_train_begin(self, args, state, control, **kwargs):
        """Take the completions of the page that a resumed run has; a new run begins with none."""
        self._traces, self._history, self._display = [], [], None
        file = Path(args.output_dir) / PAGE
        if not (state.is_world_process_zero and state.global_step and file.is_file()):
            return
        try:
            found = [Trace(**trace) for run in read_page(file) for trace in run["traces"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read, so its completions are left out: %r", file, error)
            return
        self._traces = [trace for trace in found if trace.step < state.global_step]

    def on_rollout_end(self, args, state, control, *, rollout, ppo_state, processing_class=None, **kwargs):
        """Keep the first completions, of every rollout or of every n-th."""
        number = ppo_state.rollouts
        every = stride(number)
        self._traces = [trace for trace in self._traces if (trace.rollout - 1) % every == 0]
        if not state.is_world_process_zero or (number - 1) % every:
            return
        lengths = rollout.real.sum(dim=1).cumsum(dim=0)
        count = max(1, min(MOST_COMPLETIONS, int((lengths <= MOST_TOKENS).sum())))
        for trace in first_traces(rollout, count, processing_class, args, ppo_state, state.global_step, "rollout"):
            columns = {name: some[:MOST_TOKENS] for name, some in trace.columns.items()}
            self._traces.append(replace(trace, columns=columns))

    def on_log(self, args, state, control, **kwargs):
        """Write the page, if it is time."""
        if state.is_world_process_zero and time.monotonic() >= self._next:
            self._write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        """Write the page of the whole run."""
        if state.is_world_process_zero:
            self._write(args, state)

    def on_push_begin(self, args, state, control, **kwargs):
        """Take the completions out of the page, now and later: uploads in the background read it at any time."""
        self._is_public, file = True, Path(args.output_dir) / PAGE
        if state.is_world_process_zero and file.is_file():
            write_page(file, render_page([{**run, "traces": []} for run in read_page(file)]))

    def _write(self, args: PPOConfig, state: Any) -> None:
        began, file = time.monotonic(), Path(args.output_dir) / PAGE
        self._history += map(numbers_of, state.log_history[len(self._history) :])
        run = run_data(
            file.absolute().parent.name,
            () if self._is_public else self._traces,
            step=state.global_step,
            max_steps=state.max_steps,
            curves=shorten(curves(self._history)),
            warnings=list(self.health.found.values()),
            settings=changed_settings(args),
            versions=installed_versions(),
        )
        page = render_page([run])
        write_page(file, page)
        if is_in_notebook():
            self._show(page)
        took = time.monotonic() - began
        self._next = began + took + max(WRITE_EVERY, took / SHARE_OF_TIME)

    def _show(self, page: str) -> None:
        """Draw the page below the cell, in the place of the page before."""
        from IPython.display import HTML, display

        frame = HTML(f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 40rem; border: 0"></iframe>')
        if self._display is None:
            self._display = display(frame, display_id=True)
        else:
            self._display.update(frame)


def stride(number: int) -> int:
    """Return the power of two n such that every n-th of so many rollouts are at most `MOST_ROLLOUTS`."""
    every = 1
    while (number - 1) // every >= MOST_ROLLOUTS:
        every *= 2
    return every


def run_data(name: str, traces: Iterable[Trace], **more: Any) -> dict[str, Any]:
    """Return what the page shows of a run; without more, its traces alone."""
    empty: dict[str, Any] = {"curves": {}, "warnings": [], "settings": {}, "versions": {}}
    return {"name": name, **empty, **more, "traces": [shorten(vars(trace)) for trace in traces]}


def shorten(numbers: Any) -> Any:
    """Return plain values with five digits of each float: the page shows four decimals."""
    return json.loads(json.dumps(numbers), parse_float=lambda digits: float(f"{float(digits):.5g}"))


def curves(history: Iterable[Mapping[str, float]]) -> dict[str, list[tuple[float, float]]]:
    """Return (step, value) of each metric, as means of neighbours where there are too many logs."""
    points: dict[str, list[tuple[float, float]]] = {}
    for entry in history:
        for name in entry:
            points.setdefault(name, []).append((entry["step"], entry[name]))
    return {name: thin(some) for name, some in points.items() if name != "step"}


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` points: the last step and the mean value of as many neighbours as needed."""
    size = -(-len(points) // MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], fmean(y for _, y in group)) for group in groups]


def render_page(runs: list[dict[str, Any]]) -> str:
    """Return the page of runs, as `RunPageCallback` writes them. Texts are data, never markup."""
    data = json.dumps(runs, ensure_ascii=False).replace("<", r"\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{ runs }}", data, 1)


def write_page(file: Path, page: str) -> None:
    """Write a page atomically; an error is a warning."""
    with ignore_write_errors(file):
        write_atomically(file, page)


def read_page(file: Path) -> list[dict[str, Any]]:
    """Return the runs of a page.

    Raises:
        ValueError: the file is not such a page.
    """
    found = DATA.search(file.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{file} is not the page of a run: it has no line 'const runs = ...;'")
    return json.loads(found[1])
