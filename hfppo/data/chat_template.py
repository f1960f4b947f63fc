"""Conversations as token ids or text, by a tokenizer's chat template, on the date of the run."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from itertools import groupby
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # columns passed to the chat template

Message = dict[str, Any]
Schema = dict[str, Any]  # a tool's JSON schema

CLOCK = "strftime_now"  # the function by which chat templates read the time

# The codes of `strftime`, each also with "-", which leaves out leading zeros.
CODES = [f"%{flag}{letter}" for letter in "aAbBcCdDeFfgGhHIjklmMnpPrRStTuUVwWxXyYzZ" for flag in ("", "-")]
# A loop compiles in a thirtieth of the time that a chain of filters needs. The line feed is trimmed.
CLOCK_MACRO = (
    "{% macro strftime_now(format) %}{% set found = namespace(text=format) %}{% for code, text in TEXTS.items() %}"
    "{% set found.text = found.text | replace(code, text) %}{% endfor %}{{ found.text }}{% endmacro %}\n"
)


@dataclass
class RunDate:
    """The date that chat templates see, at 00:00: the day on which the run started, the same in every process.

    A resumed run keeps the checkpoint's date, so its prompts have the same tokens.
    """

    day: date

    @classmethod
    def today(cls) -> "RunDate":
        """Return the main process's date; all processes call it."""
        return cls(broadcast_object_list([date.today()])[0])


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], strftime_now: RunDate | None = None, **options: Any
) -> Any:
    """Call `tokenizer.apply_chat_template` with a template that reads the date of the run.

    Args:
        strftime_now: None: today's date, and the time of day.
    """
    if strftime_now is not None and reads_time(tokenizer, options):
        template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        options["chat_template"] = fixed_clock(strftime_now.day) + template
    return tokenizer.apply_chat_template(without_nones(messages), **options)


def reads_time(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]) -> bool:
    """Return whether a chat template, of the tokenizer or in the options, may read the time."""
    return CLOCK in f"{tokenizer.chat_template} {options.get('chat_template')}"


@lru_cache
def fixed_clock(day: date) -> str:
    """Return the beginning of a chat template in which `strftime_now` is a macro for a fixed day.

    transformers passes no functions to a template, so it cannot be an argument.
    """
    texts = {"%%": "\0", **{code: day.strftime(code) for code in CODES}, "\0": "%"}
    return CLOCK_MACRO.replace("TEXTS", repr(texts))


def find_turn_end(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> int | None:
    """Return the added token that a chat template writes after an assistant's message; None if there is none.

    It must be there after the last message and before another one: some templates begin the next turn in any case.

    Args:
        options: passed to `apply_chat_template`.
    """
    user, text = {"role": "user", "content": "dummy"}, "text_of_a_reply"
    dialogue, after = [user, {"role": "assistant", "content": text}, user], []
    with suppress(Exception):  # a template may fail in its own ways, and then ends no turn
        for messages in (dialogue[:2], dialogue):
            rendered = apply_chat_template(tokenizer, messages, tokenize=False, **options)
            rest = rendered.partition(text)[2].lstrip()
            after.append(tokenizer(rest, add_special_tokens=False)["input_ids"][:1])
        if after[0] == after[1] and {*after[0]} <= {*tokenizer.get_added_vocab().values()}:
            return next(iter(after[0]), None)
    return None


def render_all(
    rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """Return the token ids of rows' conversations, ready for the assistant to begin or continue.

    Neighbours with equal arguments for the template are rendered together. Arrow gives every message the keys of all
    others, as None; those are left out.

    Args:
        rows: with a "prompt" of messages; they may have `TEMPLATE_COLUMNS`.
    """
    given = [(row["prompt"][-1]["role"] == "assistant", template_options(row), row["prompt"]) for row in rows]
    ids: list[list[int]] = []
    for (go_on, own), alike in groupby(given, key=lambda row: row[:2]):
        encoded = apply_chat_template(
            tokenizer,
            [messages for *_, messages in alike],
            add_generation_prompt=not go_on,
            continue_final_message=go_on,
            tokenize=True,
            return_dict=True,
            **{**chat_template_kwargs, **own},
        )
        ids += encoded["input_ids"]
    return ids


def template_options(row: Mapping[str, object]) -> dict[str, Any]:
    """Return a row's arguments for the chat template from its `TEMPLATE_COLUMNS`, which may be JSON or empty.

    Raises:
        ValueError: a text is not JSON.
    """
    values = (row.get(column) for column in TEMPLATE_COLUMNS)
    tools, options = (json.loads(x or "null") if isinstance(x, str) else without_nones(x) for x in values)
    return {**({"tools": tools} if tools else {}), **(options or {})}


def without_nones(value: Any) -> Any:
    """Remove keys whose value is None from dictionaries at any depth."""
    if isinstance(value, dict):
        return {key: without_nones(inner) for key, inner in value.items() if inner is not None}
    return [without_nones(inner) for inner in value] if isinstance(value, list) else value
