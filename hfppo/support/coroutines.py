"""Run coroutines from synchronous code."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anyio.from_thread import start_blocking_portal


@contextmanager
def in_background(calls: list[Callable[[], Awaitable[Any]]]) -> Iterator[Callable[[], list[Any]]]:
    """Run coroutine functions concurrently with the block; the yielded function waits for their results.

    If the block raises, they are cancelled.
    """
    if not calls:
        yield list
        return

    async def together() -> list[Any]:
        return await asyncio.gather(*(call() for call in calls))

    # The event loop has a thread of its own, because a notebook already runs one in this thread.
    with start_blocking_portal() as portal:
        yield portal.start_task_soon(together).result


def wait_for(call: Callable[[], Awaitable[Any]]) -> Any:
    """Run one coroutine function and return its result."""
    with in_background([call]) as results:
        return results()[0]
