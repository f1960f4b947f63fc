"""Check, render and tokenize prompts, and order them without saved state."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, LargeList, Value
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hfppo.data import chat_template
from hfppo.data.chat_template import TEMPLATE_COLUMNS, reads_time, render_all
from hfppo.state import ORDER_STREAM, stream_seed

logger = logging.getLogger(__name__)

# What reward functions are called with beside the dataset's columns.
RESERVED_COLUMNS = {"prompts", "completions", "trainer_state", "log_extra", "log_metric"}

EMPTY_PROMPT = [{"role": "user", "content": ""}]  # of a row without one, which an environment completes

TABLES = ("arrow", "pandas", "polars")  # formats whose rows are tables

ROWS_AT_ONCE = 1000  # are read and tokenized; a fast tokenizer shares them out among its threads
STORED_FROM = 10_000  # rows, which take about a second


@dataclass(frozen=True)
class Prompts:
    """The rows of a dataset as prompts.

    `rows` keeps the dataset's columns, "prompt" among them, for the reward functions; `ids[i]` are the token ids of
    row i, in one Arrow array: lists of Python's integers would take ten times the memory; `conversational` says
    whether the prompts are lists of messages, `dated` whether their text may depend on the date.
    """

    rows: Dataset
    ids: pa.LargeListArray
    conversational: bool
    dated: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], list[int]]:
        return self.rows[index], self.ids[index].as_py()

    @property
    def head(self) -> "Prompts":
        """The prompts that are known before the run: all."""
        return self

    @property
    def tokens(self) -> np.ndarray:
        """(N,) int32, the token ids of all prompts, one prompt after the other."""
        return self.ids.values.to_numpy()

    @property
    def ends(self) -> np.ndarray:
        """(B,) int64, where in `tokens` each prompt ends, exclusive."""
        return self.ids.offsets.to_numpy()[1:]

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64, the number of tokens of each prompt."""
        return np.diff(self.ids.offsets.to_numpy())

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return int(self.lengths.max(initial=0))

    def digest(self) -> str:
        """Return a hash of all token ids and of where the prompts end."""
        hashed = hashlib.sha256()
        hashed.update(self.ends.astype("<i8", copy=False).data)
        hashed.update(self.tokens.astype("<i4", copy=False).data)
        return hashed.hexdigest()

    def at(self, positions: range, seed: int) -> list[tuple[dict[str, Any], list[int]]]:
        """Return rows and token ids at positions of the endless stream of shuffled epochs."""
        return [self[index] for index in prompt_indices(positions, len(self), seed)]


@dataclass(frozen=True)
class Row:
    """One completion to be made: a dataset row, its prompt's token ids, its group and its seeds."""

    columns: dict[str, Any]
    prompt_ids: list[int]
    number: int  # among all completions of the run, or of the evaluation
    group: int  # equal for the completions of one prompt
    seed: int
    environment_seed: int = 0  # 32 bits; equal within a group


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str = "train_dataset",
    may_be_empty: bool = False,
    tools: Sequence[list[dict[str, Any]]] | None = None,
    completed: bool = False,
) -> Prompts:
    """Check and tokenize a dataset with a "prompt" column of text or of messages.

    Args:
        dataset: other columns are kept for the reward functions.
        chat_template_kwargs: of all prompts, for `hfppo.data.chat_template.apply_chat_template`.
        max_length: tokens; longer prompts are dropped.
        name: the dataset's name in errors.
        may_be_empty: allow that no prompt is short enough.
        tools: JSON schemas of the tools that each row's prompt shows; None: those of its column "tools".
        completed: whether an environment adds its text to each prompt, which may have no tokens before.
    Raises:
        TypeError: not a `datasets.Dataset`.
        ValueError: no rows, no "prompt" column, a prompt of an unknown type, one that the tokenizer cannot render, or
            none that is short enough.
    """
    check_columns(dataset, name)
    dataset = with_plain_prompts(dataset)
    conversational = isinstance(dataset["prompt"][0], list)
    if tools is not None and not conversational:
        raise ValueError(
            f"{name} has prompts of text, and tools and environments need conversations; write each as "
            "[{'role': 'user', 'content': ...}]"
        )
    options = dict(chat_template_kwargs or {})
    of_rows = "chat_template_kwargs" in dataset.column_names  # which may hold a template
    if not (dated := conversational and (of_rows or reads_time(tokenizer, options))):
        options.pop("strftime_now", None)  # stored ids are found on other days too
    tokenization = PromptTokenizer(tokenizer, conversational, options, name, completed)
    prompts = Prompts(dataset, tokenization.tokenize(dataset, tools), conversational, dated)
    if max_length is None or prompts.longest <= max_length:
        return prompts
    short = np.flatnonzero(prompts.lengths <= max_length)
    number = f"{len(prompts) - len(short)} of {len(prompts)} prompts in {name} are longer than"
    if not (len(short) or may_be_empty):
        raise ValueError(f"{number} max_prompt_length={max_length} tokens: none is left; raise it, or shorten them")
    logger.warning("%s max_prompt_length=%s tokens and are dropped", number, max_length)
    return replace(prompts, rows=dataset.select(short), ids=prompts.ids.take(pa.array(short)))


