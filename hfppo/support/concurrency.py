"""Run coroutines from synchronous code."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def in_background(calls: list[Callable[[], Awaitable[Any]]]) -> Iterator[Callable[[], list[Any]]]:
    """Run coroutine functions concurrently with the block; the yielded function waits for their results.

    If the block raises, they are cancelled.
    """
    if not calls:
        yield list
        return
    started: Future[Callable[[], Any]] = Future()

    async def together() -> list[Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await asyncio.gather(*(call() for call in calls))

    def run() -> list[Any]:
        try:
            return asyncio.run(together())
        finally:
            started.cancel()  # where no loop could be made, nothing ever starts

    # A thread of its own, because a notebook already runs an event loop in this one.
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(run)
        try:
            yield running.result
        except BaseException:
            with suppress(RuntimeError, CancelledError):  # the loop is closed already, or never was
                started.result()()
            raise


def wait_for(call: Callable[[], Awaitable[Any]]) -> Any:
    """Run one coroutine function and return its result."""
    with in_background([call]) as results:
        return results()[0]
