"""Coroutines for code that is not asynchronous itself."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def in_background(calls: list[Callable[[], Awaitable[Any]]]) -> Iterator[Callable[[], list[Any]]]:
    """Run coroutine functions together while the caller goes on; the yielded function waits for their results."""

    async def together() -> list[Any]:
        return await asyncio.gather(*(call() for call in calls))

    # A thread of its own, because a notebook already runs an event loop in this one.
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(lambda: asyncio.run(together())) if calls else None
        yield lambda: running.result() if running else []


def wait_for(call: Callable[[], Awaitable[Any]]) -> Any:
    """The result of one coroutine function."""
    with in_background([call]) as results:
        return results()[0]
