"""Messages between the model's turns as token ids, and the model's turns as messages.

Sampled tokens are never tokenized again. What answers a turn is appended as the difference of two renderings of a
short conversation, with and without the answer; both end the assistant's turn with the same token.
"""

import logging
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hfppo.data.chat_template import CLOCK, apply_chat_template, without_nones

logger = logging.getLogger(__name__)

Message = dict[str, Any]

MOST_KNOWN = 4096  # replies whose tokens are kept

# The words in the conversation that shows whether a template keeps calls, arguments and results.
SENTINELS = {
    "names of tools": "tool_a8f3e2b1",
    "names of arguments": "key_b9d4f5c2",
    "values of arguments": "value_d6e7a9f3",
    "results": "result_c4f9a8e2",
}


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer's chat template, as it renders what comes between the turns of the model."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]  # tokens that end a turn
    options: dict[str, Any]  # passed to `apply_chat_template`

    # Replies rendered before: many environments say the same few things again and again.
    _known: dict[Hashable, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def reply_ids(self, replies: Sequence[Message], closed: bool = True) -> list[int]:
        """Return the tokens from the end of the model's turn to the beginning of its next one.

        Args:
            replies: messages of tools, or one of the user.
            closed: whether the model has ended its turn; if not, the token that does comes first.
        Raises:
            ValueError: the template renders the conversation before the replies differently because of them.
        """
        key = (
            closed,
            getattr(self.options.get(CLOCK), "day", None),
            *((m["role"], m.get("name"), m["content"]) for m in replies),
        )
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._reply_ids(replies, closed)
        return self._known[key]

    def _reply_ids(self, replies: Sequence[Message], closed: bool) -> list[int]:
        before = conversation(replies[0])
        safe = [{**message, "content": self.neutralize(message["content"])} for message in replies]
        shorter, longer = self.render(before), self.render([*before, *safe], add_generation_prompt=True)
        ends = [i for i, token in enumerate(shorter) if token in self.eos_ids]
        begin = ends[-1] + closed if ends else len(shorter)  # some templates write a line feed after the end of a turn
        if longer[:begin] != shorter[:begin]:
            raise ValueError("the chat template renders earlier messages differently when others follow")
        return longer[begin:]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[int]:
        """Return the token ids of a conversation."""
        encoded = apply_chat_template(
            self.tokenizer,
            without_nones(list(messages)),
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            **self.options,
        )
        return encoded["input_ids"]

    def render_text(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation."""
        rendered = apply_chat_template(self.tokenizer, without_nones(list(messages)), tokenize=False, **self.options)
        return str(rendered)

    def neutralize(self, text: str) -> str:
        """Return text in which no token of the chat template occurs: a space stands behind its first character."""
        return self._control_tokens.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        template = self.options.get("chat_template") or self.tokenizer.chat_template or ""
        added = {str(token) for token in self.tokenizer.get_added_vocab() if str(token) in str(template)}
        tokens = sorted({*self.tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in tokens) or "(?!)")

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token: no text of n tokens is longer than n times that."""
        return max(map(len, self.tokenizer.get_vocab()))

    def may_fit(self, replies: Sequence[Message], budget: int) -> bool:
        """Return False for texts that are too long for a number of tokens, without tokenizing megabytes."""
        return sum(len(message["content"]) for message in replies) <= budget * self._longest_token


def text_message(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Message:
    """Return a turn of the model as a message of plain text."""
    return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def parse_turn(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], prefix: list[int], tools: Sequence[dict[str, Any]]
) -> tuple[Message, bool]:
    """Return a turn of the model as a message, and whether it cannot be read.

    A tokenizer with a `response_template` splits it into content, reasoning and calls, as for TRL's GRPOTrainer.

    Args:
        ids: of the turn, its end included.
        prefix: all token ids before it.
        tools: JSON schemas of those that the prompt offers.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return text_message(tokenizer, ids), False
    try:
        message = dict(tokenizer.parse_response(ids, prefix=prefix, tools=list(tools)))
        content = message.get("content")
        if isinstance(content, str) and tokenizer.eos_token:
            content = content.removesuffix(tokenizer.eos_token)
        message["content"] = content or ""
        check_calls(message.get("tool_calls") or [])
    except (ValueError, TypeError):
        return text_message(tokenizer, ids), True
    return message, False


def conversation(reply: Message) -> list[Message]:
    """Return a short conversation that a reply fits to; some templates name the tool in the header of its result."""
    user = {"role": "user", "content": "dummy"}
    if reply["role"] != "tool":
        return [user, {"role": "assistant", "content": "dummy"}]
    call = {"type": "function", "function": {"name": reply["name"], "arguments": {}}}
    return [user, {"role": "assistant", "content": "", "tool_calls": [call]}]


def check_calls(calls: Sequence[Any]) -> None:
    """Refuse calls without a name or with arguments that are no dictionary.

    Raises:
        TypeError, ValueError: a call is malformed.
    """
    for call in calls:
        function = call["function"] if isinstance(call, dict) and call.get("type", "function") == "function" else {}
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), dict):
            raise ValueError(f"malformed tool call {call!r}")


def make_chat_format(
    tokenizer: PreTrainedTokenizerBase, eos_ids: list[int], options: dict[str, Any], with_tools: bool
) -> ChatFormat:
    """Return the format of a tokenizer, proven to fit its template.

    Where the template rewrites earlier messages, or the tokenizer cannot parse tool calls, TRL's template for training
    and TRL's parser are taken, for the models that TRL knows.

    Raises:
        ValueError: the template cannot render tools or several turns, or calls cannot be parsed; names the remedy.
    """
    if with_tools and getattr(tokenizer, "response_template", None) is None:
        tokenizer.response_template = response_template_of(tokenizer)
    chat_format = ChatFormat(tokenizer, eos_ids, options)
    roles = ["tool"] if with_tools else ["user"]
    try:
        prove(chat_format, roles[0])
    except ValueError as error:
        template = training_template_of(tokenizer, str(error))
        logger.warning("%s; TRL's chat template for training takes its place", error)
        chat_format = replace(chat_format, options={**options, "chat_template": template})
        prove(chat_format, roles[0])
    return chat_format


def prove(chat_format: ChatFormat, role: str) -> None:
    """Refuse a template that loses calls, arguments or results, or rewrites earlier messages.

    Raises:
        ValueError: names what is wrong.
    """
    name, key, value, result = SENTINELS.values()
    reply = {"role": role, "content": result, **({"name": name} if role == "tool" else {})}
    before = conversation(reply)
    if role == "tool":
        before[1]["tool_calls"][0]["function"]["arguments"] = {key: value}
    kept = SENTINELS if role == "tool" else {"what follows a turn": result}
    try:
        # As text: the vocabulary of a small model may not hold the names.
        rendered = chat_format.render_text([*before, reply])
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot render a conversation with a {role} message: {error}") from error
    if lost := [part for part, text in kept.items() if text not in rendered]:
        raise ValueError(f"the chat template leaves out {', '.join(lost)}")
    chat_format.reply_ids([reply])


def response_template_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return TRL's parser for a known chat template.

    Raises:
        ValueError: TRL is not installed, or does not know the template.
    """
    remedy = (
        "the tokenizer cannot parse tool calls: set processing_class.response_template, as transformers' page on "
        "response parsing describes"
    )
    try:
        from trl.chat_template_utils import add_response_schema

        return add_response_schema(tokenizer).response_template
    except ImportError as error:
        raise ValueError(f"{remedy}, or install trl, which has parsers for many models") from error
    except ValueError as error:
        raise ValueError(f"{remedy}; TRL has none for this chat template") from error


def training_template_of(tokenizer: PreTrainedTokenizerBase, fault: str) -> str:
    """Return TRL's chat template for training, which keeps earlier messages as they are.

    Raises:
        ValueError: TRL is not installed, or has none for this model; repeats the fault.
    """
    remedy = f"{fault}; set processing_class.chat_template to one for training that keeps them"
    try:
        from trl.chat_template_utils import get_training_chat_template

        template = get_training_chat_template(tokenizer)
    except ImportError as error:
        raise ValueError(f"{remedy}, or install trl, which has some") from error
    except ValueError as error:
        raise ValueError(f"{remedy}; TRL has none for this chat template") from error
    if template is None:
        raise ValueError(remedy)
    return template