def check_columns(dataset: Dataset, name: str) -> None:
    """Refuse anything but a dataset with rows and a "prompt" column, and without reserved columns."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name} must be a datasets.Dataset, got {type(dataset).__name__}; take one split of several, or make one "
            "with Dataset.from_list([{'prompt': ...}])"
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows; give it at least one prompt")
    if "prompt" not in (columns := visible_columns(dataset)):
        raise ValueError(
            f"{name} has no 'prompt' column, only {', '.join(columns)}; use dataset.rename_column('…', 'prompt')"
        )
    if shadowed := sorted(RESERVED_COLUMNS & set(dataset.column_names)):
        raise ValueError(
            f"{name} has columns named {', '.join(shadowed)}, which reward functions get from the trainer; rename them"
        )


def visible_columns(dataset: Dataset) -> list[str]:
    """Return the columns of a row; a format may leave some out."""
    form = dataset.format
    return dataset.column_names if form["output_all_columns"] else form["columns"]


def with_plain_prompts(dataset: Dataset) -> Dataset:
    """Return a dataset whose prompts are text, lists and dictionaries, whatever its format.

    Other columns stay arrays or tensors; a table's rows become plain values.
    """
    form = dataset.format
    if form["type"] in (None, "custom"):
        return dataset
    visible = dataset.select_columns(visible_columns(dataset))
    arrays = [column for column in form["columns"] if column not in ("prompt", *TEMPLATE_COLUMNS)]
    if form["type"] in TABLES or not arrays:
        return visible.with_format(None)
    return visible.with_format(form["type"], arrays, output_all_columns=True, **form["format_kwargs"])


def dataset_of(prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Dataset:
    """Make a dataset of prompts and their columns.

    Raises:
        ValueError: a single prompt, a column of prompts, or columns of different lengths.
    """
    if isinstance(prompts, str) or any(map(is_message, prompts)):
        raise ValueError(f"prompts={prompts!r} must be a list of prompts, and is a single one; put it into a list")
    if "prompt" in columns:
        raise ValueError("columns have the name 'prompt', which the prompts have; rename it")
    return Dataset.from_dict({"prompt": list(prompts), **columns})


def datasets_by_name(dataset: Dataset | dict[str, Dataset] | None) -> dict[str | None, Dataset]:
    """Return datasets by name; a single one has the name None.

    Raises:
        TypeError: a name is no text.
    """
    if dataset is None:
        return {}
    if not isinstance(dataset, dict):
        return {None: dataset}
    if unnamed := [name for name in dataset if not isinstance(name, str)]:
        raise TypeError(
            f"eval_dataset names a dataset by {unnamed[0]!r}, a {type(unnamed[0]).__name__}; name each by text"
        )
    return dict(dataset)


def check_kinds(prompts: list[Any], first: int, conversational: bool, name: str) -> None:
    """Refuse a prompt that is not of the dataset's kind, text or messages; the error names its row.

    Args:
        first: the row of the first prompt.
    """
    for row, prompt in enumerate(prompts, first):
        if not (prompt and all(map(is_message, prompt)) if conversational else isinstance(prompt, str)):
            raise ValueError(
                f"{name} row {row}: prompt={prompt!r} is neither text nor a list of messages like "
                "[{'role': 'user', 'content': ...}], or not of the kind of row 0; use one kind"
            )


def is_message(message: Any) -> bool:
    """Return whether it is a message: a role with text, parts, or tool calls."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or bool(message.get("tool_calls")))
    )


