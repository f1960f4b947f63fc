"""Keep the log of a run on disk, in `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfppo.support.files import ignore_write_errors, write_atomically

LOG_FILE = "metrics.jsonl"


class LogFileCallback(TrainerCallback):
    """Keep `metrics.jsonl` in the output folder: Trainer's log history, an entry per line. On by default.

    When training begins, the file is rewritten from the log history, so a run resumed from an earlier checkpoint has
    no entry twice. An entry that cannot be written is a warning, and is written together with the next one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._complete = True  # whether the file holds every entry so far

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Write the entries up to the checkpoint that is resumed; of a new run, empty an earlier run's file."""
        if state.is_world_process_zero:
            self._path = Path(args.output_dir) / LOG_FILE
            if state.log_history or self._path.exists():
                self._rewrite(state.log_history)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Append the latest entry."""
        if self._path is None:
            return
        if not self._complete:
            self._rewrite(state.log_history)
            return
        self._complete = False
        with ignore_write_errors(self._path):
            with self._path.open("a") as file:
                file.write(format_entry(state.log_history[-1]))
            self._complete = True

    def _rewrite(self, history: list[dict[str, float]]) -> None:
        """Replace the file atomically."""
        self._complete = False
        with ignore_write_errors(self._path):
            with write_atomically(self._path) as temporary:
                temporary.write_text("".join(format_entry(entry) for entry in history))
            self._complete = True


def format_entry(entry: dict[str, float]) -> str:
    """Return a line of JSON, with sorted keys as in a checkpoint's `trainer_state.json`."""
    return json.dumps(entry, sort_keys=True) + "\n"
