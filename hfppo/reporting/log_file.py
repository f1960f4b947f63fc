"""The log of a run on disk, and the logs of several runs side by side."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import sort_checkpoints

from hfppo.support.files import expendable, whole

LOG_FILE = "metrics.jsonl"
STATE_FILE = "trainer_state.json"
SEED = re.compile(r"[-_/. ]?seed[-_=]?\d+$")  # what the folders of one configuration differ in

Entry = dict[str, Any]


class LogFileCallback(TrainerCallback):
    """Keeps `metrics.jsonl` in the output folder: Trainer's log history, an entry per line. On by default.

    When training begins the file becomes what the log history is then, so a run that goes on from an earlier
    checkpoint has no line twice. A line that cannot be written is a warning, and comes with the next that can.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._whole = True  # whether the file has every entry

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Write what was logged up to the checkpoint; nothing, without one."""
        if state.is_world_process_zero:
            self._path = Path(args.output_dir) / LOG_FILE
            self._write(state.log_history)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Add the latest entry."""
        if self._path is None:
            return
        if not self._whole:
            self._write(state.log_history)
            return
        self._whole = False
        with expendable(self._path):
            with self._path.open("a") as file:
                file.write(line(state.log_history[-1]))
            self._whole = True

    def _write(self, history: list[Entry]) -> None:
        """Write the file anew, all or nothing."""
        self._whole = False
        with expendable(self._path):
            with whole(self._path) as aside:
                aside.write_text("".join(line(entry) for entry in history))
            self._whole = True


def line(entry: Entry) -> str:
    return json.dumps(entry, sort_keys=True) + "\n"  # as they come back from a checkpoint


def read_log(folder: str | Path) -> list[Entry]:
    """The log history of a run, also of one that is still going on: from `metrics.jsonl`, else Trainer's state file.

    Raises:
        FileNotFoundError: the folder has neither.
    """
    folder = Path(folder)
    if (folder / LOG_FILE).is_file():
        return list(whole_lines((folder / LOG_FILE).read_text()))
    for state in (folder, *map(Path, reversed(sort_checkpoints(str(folder)) if folder.is_dir() else []))):
        if (state / STATE_FILE).is_file():
            return json.loads((state / STATE_FILE).read_text())["log_history"]
    raise FileNotFoundError(
        f"{folder} has neither {LOG_FILE} nor {STATE_FILE}, nor a checkpoint with one: give the output_dir of a run"
    )


def whole_lines(text: str) -> Iterable[Entry]:
    """The entries; a last line without an end is being written, or was when the run was killed."""
    for entry in text.splitlines(keepends=True):
        if entry.endswith("\n"):
            yield json.loads(entry)


@dataclass(frozen=True)
class Series:
    """A metric over the steps at which it was logged."""

    steps: list[int]
    values: list[float]  # the mean over runs
    lowest: list[float]  # over runs
    highest: list[float]


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, which differ in the seed alone."""

    name: str
    logs: list[list[Entry]]

    @property
    def metrics(self) -> list[str]:
        """The names of all numbers, in the order in which they first appear."""
        names = (name for log in self.logs for entry in log for name, value in entry.items() if is_number(value))
        return [name for name in dict.fromkeys(names) if name not in ("step", "epoch")]

    def series(self, metric: str) -> Series:
        """The metric at the steps at which all the runs have logged it."""
        runs = [{e["step"]: e[metric] for e in log if is_number(e.get(metric))} for log in self.logs]
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        at = [[run[step] for run in runs] for step in steps]
        return Series(steps, [sum(x) / len(x) for x in at], [min(x) for x in at], [max(x) for x in at])


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def group_runs(folders: Iterable[str | Path]) -> list[Group]:
    """Runs whose folders differ in a trailing seed alone are one group: `kl0-seed0` and `kl0-seed1` are `kl0`.

    Raises:
        FileNotFoundError: none of the folders has a log; one that has none is left out otherwise.
    """
    logs: dict[str, list[list[Entry]]] = {}
    missing: list[FileNotFoundError] = []
    for folder in sorted(Path(f).absolute() for f in folders):
        try:
            log = read_log(folder)
        except FileNotFoundError as error:
            missing.append(error)
        else:
            logs.setdefault(SEED.sub("", folder.as_posix()), []).append(log)
    if not logs:
        raise missing[0] if missing else FileNotFoundError("no folder was given; give the output_dir of a run")
    above = os.path.commonpath([os.path.dirname(key) for key in logs])
    return [Group(os.path.relpath(key, above), runs) for key, runs in logs.items()]
