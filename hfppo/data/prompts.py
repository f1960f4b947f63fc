"""Check, render and tokenize prompts, and order them without saved state."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, LargeList, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hfppo.data.chat_template import CLOCK, TEMPLATE_COLUMNS, Schema, reads_time, render_all
from hfppo.state import ORDER_STREAM, stream_seed

logger = logging.getLogger(__name__)

Columns = dict[str, Any]  # a row of a dataset
# A row, its prompt's token ids, and the critic's prompt's if the critic has its own.
Prompt: TypeAlias = tuple[Columns, list[int]] | tuple[Columns, list[int], list[int]]

CRITIC_PROMPT = "critic_prompt"  # the column with the prompts that only the critic reads

# Arguments of reward functions that are not columns of the dataset.
RESERVED_COLUMNS = {"prompts", "completions", "trainer_state", "log_extra", "log_metric"}

EMPTY_PROMPT = [{"role": "user", "content": ""}]  # the prompt of a row without a prompt; an environment adds its text

COMPARED = 1_000  # rows that processes compare
STORED_FROM = 10_000  # rows of a dataset whose token ids are stored; tokenizing them takes about a second
VERSION = 1  # of the stored token ids; raise it when the code makes other ids


@dataclass(frozen=True)
class Prompts:
    """The rows of a dataset as prompts.

    The token ids are one Arrow array, because lists of Python's integers need ten times the memory.
    """

    rows: Dataset  # all columns, for the reward functions
    ids: pa.LargeListArray  # ids[i] are the token ids of row i
    conversational: bool  # whether the prompts are lists of messages
    critic_ids: pa.LargeListArray | None = None  # likewise of the critic's prompts; None: the critic has no own ones

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Prompt:
        ids: Any = (some[index].as_py() for some in self.arrays)
        return self.rows[index], *ids

    @property
    def head(self) -> "Prompts":
        """The prompts that are known before the run: all of them."""
        return self

    @property
    def arrays(self) -> list[pa.LargeListArray]:
        """The token ids of the prompts, and of the critic's if it has its own."""
        return [self.ids] if self.critic_ids is None else [self.ids, self.critic_ids]

    @property
    def tokens(self) -> np.ndarray:
        """(N,) int32, the token ids of all prompts, one prompt after the other."""
        return np.concatenate([ids.values.to_numpy() for ids in self.arrays])

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64, the number of tokens of each prompt, or of the critic's if that is longer."""
        return np.max([np.diff(ids.offsets.to_numpy()) for ids in self.arrays], axis=0)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return int(self.lengths.max(initial=0))

    def limited(self, max_length: int | None, name: str, may_be_empty: bool = False) -> "Prompts":
        """Return the prompts of at most `max_length` tokens; None: any number.

        Args:
            name: the dataset's name in errors.
            may_be_empty: allow that no prompt is short enough.
        Raises:
            ValueError: no prompt is short enough.
        """
        if max_length is None or self.longest <= max_length:
            return self
        short = np.flatnonzero(self.lengths <= max_length)
        which = "prompts" if self.critic_ids is None else "prompts or critic_prompts"
        number = f"{len(self) - len(short)} of {len(self)} {which} in {name} are longer than"
        if not (len(short) or may_be_empty):
            raise ValueError(
                f"{number} max_prompt_length={max_length} tokens: no prompt is left; raise it, or shorten the prompts"
            )
        logger.warning("%s max_prompt_length=%s tokens and are dropped", number, max_length)
        ids, *critic_ids = (some.take(pa.array(short)) for some in self.arrays)
        return Prompts(self.rows.select(short), ids, self.conversational, *critic_ids)

    def digest(self) -> str:
        """Return a hash of all token ids and of where the prompts end."""
        ends = np.concatenate([ids.offsets.to_numpy()[1:] for ids in self.arrays])
        hashed = hashlib.sha256(ends.astype("<i8", copy=False).data)
        hashed.update(self.tokens.astype("<i4", copy=False).data)
        return hashed.hexdigest()

    def at(self, positions: range, seed: int) -> list[Prompt]:
        """Return rows and token ids at positions of the endless stream of shuffled epochs."""
        return [self[index] for index in prompt_indices(positions, len(self), seed)]


