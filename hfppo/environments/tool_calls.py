"""Run the tool calls of a turn; whatever goes wrong becomes text for the model, and is counted."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfppo.data.chat_template import Message
from hfppo.environments.environment import Result, Tool, text_of
from hfppo.support.calls import awaited_within, call_within, own_random_state, require_main_thread, wait_for_all

# Kinds of failures, as `tools/<kind>_frac` counts them.
UNKNOWN, RAISED, TIMEOUT = "unknown", "raised", "timeout"


class UnknownTool(LookupError):
    """The model calls a tool that does not exist."""


KINDS: dict[type[Exception], str] = {UnknownTool: UNKNOWN, TimeoutError: TIMEOUT}


@dataclass(frozen=True)
class Answer:
    """The answer to one tool call."""

    message: Message
    result: Result | None = None  # None: the tool returned anything else, or failed
    failure: str | None = None  # the kind of failure; None: the tool returned
    of_environment: bool = False  # whether the tool is a method of the environment


def run_calls(
    calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Tool], seed: int, timeout: float | None
) -> list[Answer]:
    """Run the calls of one turn in their order. Awaitables that they return are awaited together after that.

    Args:
        calls: entries of a message's `tool_calls`, {"name": …, "arguments": {…}} each.
        tools: keyed by name; methods of an environment are bound.
        seed: seeds the global random numbers for plain tools; their states are restored afterwards.
        timeout: seconds for each call; None: any.
    """
    outcomes = []
    for i, call in enumerate(calls):
        with own_random_state(seed + i):
            outcomes.append(run_plain(call, tools.get(call["name"]), timeout))
    pending = [i for i, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    finished = wait_for_all([partial(finish, calls[i]["name"], outcomes[i], timeout) for i in pending])
    for i, outcome in zip(pending, finished, strict=True):
        outcomes[i] = outcome
    return [answer_to(call["name"], tools, outcome) for call, outcome in zip(calls, outcomes, strict=True)]


def run_plain(call: Mapping[str, Any], tool: Tool | None, timeout: float | None) -> object:
    """Return the value or awaitable that a tool returns, or the error that it raises."""
    if tool is None:
        return UnknownTool(f"Tool {call['name']} not found.")
    limit = None if inspect.iscoroutinefunction(tool) else timeout  # only `finish` spends time then
    require_main_thread(limit)  # no error for the model
    try:
        return call_within(limit, too_late(call["name"], timeout), partial(tool, **call["arguments"]))
    except (Exception, SystemExit) as error:
        return error


async def finish(name: str, value: object, timeout: float | None) -> object:
    """Return the result of an awaitable, or the error that it raises."""
    try:
        return await awaited_within(timeout, too_late(name, timeout), value)
    except (Exception, SystemExit) as error:
        return error


def too_late(name: str, timeout: float | None) -> str:
    """Return the text for the model when a call takes too long."""
    return f"{name} took longer than tool_timeout={timeout} seconds"


def answer_to(name: str, tools: Mapping[str, Tool], outcome: object) -> Answer:
    """Return the answer to a call from the value that it returned, or from the error that it raised."""
    result, failure = outcome if isinstance(outcome, Result) else None, None
    try:
        if isinstance(outcome, BaseException):
            raise outcome
        text = text_of(outcome)
    except (Exception, SystemExit) as error:  # the value's `__str__` may raise, too
        failure = next((kind for cause, kind in KINDS.items() if isinstance(error, cause)), RAISED)
        text = text_of({"error": str(error)})
    message = {"role": "tool", "name": name, "content": text}  # TRL's form
    return Answer(message, result, failure, of_environment=inspect.ismethod(tools.get(name)))
