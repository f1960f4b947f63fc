"""Run the tool calls of a turn. Every failure becomes text for the model, and is counted."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfppo.data.chat_template import Message
from hfppo.environments.environment import Result, Tool, text_of
from hfppo.support.calls import awaited, awaited_within, start_call

# Kinds of failures, as `tools/<kind>_frac` counts them.
UNKNOWN, RAISED, TIMEOUT = "unknown", "raised", "timeout"

ToolCall = Mapping[str, Any]  # {"name": …, "arguments": {…}}


@dataclass(frozen=True)
class Answer:
    """The answer to one tool call."""

    message: Message
    result: Result | None = None  # None: the tool returned anything else, or failed
    failure: str | None = None  # the kind of failure; None: the tool returned
    of_environment: bool = False  # whether the tool is a method of the environment


async def run_calls(calls: Sequence[ToolCall], tools: Mapping[str, Tool], timeout: float | None) -> list[Answer]:
    """Run the calls of one turn in their order; awaitables that they return are awaited together after that.

    Args:
        calls: functions of a message's `tool_calls`.
        tools: keyed by name; methods of an environment are bound.
        timeout: seconds for each call; None: no limit.
    Returns:
        the answers in the order of the calls.
    """
    started: list[object] = []
    for call in calls:
        late = f"{call['name']} took longer than tool_timeout={timeout} seconds"
        try:
            if (tool := tools.get(call["name"])) is None:
                raise LookupError(f"Tool {call['name']} not found.")
            value = await start_call(partial(tool, **call["arguments"]), timeout, late)
            started.append(awaited_within(timeout, late, value))
        except (Exception, SystemExit) as error:
            started.append(error)
    outcomes = await asyncio.gather(*map(awaited, started), return_exceptions=True)
    return [answer_to(call["name"], tools, outcome) for call, outcome in zip(calls, outcomes, strict=True)]


def answer_to(name: str, tools: Mapping[str, Tool], outcome: object) -> Answer:
    """Return the answer to a call from the value that it returned, or from the error that it raised."""
    result, failure = outcome if isinstance(outcome, Result) else None, None
    try:
        if isinstance(outcome, BaseException):
            raise outcome
        text = text_of(outcome)
    except (Exception, SystemExit) as error:  # the value's `__str__` may raise, too
        failure = UNKNOWN if name not in tools else TIMEOUT if isinstance(error, TimeoutError) else RAISED
        text = text_of({"error": str(error)})
    message = {"role": "tool", "name": name, "content": text}  # TRL's form
    return Answer(message, result, failure, of_environment=inspect.ismethod(tools.get(name)))
