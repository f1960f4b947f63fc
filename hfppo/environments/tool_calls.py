"""Run the tool calls of a turn; whatever goes wrong becomes text for the model, and is counted."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfppo.environments.environment import Result, text_of
from hfppo.support.calls import awaited_within, call_within, own_random_state, require_main_thread, wait_for_all

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
    """Run the calls of one turn in their order; what they return as awaitables is awaited together after that.

    Args:
        calls: as in a message, {"name": …, "arguments": {…}} each.
        tools: by name; methods of an environment are bound.
        seed: of the global random numbers, which plain tools may use; they are put back afterwards.
        timeout: seconds for each call; None: any.
    """
    answers: list[Answer | None] = [None] * len(calls)
    later: list[tuple[int, Callable[[], Any]]] = []
    for i, call in enumerate(calls):
        tool = tools.get(call["name"])
        if tool is None:
            answers[i] = failed(call["name"], f"Tool {call['name']} not found.", UNKNOWN)
        else:
            with own_random_state(seed + i):
                answer = run_plain(call, tool, timeout)
            if inspect.isawaitable(answer.value):
                later.append((i, partial(finish, answer, timeout)))
            else:
                answers[i] = answer
    for (i, _), answer in zip(later, wait_for_all([run for _, run in later]), strict=True):
        answers[i] = answer
    return [answer for answer in answers if answer is not None]


def run_plain(call: Mapping[str, Any], tool: Callable[..., Any], timeout: float | None) -> Answer:
    """Call a tool; the value of the answer is an awaitable if the tool is asynchronous."""
    name, bound = call["name"], inspect.ismethod(tool)
    limit = None if inspect.iscoroutinefunction(tool) else timeout  # only `finish` spends time then
    require_main_thread(limit)  # no error for the model
    try:
        value = call_within(limit, too_late(name, timeout), partial(tool, **call["arguments"]))
        return answered(name, value, bound)
    except (Exception, SystemExit) as error:
        return failed(name, str(error), kind_of(error), bound)


async def finish(answer: Answer, timeout: float | None) -> Answer:
    """Return the answer of an asynchronous tool."""
    name, bound = answer.name, answer.of_environment
    try:
        return answered(name, await awaited_within(timeout, too_late(name, timeout), answer.value), bound)
    except (Exception, SystemExit) as error:
        return failed(name, str(error), kind_of(error), bound)


def answered(name: str, value: Any, of_environment: bool) -> Answer:
    """Return the answer to a call that returned; an awaitable has no text yet."""
    return Answer(name, value, "" if inspect.isawaitable(value) else text_of(value), None, of_environment)


def too_late(name: str, timeout: float | None) -> str:
    """Return what the model reads when a call takes too long."""
    return f"{name} took longer than tool_timeout={timeout} seconds"


def failed(name: str, error: str, kind: str, of_environment: bool = False) -> Answer:
    """Return the answer to a call that failed."""
    value = {"error": error}
    return Answer(name, value, text_of(value), kind, of_environment)


def kind_of(error: BaseException) -> str:
    """Return the kind of a failure."""
    return TIMEOUT if isinstance(error, TimeoutError) else RAISED
