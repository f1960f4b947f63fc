"""Print the completions of each rollout, save them in a file, and log them to trackers."""

import io
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import rich
import torch
from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import TrainingArguments

from hfppo.callbacks import PPOCallback
from hfppo.support.files import ignore_write_errors
from hfppo.support.printable import escape_control_characters
from hfppo.support.printing import show


class PrintCompletionsCallback(PPOCallback):
    """Print some completions of each rollout with their scores and advantages. `log_completions=True` adds it.

    The advantage is the mean over the tokens that the losses count, as the update gets it.

    All completions of the first process are saved in `completions/completions_<step>.parquet` in the output folder,
    with TRL's names and columns, and logged as a table to W&B and trackio where `report_to` names them.

    Args:
        num_completions: rows to print; None: all.
    """

    def __init__(self, num_completions: int | None = 8):
        self.num_completions = num_completions

    def on_rollout_end(self, args, state, control, *, rollout, transcript, **kwargs):
        if not state.is_world_process_zero:
            return
        columns = {"prompt": transcript.prompts, "completion": transcript.completions}
        for name, column in (*transcript.scores.items(), *transcript.extra.items()):
            while name in (*columns, "step", "score", "advantage"):  # "score" is the total
                name += "_"
            columns[name] = column
        counted = rollout.loss_mask
        advantages = (rollout.advantages * counted).sum(dim=1) / counted.sum(dim=1)  # NaN where none counts
        by_function = torch.tensor([*transcript.scores.values()]).reshape(-1, len(rollout))
        unscored = by_function.isnan().all(dim=0) & (len(by_function) > 0)
        scores = torch.where(unscored, math.nan, rollout.scores)
        columns |= {"score": scores.tolist(), "advantage": advantages.tolist()}
        self._print(f"step {state.global_step}", columns)
        columns = {"step": [state.global_step] * len(rollout), **columns}
        table = Dataset.from_dict({name: make_column(column) for name, column in columns.items()})
        file = Path(args.output_dir) / "completions" / f"completions_{state.global_step:05d}.parquet"
        with ignore_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            table.to_pandas().to_parquet(file)  # no temporary file, which a push in the background uploads
        log_table(args, "completions", table)

    def _print(self, title: str, columns: dict[str, list]) -> None:
        """Print the first rows, with markup as it is and control characters made visible."""
        table = Table(title=title, title_justify="left", show_lines=True)
        for name in columns:
            table.add_column(Text(escape_control_characters(name)))
        for row in list(zip(*columns.values(), strict=False))[: self.num_completions]:
            table.add_row(*(Text(escape_control_characters(cell_text(x))) for x in row))
        show(rich.print, table)


def cell_text(x: object) -> str:
    """Return a cell of the printed table: the text of a conversation, with roles if it has several messages.

    A dash shows that a function returned None.
    """
    if isinstance(x, float):
        return "–" if math.isnan(x) else f"{x:.4g}"
    if not (isinstance(x, list) and x and all(isinstance(part, dict) and "content" in part for part in x)):
        return str(x)
    if len(x) == 1:
        return message_text(x[0])
    return "\n".join(f"{message.get('role')}: {message_text(message)}" for message in x)


def message_text(message: dict[str, Any]) -> str:
    """Return a message's text, and under it its calls as Python writes them."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    text = [str(message["content"])] if message["content"] or not calls else []
    return "\n".join([*text, *map(call_text, calls)])


def call_text(call: dict[str, Any]) -> str:
    arguments = call.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{call.get('name')}({arguments})"


def log_table(args: TrainingArguments, name: str, rows: Dataset) -> None:
    """Log a table to W&B and trackio where `report_to` names them."""
    for module in {"wandb", "trackio"} & set(args.report_to):
        tracker = import_module(module)
        tracker.log({name: tracker.Table(dataframe=rows.to_pandas())})


def make_column(column: list) -> list:
    """Return the column, as text if Parquet cannot store it: mixed types, empty dictionaries, lone surrogates."""
    try:
        Dataset.from_dict({"column": column}).to_pandas().to_parquet(io.BytesIO())  # Arrow allows more than Parquet
    except (ValueError, TypeError, OverflowError, NotImplementedError):  # includes Arrow's own errors
        return [str(x).encode(errors="backslashreplace").decode() for x in column]
    return column
