"""Check, render and tokenise prompts, and order them without saved state."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from datasets import Dataset
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hfppo.seeds import ORDER_STREAM, stream_seed

logger = logging.getLogger(__name__)

# What reward functions are called with beside the dataset's columns.
RESERVED_COLUMNS = {"prompts", "completions", "trainer_state", "log_extra", "log_metric"}

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # what the chat template gets from a row beside its prompt


@dataclass(frozen=True)
class Prompts:
    """The rows of a dataset as prompts.

    `rows` keeps the dataset's columns, "prompt" among them, for the reward functions; `ids[i]` are the token ids of
    row i; `conversational` says whether the prompts are lists of messages.
    """

    rows: Dataset
    ids: list[list[int]]
    conversational: bool

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], list[int]]:
        return self.rows[index], self.ids[index]

    @property
    def head(self) -> "Prompts":
        """The prompts that are known before the run: all."""
        return self

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(map(len, self.ids), default=0)

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
    overlong: str = "drop",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str = "train_dataset",
    may_be_empty: bool = False,
    tools: Sequence[list[dict[str, Any]]] | None = None,
) -> Prompts:
    """Check and tokenise a dataset with a "prompt" column of text or of messages.

    Args:
        dataset: other columns are kept for the reward functions.
        max_length: tokens; longer prompts are dropped, or lose their beginning, as `overlong` says.
        name: the dataset's name in errors.
        may_be_empty: allow that no prompt is short enough.
        tools: JSON schemas of the tools that each row's prompt shows; None: those of its column "tools".
    Raises:
        TypeError: not a `datasets.Dataset`.
        ValueError: no rows, no "prompt" column, a prompt of an unknown type, one that the tokenizer cannot render, or
            none that is short enough.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name} must be a datasets.Dataset, got {type(dataset).__name__}; take one split of several, or make one "
            "with Dataset.from_list([{'prompt': ...}])"
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows; give it at least one prompt")
    if "prompt" not in (columns := dataset.format["columns"]):  # a format may leave columns out
        raise ValueError(
            f"{name} has no 'prompt' column, only {', '.join(columns)}; use dataset.rename_column('…', 'prompt')"
        )
    if shadowed := sorted(RESERVED_COLUMNS & set(dataset.column_names)):
        raise ValueError(
            f"{name} has columns named {', '.join(shadowed)}, which reward functions get from the trainer; rename them"
        )
    prompts = list(dataset["prompt"])
    conversational = is_conversational(prompts, name)
    own = [dataset[column] if column in dataset.column_names else repeat(None) for column in TEMPLATE_COLUMNS]
    if tools is not None:
        if not conversational:
            raise ValueError(
                f"{name} has prompts of text, and tools and environments need conversations; write each as "
                "[{'role': 'user', 'content': ...}]"
            )
        own[0] = [schemas or given for schemas, given in zip(tools, own[0], strict=False)]
    options = zip(*own, strict=False) if conversational else repeat((None, None))
    ids = token_ids(prompts, options, conversational, tokenizer, chat_template_kwargs or {}, name)
    if max_length is None or all(len(tokens) <= max_length for tokens in ids):
        return Prompts(dataset, ids, conversational)
    short = [row for row, tokens in enumerate(ids) if len(tokens) <= max_length]
    number = f"{len(ids) - len(short)} of {len(ids)} prompts in {name} are longer than max_prompt_length={max_length}"
    if overlong == "truncate":
        logger.warning("%s tokens and lose their beginning", number)
        return Prompts(dataset, [tokens[-max_length:] for tokens in ids], conversational)
    if not (short or may_be_empty):
        raise ValueError(f"{number} tokens: none is left; raise it, or set overlong_prompts='truncate'")
    logger.warning("%s tokens and are dropped", number)
    return Prompts(dataset.select(short), [ids[row] for row in short], conversational)


def dataset_of(prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Dataset:
    """Make a dataset of prompts and their columns.

    Raises:
        ValueError: a single text, or columns of different lengths.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts={prompts!r} must be a list of prompts")
    return Dataset.from_dict({"prompt": list(prompts), **columns})


def datasets_by_name(dataset: Dataset | dict[str, Dataset] | None) -> dict[str | None, Dataset]:
    """Return datasets by name; a single one has the name None."""
    if dataset is None:
        return {}
    return dict(dataset) if isinstance(dataset, dict) else {None: dataset}


def is_conversational(prompts: list[Any], name: str) -> bool:
    """Return whether the prompts are lists of messages rather than texts; an error names a row of another kind."""
    conversational = isinstance(prompts[0], list)
    for row, prompt in enumerate(prompts):
        if not (prompt and all(map(is_message, prompt)) if conversational else isinstance(prompt, str)):
            raise ValueError(
                f"{name} row {row}: prompt={prompt!r} is neither text nor a list of messages like "
                "[{'role': 'user', 'content': ...}], or not of the kind of row 0; use one kind"
            )
    return conversational


def is_message(message: Any) -> bool:
    """Return whether it is a message: a role with text, parts, or tool calls."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or bool(message.get("tool_calls")))
    )


def token_ids(
    prompts: list[Any],
    options: Iterable[tuple[Any, Any]],
    conversational: bool,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any],
    name: str,
) -> list[list[int]]:
    """Tokenise each prompt; an error names the row that cannot be.

    Args:
        options: what each row has in `TEMPLATE_COLUMNS`.
    """
    ids = []
    for row, (prompt, given) in enumerate(zip(prompts, options, strict=False)):
        try:
            if conversational:
                tokens = render(prompt, tokenizer, {**chat_template_kwargs, **template_options(*given)})
            else:
                tokens = tokenizer(prompt)["input_ids"]
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name} row {row}: the tokenizer cannot render {prompt!r} ({error}); correct the row, or the "
                "chat template"
            ) from error
        if not tokens:
            raise ValueError(f"{name} row {row}: the prompt {prompt!r} has no tokens; remove the row")
        ids.append(tokens)
    return ids


def render(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant to begin or continue.

    Arrow gives every message the keys of all others, as None; those are left out.
    """
    go_on = messages[-1]["role"] == "assistant"
    encoded: Any = tokenizer.apply_chat_template(
        without_nones(messages),
        add_generation_prompt=not go_on,
        continue_final_message=go_on,
        tokenize=True,
        return_dict=True,
        **chat_template_kwargs,
    )
    return encoded["input_ids"]


def template_options(*given: Any) -> dict[str, Any]:
    """Return a row's arguments for the chat template from its `TEMPLATE_COLUMNS`, which may be JSON or empty.

    Arrow gives every row the keys of all others, as None; those are left out.
    """
    tools, options = (
        json.loads(value) if isinstance(value, str) and value.strip() else without_nones(value) for value in given
    )
    return {**({"tools": tools} if tools else {}), **(options or {})}


def without_nones(value: Any) -> Any:
    """Remove keys whose value is None from dictionaries at any depth."""
    if isinstance(value, dict):
        return {key: without_nones(inner) for key, inner in value.items() if inner is not None}
    return [without_nones(inner) for inner in value] if isinstance(value, list) else value


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
