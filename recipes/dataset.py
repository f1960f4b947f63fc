"""Arguments and loading of datasets and of reward functions that are given by name."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset

FILES = ("arrow", "csv", "json", "parquet", "text")  # formats that may be given in place of a dataset's name


@dataclass
class DataArguments:
    """Arguments of `datasets.load_dataset`, and the splits to use."""

    dataset_name: str = field(default="json", metadata={"help": "Id or path of a dataset, or a format such as json."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    data_files: dict | str | None = field(
        default=None, metadata={"help": 'A file, or several by split: {"train": …, "test": …}.'}
    )
    train_split: str = field(default="train", metadata={"help": "The split to train on."})
    test_split: str = field(default="test", metadata={"help": "The split to evaluate on, if there is one."})


@dataclass
class RewardArguments(DataArguments):
    """Arguments of recipes that take reward functions by name."""

    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Dotted paths of functions (trl.rewards.think_format_reward) and ids or paths of models."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # a single name in a YAML file
            self.reward_funcs = [self.reward_funcs]


def load(args: DataArguments) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on, and the rows to evaluate on or None."""
    files = args.data_files
    if args.dataset_name in FILES and not files:  # datasets would read all files of the working folder
        raise ValueError(
            f"data_files is missing, and dataset_name={args.dataset_name!r} only says what kind they are; give them, "
            "or a dataset's id or path as dataset_name"
        )
    if isinstance(files, str) and files.startswith("{"):
        files = json.loads(files)
    splits: DatasetDict = load_dataset(args.dataset_name, args.dataset_config, data_files=files)
    if args.train_split not in splits:
        raise ValueError(
            f"train_split={args.train_split!r} is not in {args.dataset_name}, which has {', '.join(splits)}"
        )
    return splits[args.train_split], splits.get(args.test_split)


def conversation(question: str, instruction: str, system_prompt: str | None) -> list[dict[str, str]]:
    """Return a prompt as messages: the question, a blank line, the instruction; after a system message, if any."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": f"{question}\n\n{instruction}".strip()}]


def import_function(name: str) -> Callable[..., Any]:
    """Import a function by its dotted path, from a package or from a file in the working folder.

    Raises:
        ValueError: there is no such function.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no function that can be imported: {error}") from error


def load_reward_func(name: str) -> Any:
    """Return the id or path of a model as it is; import a function by its dotted path."""
    is_model = Path(name).exists() or "/" in name or "." not in name
    return name if is_model else import_function(name)
