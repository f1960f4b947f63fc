"""Write the log of a run to disk, in `metrics.jsonl`."""

import json
from pathlib import Path

from transformers import TrainerCallback

from hfppo.support.files import ignore_write_errors, write_atomically
from hfppo.support.log_entries import plain_entry

LOG_FILE = "metrics.jsonl"


class LogFileCallback(TrainerCallback):
    """Keep `metrics.jsonl` in the output folder: Trainer's log history, an entry per line. On by default.

    When training begins, the file is rewritten from the log history, so a run resumed from an earlier checkpoint has
    no entry twice. An entry that cannot be written is a warning, and is written together with the next one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None  # None before training and on other processes
        self._num_written = 0  # entries of the log history; 0 also after an error, which may have cut a line

    def on_train_begin(self, args, state, control, **kwargs):
        """Write the entries up to the checkpoint that is resumed; in a new run, empty an earlier run's file."""
        if state.is_world_process_zero:
            self._path = Path(args.output_dir) / LOG_FILE
            if state.log_history or self._path.exists():
                self._num_written = 0
                self._write(self._path, state.log_history)

    def on_log(self, args, state, control, **kwargs):
        """Append the entries that the file lacks."""
        if self._path is not None:
            self._write(self._path, state.log_history)

    def _write(self, path: Path, history: list[dict[str, float]]) -> None:
        """Append to the file, or replace it atomically where it has no entry of this history."""
        written, self._num_written = self._num_written, 0
        lines = [json.dumps(plain_entry(entry), sort_keys=True) + "\n" for entry in history[written:]]
        with ignore_write_errors(path):
            if written:
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(lines)
            else:
                write_atomically(path, "".join(lines))
            self._num_written = len(history)
