"""Requests and answers of OpenAI's chat completions, as plain dictionaries."""

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.logging import get_logger

from hfppo.data.chat_template import Message, Schema, without_nones

# Settings of a request that would change the policy's distribution, with the values that change nothing.
IGNORED: dict[str, tuple[object, ...]] = {
    "temperature": (1,), "top_p": (1,), "top_k": (), "seed": (), "frequency_penalty": (0,), "presence_penalty": (0,),
    "tool_choice": ("auto", {"type": "auto"}), "response_format": ({"type": "text"},), "logit_bias": ({},),
    "logprobs": (False,), "thinking": ({"type": "disabled"},),
}  # fmt: skip

logger = get_logger(__name__)


class Refusal(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form, which is Anthropic's too."""
        error = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}
        return {"type": "error", "error": error}


@dataclass(frozen=True)
class Request:
    """A conversation that asks for the policy's next message."""

    messages: list[Message]  # as chat templates read them: text, arguments as dictionaries, the names of tools
    tools: list[Schema] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The tools, and the part of each message that survives a client; see `key_of`."""
        return json.dumps(self.tools), *map(key_of, self.messages)


@dataclass(frozen=True)
class Answer:
    """The policy's message, as chat templates read it."""

    message: Message
    finish: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int
    completion_tokens: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def read_chat(body: Mapping[str, Any]) -> Request:
    """Return the request in a body of chat completions.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is malformed.
        Refusal: it asks for images or several answers.
    """
    if not body["messages"]:
        raise ValueError("messages is empty")
    if (body.get("n") or 1) != 1:
        raise Refusal(400, f"n={body['n']}: ask once for each answer")
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    stop = body.get("stop") or ()
    request = Request(
        messages=read_messages(body["messages"]),
        tools=without_nones(body.get("tools") or []),
        max_tokens=next((int(limit) for limit in limits if limit), None),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
    )
    for name, neutral in IGNORED.items():
        if body.get(name) not in (None, *neutral):
            logger.warning_once(
                "the agent sets %s, which is ignored: training needs samples of the policy's own distribution", name
            )
    return request


def function_tool(name: str, description: str | None, parameters: Schema | None) -> Schema:
    """Return a tool as chat completions write it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def read_messages(given: list[dict[str, Any]]) -> list[Message]:
    """Return OpenAI's messages as chat templates read them."""
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    messages = []
    for one in given:
        role = {"developer": "system"}.get(one["role"], one["role"])
        message: Message = {"role": role, "content": read_text(one.get("content"))}
        if calls := one.get("tool_calls"):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            message["tool_calls"] = [read_call(call["function"]) for call in calls]
        if role == "tool":
            message["name"] = names.get(one.get("tool_call_id", ""), one.get("name") or "tool")
        messages.append(message)
    return messages


def read_text(content: Any) -> str:
    """Return a message's content, text or parts of text, as one text.

    Raises:
        Refusal: a part is not text.
    """
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    for part in parts:
        if not isinstance(part.get("text"), str):
            raise Refusal(400, f"content of type {part.get('type')!r} is not supported, only text")
    return "".join(part["text"] for part in parts)


def read_call(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON values."""
    arguments = function.get("arguments") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def key_of(message: Message) -> str:
    """Return the part of a message that survives a client: role, text without outer spaces, names and arguments.

    Clients drop reasoning, change the ids of calls, and write arguments anew.
    """
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True, ensure_ascii=False)


def chat_answer(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an answer of chat completions."""
    message = {**answer.message, "content": answer.message["content"] or None}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": f"call_{answer.id}_{i}",
                "type": "function",
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for i, call in enumerate(calls)
        ]
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": answer.created,
        "model": body.get("model") or "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def chat_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer of chat completions as a stream; the policy's message comes whole."""
    whole = chat_answer(answer, body)
    (choice,) = whole["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    base = {**{name: whole[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    with_usage = (body.get("stream_options") or {}).get("include_usage")
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]},
        *([{"choices": [], "usage": whole["usage"]}] if with_usage else []),
    ]
    for chunk in chunks:
        yield f"data: {json.dumps({**base, **chunk})}\n\n"
    yield "data: [DONE]\n\n"
