"""OpenAI's responses API, translated from and to chat completions."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hfppo.endpoint.chat import Answer, Refusal, Request, function_tool, read_chat

Item = dict[str, Any]


def read_responses(body: Mapping[str, Any]) -> Request:
    """Return the request in a body of the responses API.

    Raises:
        Refusal: it is malformed, or refers to something that the client has not sent.
    """
    if body.get("previous_response_id") or body.get("conversation"):
        raise Refusal(400, "no response is stored; send the whole conversation as input")
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        add_item(messages, item)
    functions = [tool for tool in body.get("tools") or [] if tool["type"] == "function"]
    tools = [function_tool(tool.get("name"), tool.get("description"), tool.get("parameters")) for tool in functions]
    form = (body.get("text") or {}).get("format")
    limit = body.get("max_output_tokens")
    return read_chat({**body, "messages": messages, "tools": tools, "max_tokens": limit, "response_format": form})


def add_item(messages: list[Item], item: Item) -> None:
    """Append an item of the input; calls belong to the assistant's message before them."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item["role"], "content": item["content"]})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item["name"], "arguments": item["arguments"]}
        messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    elif kind != "reasoning":
        raise Refusal(400, f"input of type {kind!r} is not supported")


def responses_answer(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an answer of the responses API."""
    is_cut = answer.finish == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": body.get("model") or "policy",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output_items(answer),
        "instructions": body.get("instructions"),
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def output_items(answer: Answer) -> list[Item]:
    """Return the policy's message as items: its text, then its calls."""
    calls = answer.message.get("tool_calls") or []
    text = answer.message["content"]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]}
    items = [message] if text or not calls else []
    for i, call in enumerate(calls):
        number, function = f"{answer.id}_{i}", call["function"]
        made = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": function["name"]}
        items.append({**made, "arguments": json.dumps(function["arguments"])})
    return [{**item, "status": "completed"} for item in items]


def responses_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer of the responses API as a stream; each item comes whole."""
    whole = responses_answer(answer, body)
    events = [("created", {"response": {**whole, "output": [], "status": "in_progress", "usage": None}})]
    for i, item in enumerate(whole["output"]):
        events += item_events(i, item)
    events.append((whole["status"], {"response": whole}))
    for number, (kind, fields) in enumerate(events):
        event = {"type": f"response.{kind}", "sequence_number": number, **fields}
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def item_events(index: int, item: Item) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of one item."""
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        arguments = item["arguments"]
        empty: Item = {"arguments": ""}
        events: list[tuple[str, dict[str, Any]]] = [
            ("function_call_arguments.delta", {**place, "delta": arguments}),
            ("function_call_arguments.done", {**place, "arguments": arguments, "name": item["name"]}),
        ]
    else:
        (part,) = item["content"]
        empty, place = {"content": []}, {**place, "content_index": 0}
        events = [
            ("content_part.added", {**place, "part": {**part, "text": ""}}),
            ("output_text.delta", {**place, "delta": part["text"], "logprobs": []}),
            ("output_text.done", {**place, "text": part["text"], "logprobs": []}),
            ("content_part.done", {**place, "part": part}),
        ]
    begun = {**item, **empty, "status": "in_progress"}
    return [
        ("output_item.added", {"output_index": index, "item": begun}),
        *events,
        ("output_item.done", {"output_index": index, "item": item}),
    ]
