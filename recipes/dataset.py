"""Arguments and loading of the recipes' data."""

import json
from dataclasses import dataclass, field

from datasets import Dataset, DatasetDict, load_dataset

FILES = ("arrow", "csv", "json", "parquet", "text")  # formats that may stand for a dataset's name


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


def load(args: DataArguments) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on, and the rows to evaluate on or None."""
    files = args.data_files
    if args.dataset_name in FILES and not files:  # datasets would read whatever lies in the working folder
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
