"""Calls of others' functions: coroutines from plain code, with time limits, with random numbers aside."""

import asyncio
import inspect
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


def wait_for(call: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function and return its result."""
    # The event loop has a thread of its own, because a notebook already runs one in this thread.
    with start_blocking_portal() as portal:
        return portal.call(call)


def wait_for_all(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run coroutine functions concurrently and return their results."""

    async def together() -> list[T]:
        return await asyncio.gather(*(call() for call in calls))

    return wait_for(together) if calls else []


async def awaited(value: object) -> Any:
    """Return the value, or its result if it is awaitable.

    Only the value tells: decorators, partials and callable objects hide that a function is `async def`.
    """
    while inspect.isawaitable(value):
        value = await value
    return value


async def awaited_within(seconds: float | None, message: str, value: object) -> Any:
    """Return the result of an awaitable, or cancel it after some seconds.

    Args:
        seconds: None for no limit.
        message: the error's message.
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


def finish_within(seconds: float | None, message: str, func: Callable[[], object]) -> Any:
    """Return the result of a function, plain or async, each with the time limit of `call_within`.

    Raises:
        TimeoutError: the time is over.
    """
    value = call_within(seconds, message, func)
    return wait_for(lambda: awaited_within(seconds, message, value)) if inspect.isawaitable(value) else value


# Why a signal: a worker process needs functions and models that can be pickled, and an environment would change in the
# worker only. In a worker thread, a regular expression that backtracks keeps the interpreter's lock, and no other
# thread can stop it. Packages with signal timeouts raise an Exception, which the function's own handlers swallow.
class TimeUp(BaseException):
    """Raised inside the function; not an Exception, so that its own `except Exception` does not catch it."""


def require_main_thread(seconds: float | None) -> None:
    """Raise if plain code cannot have this time limit.

    Raises:
        RuntimeError: outside the main thread, where no signal arrives.
    """
    if seconds is not None and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "a time limit for plain code needs the main thread; leave timeout out, or write the function as async def"
        )


def call_within(seconds: float | None, message: str, func: Callable[[], T]) -> T:
    """Return the function's result, or raise a TimeoutError after some seconds.

    A timer signal interrupts Python code, sleep, locks, sockets and regular expressions. Other compiled code cannot be
    interrupted: the error is raised when it returns.

    Args:
        seconds: None for no limit.
        message: the error's message.
    Raises:
        TimeoutError: the time is over; the traceback of its cause shows the line that hung.
        RuntimeError: outside the main thread.
    """
    if seconds is None:
        return func()
    require_main_thread(seconds)
    running = True

    def stop(*_: object) -> None:
        if running:
            raise TimeUp

    handler = signal.signal(signal.SIGALRM, stop)
    timer = (0.0, 0.0)
    try:
        # The signal may arrive at any line up to the one after `func`. The next one is a whole limit away, so it does
        # not interrupt the restoring below.
        try:
            # Repeated, for code that catches everything.
            timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
            return func()
        finally:
            running = False
    except TimeUp as where:
        raise TimeoutError(message) from where
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU) for the block, and put their states back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
