"""Messages between the model's turns as token ids, and the model's turns as messages.

Sampled tokens are never tokenized again. An answer to a turn is appended as the difference of two renderings of a
short conversation, with and without the answer. Both end the assistant's turn with the same token.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hfppo.data.chat_template import CLOCK, Message, Schema, apply_chat_template
from hfppo.environments.environment import replace_halves

logger = logging.getLogger(__name__)

# Texts in a trial conversation that a template must keep.
SENTINELS = ("name_of_a_tool", "name_of_an_argument", "value_of_an_argument", "text_of_a_reply")


@dataclass(frozen=True)
class ChatFormat:
    """Renders replies to the model by a tokenizer's chat template."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]  # tokens that end a turn
    options: dict[str, Any]  # passed to `apply_chat_template`
    role: str  # of replies, "tool" or "user"

    def reply_ids(
        self, replies: Sequence[Message], closed: bool = True, own: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the tokens from the end of the model's turn to the beginning of its next one.

        Args:
            replies: tool messages, or one user message.
            closed: whether the model has ended its turn; if not, the token that ends it comes first.
            own: a row's arguments for the chat template, as JSON values.
        Raises:
            ValueError: the template renders earlier messages differently when the replies follow.
        """
        return self._cached(json.dumps([str(self.options.get(CLOCK)), closed, own or {}, list(replies)]))

    @cached_property
    def _cached(self) -> Callable[[str], list[int]]:
        return lru_cache(maxsize=4096)(self._reply_ids)  # many environments give the same few answers

    def _reply_ids(self, key: str) -> list[int]:
        _, closed, own, replies = json.loads(key)
        before = messages_before(replies[0])
        safe = [{**message, "content": self.neutralize(message["content"])} for message in replies]
        options = {"return_dict": True, **own}
        shorter = self.rendered(before, **options)["input_ids"]
        longer = self.rendered([*before, *safe], add_generation_prompt=True, **options)["input_ids"]
        ends = [i for i, token in enumerate(shorter) if token in self.eos_ids]
        begin = ends[-1] + closed if ends else len(shorter)  # some templates write a line feed after the end of a turn
        if longer[:begin] != shorter[:begin]:
            raise ValueError("the chat template renders earlier messages differently when others follow")
        return longer[begin:]

    def rendered(self, messages: Sequence[Message], **options: Any) -> Any:
        """Return a conversation as the chat template renders it."""
        return apply_chat_template(self.tokenizer, list(messages), **{**self.options, **options})

    def neutralize(self, text: str) -> str:
        """Escape the template's control tokens by inserting a space after their first character."""
        return self._control_tokens.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        template = self.options.get("chat_template") or self.tokenizer.chat_template or ""
        added = {str(token) for token in self.tokenizer.get_added_vocab() if str(token) in str(template)}
        tokens = sorted({*self.tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in tokens) or "(?!)")


def text_message(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Message:
    """Return a turn of the model as a message of plain text."""
    return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def parse_turn(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], prefix: list[int], tools: Sequence[Schema]
) -> tuple[Message, bool]:
    """Return a turn of the model as a message, and whether it cannot be parsed.

    A tokenizer with a `response_template` splits it into content, reasoning and calls, as for TRL's GRPOTrainer.

    Args:
        ids: the turn's token ids, its end included.
        prefix: all token ids before it.
        tools: the tools that the prompt offers.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return text_message(tokenizer, ids), False
    try:
        message = replace_halves(dict(tokenizer.parse_response(ids, prefix=prefix, tools=list(tools))))
        content = message.get("content")
        if isinstance(content, str) and tokenizer.eos_token:
            content = content.removesuffix(tokenizer.eos_token)
        message["content"] = content or ""
        check_parsed_calls(message.get("tool_calls") or [])
    except (ValueError, TypeError):
        return text_message(tokenizer, ids), True
    return message, False


def messages_before(reply: Message, arguments: dict[str, str] | None = None) -> list[Message]:
    """Return a short conversation that a reply can follow. Some templates read the tool's name from its call."""
    user = {"role": "user", "content": "dummy"}
    if reply["role"] != "tool":
        return [user, {"role": "assistant", "content": "dummy"}]
    call = {"type": "function", "function": {"name": reply["name"], "arguments": arguments or {}}}
    return [user, {"role": "assistant", "content": "", "tool_calls": [call]}]


def check_parsed_calls(calls: Sequence[Any]) -> None:
    """Raise if a call has no name, or if its arguments are not a dictionary.

    Raises:
        TypeError, ValueError: a call is malformed.
    """
    for call in calls:
        function = call["function"] if isinstance(call, dict) and call.get("type", "function") == "function" else {}
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), dict):
            raise ValueError(f"malformed tool call {call!r}")


def make_chat_format(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], with_tools: bool) -> ChatFormat:
    """Return the format of a tokenizer, after a check of its template.

    For models that TRL knows, TRL's template for training replaces one that rewrites earlier messages, and TRL's
    parser is added where the tokenizer cannot parse tool calls.

    Raises:
        ValueError: the template cannot render tools or several turns, or calls cannot be parsed.
    """
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise ValueError(
            "tools, environments and agents need a chat template; set processing_class.chat_template, for tools as "
            "docs/calculator.md does"
        )
    if with_tools and getattr(tokenizer, "response_template", None) is None:
        remedy = (
            "the tokenizer cannot parse tool calls; set processing_class.response_template, as docs/calculator.md does"
        )
        tokenizer.response_template = from_trl("add_response_schema", tokenizer, remedy).response_template
    eos_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    chat_format = ChatFormat(tokenizer, eos_ids, options, "tool" if with_tools else "user")
    try:
        check_template(chat_format)
    except ValueError as error:
        shown = ", as docs/calculator.md does for a model without tools" if with_tools else ""
        remedy = f"{error}; set processing_class.chat_template to a template that keeps earlier messages{shown}"
        template = from_trl("get_training_chat_template", tokenizer, remedy)
        logger.warning("%s; TRL's chat template for training replaces it", error)
        chat_format = replace(chat_format, options={**options, "chat_template": template})
        check_template(chat_format)
    return chat_format


def check_template(chat_format: ChatFormat) -> None:
    """Raise if a template loses calls, arguments or replies, or rewrites earlier messages.

    Raises:
        ValueError: a turn is not rendered as it must be.
    """
    role, (name, key, value, text) = chat_format.role, SENTINELS
    reply = {"role": role, "content": text, **({"name": name} if role == "tool" else {})}
    before = messages_before(reply, {key: value})
    try:
        # As text, because the vocabulary of a small model may lack these words.
        rendered = chat_format.rendered([*before, reply], tokenize=False)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot render a conversation with a {role} message: {error}") from error
    if lost := [kept for kept in (SENTINELS if role == "tool" else [text]) if kept not in rendered]:
        raise ValueError(f"the chat template leaves out {', '.join(lost)}")
    chat_format.reply_ids([reply])


def from_trl(function: str, tokenizer: PreTrainedTokenizerBase, remedy: str) -> Any:
    """Return the result of a function of TRL's chat templates for a tokenizer.

    Raises:
        ValueError: the function finds nothing; the error begins with the remedy.
    """
    found = None
    with suppress(ImportError, ValueError):  # trl is not installed, or has no such template
        from trl import chat_template_utils

        found = getattr(chat_template_utils, function)(tokenizer)
    if found is None:
        raise ValueError(
            f"{remedy}; trl, which has templates for many models, is not installed or has none for this model"
        )
    return found