def hash_code() -> str:
    """Return a hash of the code that makes token ids."""
    files = (Path(__file__), Path(chat_template.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@dataclass(frozen=True)
class PromptTokenizer:
    """Tokenizes the prompts of a dataset, which errors call `name`."""

    tokenizer: PreTrainedTokenizerBase
    conversational: bool
    chat_template_kwargs: Mapping[str, Any]
    name: str
    completed: bool = False  # a prompt may have no tokens before an environment completes it
    code: str = hash_code()  # ids stored by other code are not found

    def tokenize(self, dataset: Dataset, tools: Sequence[list[dict[str, Any]]] | None) -> pa.LargeListArray:
        """Return the token ids of all rows; those of a large dataset on disk are stored beside it, and found again.

        Args:
            tools: JSON schemas for each row in place of its column "tools".
        Raises:
            ValueError: names the row that has no tokens.
        """
        own = [column for column in TEMPLATE_COLUMNS if self.conversational and column in dataset.column_names]
        if is_stored(dataset) and tools is None:
            with suppress(OSError):  # where nothing can be written, every start tokenizes
                stored = dataset.with_format(None).select_columns(["prompt", *own])
                stored = stored.map(
                    self,
                    with_indices=True,
                    batched=True,
                    batch_size=ROWS_AT_ONCE,
                    remove_columns=stored.column_names,
                    features=Features({"ids": LargeList(Value("int32"))}),
                    desc=f"Tokenizing {self.name}",
                )
                return stored.data.column("ids").combine_chunks()
        chunks = []
        for rows in np.array_split(np.arange(len(dataset)), -(-len(dataset) // ROWS_AT_ONCE)):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            batch = {column: list(dataset[column][part]) for column in ("prompt", *own)}
            if tools is not None:
                given = batch.get("tools", [None] * len(rows))
                batch["tools"] = [schemas or shown for schemas, shown in zip(tools[part], given, strict=True)]
            chunks.append(pa.array(self(batch, rows.tolist())["ids"], pa.large_list(pa.int32())))
        return pa.concat_arrays(chunks)

    def __call__(self, batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[list[int]]]:
        """Return the token ids of consecutive rows as a column, as `Dataset.map` wants it."""
        prompts = batch["prompt"]
        check_kinds(prompts, rows[0], self.conversational, self.name)
        columns = [batch.get(column, [None] * len(prompts)) for column in TEMPLATE_COLUMNS]
        ids = self.token_ids(prompts, list(zip(*columns, strict=True)), rows[0])
        for row, prompt, tokens in zip(rows, prompts, ids, strict=True):
            if not (tokens or self.completed):
                raise ValueError(f"{self.name} row {row}: the prompt {prompt!r} has no tokens; remove the row")
        return {"ids": ids}

    def token_ids(self, prompts: list[Any], options: list[tuple[Any, ...]], first: int) -> list[list[int]]:
        """Tokenize prompts at once, or one by one if that fails, so that the error names the row.

        Args:
            options: the values of each row in `TEMPLATE_COLUMNS`.
            first: the row of the first prompt.
        """
        try:
            if self.conversational:
                return render_all(prompts, options, self.tokenizer, self.chat_template_kwargs)
            # Lists of ones and zeros would cost a third of the time that tokenizing takes; some tokenizers know one.
            unwanted = {"token_type_ids", "attention_mask"} & set(self.tokenizer.model_input_names)
            return self.tokenizer(prompts, **{f"return_{name}": False for name in unwanted})["input_ids"]
        except (TemplateError, TypeError, ValueError) as error:
            if len(prompts) == 1:
                raise ValueError(
                    f"{self.name} row {first}: the tokenizer cannot render {prompts[0]!r} ({error}); correct the row, "
                    "or the chat template"
                ) from error
        return [
            self.token_ids([prompt], [given], row)[0]
            for row, (prompt, given) in enumerate(zip(prompts, options, strict=True), first)
        ]


def is_stored(dataset: Any) -> bool:
    """Return whether the token ids of a dataset are stored: it is large, lies on disk, and has no transform."""
    on_disk = isinstance(dataset, Dataset) and dataset.cache_files and dataset.format["type"] != "custom"
    return bool(on_disk) and len(dataset) >= STORED_FROM


def prompt_indices(positions: range, num_prompts: int, seed: int) -> list[int]:
    """Return the indices of the prompts at positions of the endless stream of shuffled epochs.

    Every epoch is a new permutation, and a rollout may span two of them: no prompt is left out, and the order follows
    from (seed, position) alone.
    """
    orders = {}
    for epoch in {position // num_prompts for position in positions}:
        generator = torch.Generator().manual_seed(stream_seed(seed, ORDER_STREAM, epoch))
        orders[epoch] = torch.randperm(num_prompts, generator=generator).tolist()
    return [orders[position // num_prompts][position % num_prompts] for position in positions]


def pad_left(sequences: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (B, P) token ids padded on the left, and a (B, P) bool mask, True on real tokens."""
    rows = [torch.tensor(tokens) for tokens in sequences]
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side="left")
    return ids, torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
