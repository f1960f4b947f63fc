"""Anthropic's messages API, translated from and to chat completions."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hfppo.endpoint.chat import Answer, Request, function_tool, read_chat, read_text

FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_anthropic(body: Mapping[str, Any]) -> Request:
    """Return the request in a body of the messages API.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is malformed.
        Refusal: it has images.
    """
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in body["messages"]:
        messages += read_blocks(message["role"], message["content"])
    given = body.get("tools") or []
    tools = [function_tool(tool["name"], tool.get("description"), tool["input_schema"]) for tool in given]
    return read_chat({**body, "messages": messages, "tools": tools, "stop": body.get("stop_sequences")})


def read_blocks(role: str, content: Any) -> list[dict[str, Any]]:
    """Return a message as messages of chat completions: the results of tools come first, each as one of its own."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": read_text(block.get("content"))}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    calls = [
        {"id": block["id"], "function": {"name": block["name"], "arguments": block["input"]}}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    others = [b for b in blocks if b["type"] not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    own = [{"role": role, "content": others, "tool_calls": calls}] if others or calls else []
    return [*results, *own]


def anthropic_answer(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an answer of the messages API."""
    text, calls = answer.message["content"], answer.message.get("tool_calls") or []
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    for i, call in enumerate(calls):
        function = call["function"]
        called = {"name": function["name"], "input": function["arguments"]}
        blocks.append({"type": "tool_use", "id": f"toolu_{answer.id}_{i}", **called})
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": blocks,
        "stop_reason": FINISH[answer.finish],
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def anthropic_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer of the messages API as a stream; each block comes whole."""
    whole = anthropic_answer(answer, body)
    begun = {**whole, "content": [], "stop_reason": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            empty = {**block, "input": {}}
        events += [
            {"type": "content_block_start", "index": i, "content_block": empty},
            {"type": "content_block_delta", "index": i, "delta": delta},
            {"type": "content_block_stop", "index": i},
        ]
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": ending, "usage": whole["usage"]}, {"type": "message_stop"}]
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