@dataclass(frozen=True)
class Row:
    """One completion to be made: a dataset row, its prompt's token ids, its group and its seeds."""

    columns: Columns
    prompt_ids: list[int]
    critic_prompt_ids: list[int] | None = None  # None: the critic reads `prompt_ids`
    _: KW_ONLY
    number: int  # among all completions of the run, or of the evaluation
    group: int  # equal for the completions of one prompt
    seed: int
    environment_seed: int = 0  # 32 bits; equal within a group


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, object] | None = None,
    name: str = "train_dataset",
    tools: Sequence[list[Schema]] | None = None,
    completed: bool = False,
    for_critic: bool = False,
) -> Prompts:
    """Check and tokenize a dataset with a "prompt" column of text or of messages.

    Args:
        dataset: other columns are kept for the reward functions, as plain values.
        chat_template_kwargs: passed to `hfppo.data.chat_template.apply_chat_template` for every prompt.
        name: the dataset's name in errors.
        tools: JSON schemas of the tools that each row's prompt shows; None: the row's column "tools".
        completed: whether an environment adds its text to each prompt, which may have no tokens before.
        for_critic: whether the column "critic_prompt" is read, if there is one.
    Raises:
        ValueError: no rows, no "prompt" column, a prompt of an unknown type, or one that the tokenizer cannot render.
    """
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows; add at least one prompt")
    if "prompt" not in (columns := dataset.column_names):
        raise ValueError(
            f"{name} has no 'prompt' column, only {', '.join(columns)}; use dataset.rename_column('…', 'prompt')"
        )
    if not has_transform(dataset):  # it would be lost
        dataset = dataset.with_format(None)
    conversational = isinstance(dataset["prompt"][0], list)
    if tools is not None and not conversational:
        raise ValueError(
            f"{name} has text prompts, but tools and environments need conversations; write each as "
            "[{'role': 'user', 'content': ...}]"
        )
    options = dict(chat_template_kwargs or {})
    of_rows = "chat_template_kwargs" in columns  # the column may contain a chat template
    if not (conversational and (of_rows or reads_time(tokenizer, options))):
        options.pop(CLOCK, None)  # stored ids are found on other days too
    read = ["prompt", CRITIC_PROMPT] if for_critic and CRITIC_PROMPT in columns else ["prompt"]
    makers = (PromptTokenizer(tokenizer, conversational, options, name, completed, column, tools) for column in read)
    ids, *critic_ids = (maker.tokenize(dataset) for maker in makers)
    return Prompts(dataset, ids, conversational, *critic_ids)


