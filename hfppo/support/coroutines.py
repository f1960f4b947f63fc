"""Run coroutines from synchronous code."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from anyio.from_thread import start_blocking_portal

from hfppo.support.time_limit import call_within


@contextmanager
def in_background(calls: Sequence[Callable[[], Any]]) -> Iterator[Callable[[], list[Any]]]:
    """Run coroutine functions concurrently with the block; the yielded function waits for their results.

    If the block raises, they are cancelled.
    """
    if not calls:
        yield list
        return

    async def together() -> list[Any]:
        return await asyncio.gather(*(awaited(call()) for call in calls))

    # The event loop has a thread of its own, because a notebook already runs one in this thread.
    with start_blocking_portal() as portal:
        yield portal.start_task_soon(together).result


async def awaited(value: Any) -> Any:
    """Return the value, or its result if it is awaitable.

    Only the value tells: decorators, partials and callable objects hide that a function is `async def`.
    """
    while inspect.isawaitable(value):
        value = await value
    return value


async def awaited_within(seconds: float | None, message: str, value: Any) -> Any:
    """Return the result of an awaitable, or cancel it after some seconds.

    Args:
        seconds: None for no limit.
        message: of the error.
    Raises:
        TimeoutError: the time is over.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaited(value)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(message) from error
        raise


def wait_for(call: Callable[[], Any]) -> Any:
    """Run one coroutine function and return its result."""
    with in_background([call]) as results:
        return results()[0]


def finish_within(seconds: float | None, message: str, func: Callable[[], Any]) -> Any:
    """Return the result of a function, plain or async, each with the time limit of `call_within`.

    Raises:
        TimeoutError: the time is over.
    """
    value = call_within(seconds, message, func)
    return wait_for(lambda: awaited_within(seconds, message, value)) if inspect.isawaitable(value) else value
