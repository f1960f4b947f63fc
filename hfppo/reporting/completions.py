"""Completions of each rollout: printed, kept in a file, given to trackers."""

import io
from importlib import import_module
from pathlib import Path

import rich
from datasets import Dataset
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from transformers import TrainingArguments

from hfppo.callbacks.events import PPOCallback
from hfppo.support.files import ignore_write_errors
from hfppo.support.printable import visible


class PrintCompletionsCallback(PPOCallback):
    """Prints some completions of each rollout with their scores. `log_completions=True` adds it.

    All of the first process's lie in `completions/completions_<step>.parquet` in the output folder, named and laid out
    as TRL does, and go as a table to W&B and trackio where `report_to` names them.

    Args:
        num_completions: rows to print.
    """

    def __init__(self, num_completions: int = 8):
        self.num_completions = num_completions

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state):
        if not state.is_world_process_zero:
            return
        columns = {"prompt": transcript.prompts, "completion": transcript.completions}
        for name, column in (*transcript.scores.items(), *transcript.extra.items()):
            while name in (*columns, "step", "score"):  # as the total is called in the file
                name += "_"
            columns[name] = column
        table = Table(title=f"step {state.global_step}", title_justify="left", show_lines=True)
        for name in columns:
            table.add_column(Text(visible(name)))
        for row in list(zip(*columns.values(), strict=False))[: self.num_completions]:
            table.add_row(*(Text(f"{x:.4g}" if isinstance(x, float) else visible(str(x))) for x in row))
        with tqdm.external_write_mode():  # the bar makes room
            rich.print(table)
        scores = {"score": rollout.scores.tolist()}
        self._save(args, {"step": [state.global_step] * len(rollout)} | columns | scores)

    def _save(self, args: TrainingArguments, columns: dict[str, list]) -> None:
        """Write the table into the output folder, and log it."""
        everything = Dataset.from_dict({name: of_one_type(column) for name, column in columns.items()})
        file = Path(args.output_dir) / "completions" / f"completions_{columns['step'][0]:05d}.parquet"
        with ignore_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                everything.to_pandas().to_parquet(file)
            except OSError:
                file.unlink(missing_ok=True)  # half of a table is none
                raise
        log_table(args, "completions", everything)


def log_table(args: TrainingArguments, name: str, rows: Dataset) -> None:
    """Give a table to the trackers that Trainer reports to and that take tables, W&B and trackio."""
    for module in {"wandb", "trackio"} & set(args.report_to):
        tracker = import_module(module)
        tracker.log({name: tracker.Table(dataframe=rows.to_pandas())})


def of_one_type(column: list) -> list:
    """The column, as text if a table cannot hold it: values of several types, empty dictionaries, half characters."""
    try:
        Dataset.from_dict({"column": column}).to_pandas().to_parquet(io.BytesIO())  # Arrow holds more than its file
    except (ValueError, TypeError, OverflowError, NotImplementedError):  # Arrow's own are some of these
        return [str(x).encode(errors="backslashreplace").decode() for x in column]
    return column
