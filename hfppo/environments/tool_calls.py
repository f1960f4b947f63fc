"""Run the tool calls of a turn; whatever goes wrong becomes text for the model, and is counted."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfppo.environments.contract import Result
from hfppo.support.coroutines import in_background
from hfppo.support.random_state import own_random_state
from hfppo.support.time_limit import call_within

# Kinds of failures, as `tools/<kind>_frac` counts them.
UNKNOWN, RAISED, TIMEOUT = "unknown", "raised", "timeout"


@dataclass(frozen=True)
class Answer:
    """The answer to one tool call."""

    name: str
    value: Any  # what the tool returned, or a dictionary with the error
    text: str  # the same for the model
    failure: str | None = None  # the kind of failure; None: the tool returned
    of_environment: bool = False  # whether the tool is a method of the environment

    @property
    def reward(self) -> float:
        """The reward that the tool gave."""
        return self.value.reward if isinstance(self.value, Result) else 0.0

    @property
    def done(self) -> bool:
        """Whether the tool ended the episode."""
        return isinstance(self.value, Result) and self.value.done


def run_calls(
    calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Callable[..., Any]], seed: int, timeout: float | None
) -> list[Answer]:
    """Run the calls of one turn in their order; those of `async def` tools run together after the others.

    Args:
        calls: as in a message, {"name": …, "arguments": {…}} each.
        tools: by name; methods of an environment are bound.
        seed: of the global random numbers, which plain tools may use; they are put back afterwards.
        timeout: seconds for each call; None: any.
    """
    answers: list[Answer | None] = [None] * len(calls)
    later: list[tuple[int, partial]] = []
    for i, call in enumerate(calls):
        tool = tools.get(call["name"])
        if tool is None:
            answers[i] = failed(call["name"], f"Tool {call['name']} not found.", UNKNOWN)
        elif inspect.iscoroutinefunction(tool):
            later.append((i, partial(run_async, call, tool, timeout)))
        else:
            with own_random_state(seed + i):
                answers[i] = run_plain(call, tool, timeout)
    with in_background([run for _, run in later]) as results:
        for (i, _), answer in zip(later, results(), strict=True):
            answers[i] = answer
    return [answer for answer in answers if answer is not None]


def run_plain(call: Mapping[str, Any], tool: Callable[..., Any], timeout: float | None) -> Answer:
    """Run a plain tool."""
    late = f"{call['name']} took longer than tool_timeout={timeout} seconds"
    bound = inspect.ismethod(tool)
    try:
        value = call_within(timeout, late, partial(tool, **call["arguments"]))
        return Answer(call["name"], value, text_of(value), of_environment=bound)
    except (Exception, SystemExit) as error:
        return failed(call["name"], str(error), kind_of(error), bound)


async def run_async(call: Mapping[str, Any], tool: Callable[..., Any], timeout: float | None) -> Answer:
    """Run an `async def` tool."""
    bound = inspect.ismethod(tool)
    try:
        value = await asyncio.wait_for(tool(**call["arguments"]), timeout)
        return Answer(call["name"], value, text_of(value), of_environment=bound)
    except (Exception, SystemExit) as error:
        return failed(call["name"], str(error), kind_of(error), bound)


def text_of(value: Any) -> str:
    """Return what a tool or environment returned as text that a tokenizer takes: without lone surrogates."""
    return str(value).encode(errors="replace").decode()


def failed(name: str, error: str, kind: str, of_environment: bool = False) -> Answer:
    """Return the answer to a call that failed."""
    value = {"error": error}
    return Answer(name, value, text_of(value), kind, of_environment)


def kind_of(error: BaseException) -> str:
    """Return the kind of a failure."""
    return TIMEOUT if isinstance(error, TimeoutError) else RAISED