def hash_rows(dataset: Dataset) -> str:
    """Return a hash of the first rows, without files: their paths on two hosts may differ."""
    files = [name for name, feature in dataset.features.items() if "decode=True" in repr(feature)]
    first: Any = dataset.with_format("arrow").remove_columns(files)[:COMPARED]
    return hashlib.sha256(repr(first.to_pylist()).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def dataset_of(prompts: Sequence[object] | None, columns: Mapping[str, Sequence[object]]) -> Dataset:
    """Make a dataset of prompts and their columns.

    Raises:
        ValueError: a single prompt is given, not a list.
    """
    if isinstance(prompts, str) or any(map(is_message, prompts or [])):
        raise ValueError(f"prompts={prompts!r} is a single prompt; pass a list of prompts")
    return Dataset.from_dict({**columns, **({} if prompts is None else {"prompt": list(prompts)})})


def is_message(message: object) -> bool:
    """Return whether x is a message: a role with text, parts, or tool calls."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or bool(message.get("tool_calls")))
    )


@dataclass(frozen=True)
class PromptTokenizer:
    """Tokenizes the prompts of a dataset; `name` is the dataset's name in errors."""

    tokenizer: PreTrainedTokenizerBase
    conversational: bool
    chat_template_kwargs: Mapping[str, object]
    name: str
    completed: bool = False  # a prompt may have no tokens before an environment completes it
    column: str = "prompt"  # or the critic's; a row without a prompt in it has its "prompt" there
    tools: Sequence[list[Schema]] | None = None  # JSON schemas for each row in place of its column "tools"
    version: int = VERSION  # part of the hash by which stored ids are found

    def tokenize(self, dataset: Dataset) -> pa.LargeListArray:
        """Return the token ids of all rows. Those of a large dataset on disk are stored in its cache, and read again.

        Raises:
            ValueError: a prompt is of another kind than the others, cannot be rendered, or has no tokens.
        """
        read, rows = ("prompt", self.column, *TEMPLATE_COLUMNS), dataset
        if not has_transform(dataset):  # which may read all columns
            rows = dataset.select_columns([name for name in dataset.column_names if name in read])
        if len(rows) < STORED_FROM:  # the hash of a large tokenizer takes longer
            return pa.array(self(rows[:], [*range(len(rows))])["ids"], pa.large_list(pa.int32()))
        make = partial(
            rows.map,
            self,
            with_indices=True,
            batched=True,
            remove_columns=rows.column_names,
            features=Features({"ids": LargeList(Value("int32"))}),
            desc=f"Tokenizing {self.name}",
        )
        try:
            made = make()
        except OSError:  # the cache cannot be written
            made = make(keep_in_memory=True)
        return made.data.column("ids").combine_chunks()

    def __call__(self, batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[list[int]]]:
        """Return the token ids of consecutive rows as a column, as `Dataset.map` expects."""
        columns = zip(batch[self.column], batch["prompt"], strict=True)
        batch = {**batch, "prompt": [plain if own is None else own for own, plain in columns]}
        if self.tools is not None:
            shown = batch.get("tools", [None] * len(rows))
            batch["tools"] = [self.tools[row] or own for row, own in zip(rows, shown, strict=True)]
        given = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        for row, prompt in zip(rows, batch["prompt"], strict=True):
            if not (prompt and all(map(is_message, prompt)) if self.conversational else isinstance(prompt, str)):
                raise ValueError(
                    f"{self.name} row {row}: {self.column}={prompt!r} is neither text nor a list of messages like "
                    "[{'role': 'user', 'content': ...}], or is not of row 0's kind; use text or messages in all rows"
                )
        ids = self.token_ids(given, rows[0])
        for row, prompt, tokens in zip(rows, batch["prompt"], ids, strict=True):
            if not (tokens or self.completed):
                raise ValueError(f"{self.name} row {row}: the {self.column} {prompt!r} has no tokens; remove the row")
        return {"ids": ids}

    def token_ids(self, rows: list[Columns], first: int) -> list[list[int]]:
        """Tokenize the prompts of rows at once, or one by one if that fails, so that the error names the row.

        Args:
            first: the number of the first row.
        """
        try:
            if self.conversational:
                return render_all(rows, self.tokenizer, self.chat_template_kwargs)
            return self.tokenizer([row["prompt"] for row in rows])["input_ids"]
        except (TemplateError, TypeError, ValueError) as error:
            if len(rows) == 1:
                raise ValueError(
                    f"{self.name} row {first}: the tokenizer cannot render {rows[0]['prompt']!r} ({error}); correct "
                    "the row, or the chat template"
                ) from error
        return [self.token_ids([row], number)[0] for number, row in enumerate(rows, first)]


def has_transform(dataset: Dataset) -> bool:
    """Return whether a dataset's rows are made by a function of the user, as `set_transform` sets it."""
    return dataset.format["type"] == "custom"


def prompt_indices(positions: range, num_prompts: int, seed: int) -> list[int]:
    """Return the indices of the prompts at positions of the endless stream of shuffled epochs.

    Every epoch is a new permutation, and a rollout may span two of them: no prompt is left out, and the order
    depends only on seed and position.
    """
    orders = {}
    for epoch in {position // num_prompts for position in positions}:
        generator = torch.Generator().manual_seed(stream_seed(seed, ORDER_STREAM, epoch))
        orders[epoch] = torch.randperm(num_prompts, generator=generator).tolist()
    return [orders[position // num_prompts][position % num_prompts] for position in positions]
