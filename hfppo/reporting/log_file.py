"""Write the log of a run to disk, in `metrics.jsonl`."""

import json
from pathlib import Path

from transformers import TrainerCallback

from hfppo.support.files import ignore_write_errors, write_atomically

LOG_FILE = "metrics.jsonl"


class LogFileCallback(TrainerCallback):
    """Keep `metrics.jsonl` in the output folder: Trainer's log history, an entry per line. On by default.

    When training begins, the file is rewritten from the log history, so a run resumed from an earlier checkpoint has
    no entry twice. An entry that cannot be written is a warning, and is written together with the next one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None  # None before training and on other processes
        self._complete = True  # whether the file has every entry so far

    def on_train_begin(self, args, state, control, **kwargs):
        """Write the entries up to the checkpoint that is resumed; in a new run, empty an earlier run's file."""
        if state.is_world_process_zero:
            self._path = Path(args.output_dir) / LOG_FILE
            if state.log_history or self._path.exists():
                self._write(self._path, state.log_history, append=False)

    def on_log(self, args, state, control, **kwargs):
        """Append the latest entry; write all of them if an earlier one is missing."""
        if self._path is not None:
            entries = state.log_history[-1:] if self._complete else state.log_history
            self._write(self._path, entries, append=self._complete)

    def _write(self, path: Path, entries: list[dict[str, float]], append: bool) -> None:
        """Append entries to the file, or replace it atomically."""
        text = "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries)  # `trainer_state.json` sorts too
        self._complete = False
        with ignore_write_errors(path):
            if append:
                with path.open("a") as file:
                    file.write(text)
            else:
                with write_atomically(path) as temporary:
                    temporary.write_text(text)
            self._complete = True
