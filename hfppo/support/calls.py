"""Call functions of users, plain or async, with time limits."""

import asyncio
import ctypes
import inspect
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MOMENT = 0.05  # seconds
LOCK = threading.Lock()
LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # by process, because a fork does not copy the loop's thread


def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop, which runs in a thread of its own until the process ends.

    Clients of users' functions belong to the loop of their first use, so all calls of all rollouts share one.
    A notebook already runs another loop in the main thread.
    """
    with LOCK:
        process = os.getpid()
        if process not in LOOPS:
            loop = asyncio.new_event_loop()
            threading.Thread(target=keep_running, args=[loop], daemon=True).start()
            LOOPS[process] = loop
        return LOOPS[process]


def keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop forever; an exit in a coroutine ends that coroutine only."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


def schedule(value: Awaitable[T]) -> Future[T]:
    """Await a value in the process's event loop; cancelling the Future cancels it."""
    return asyncio.run_coroutine_threadsafe(awaited(value), event_loop())


def wait_for(call: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function and return its result."""
    future = schedule(call())
    try:
        wait_briefly([future])
        return future.result()
    finally:
        future.cancel()  # no effect unless Ctrl-C or `interrupt` ended the wait


def wait_briefly(futures: Sequence[Future], seconds: float = math.inf) -> set[Future]:
    """Wait for all Futures, an error or a time limit, and return the finished Futures.

    Ctrl-C and `interrupt` end the wait: Python raises them only between waits, so each wait is short.
    """
    end = time.monotonic() + seconds
    while True:
        found = wait(futures, min(MOMENT, seconds), FIRST_EXCEPTION)
        failed = any(future.exception() for future in found.done)
        if failed or not found.not_done or time.monotonic() >= end:
            return found.done


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
    """Return the result of a function, plain or async, each with a time limit.

    Raises:
        TimeoutError: the time is over.
    """
    in_main = threading.current_thread() is threading.main_thread()
    value = (call_within if in_main else call_in_thread)(seconds, message, func)
    return wait_for(lambda: awaited_within(seconds, message, value)) if inspect.isawaitable(value) else value


# Why a signal: a worker process needs functions and models that can be pickled, and an environment would change in the
# worker only. In a worker thread, a regular expression that backtracks keeps the interpreter's lock, and no other
# thread can stop it. Packages with signal timeouts raise an Exception, which the function's own handlers swallow.
class TimeUp(BaseException):
    """Raised inside the function; not an Exception, so that its own `except Exception` does not catch it."""


def call_within(seconds: float | None, message: str, func: Callable[[], T]) -> T:
    """Return the function's result, or raise a TimeoutError after some seconds; for the main thread.

    A timer signal interrupts Python code, sleep, locks, sockets and regular expressions. Other compiled code cannot be
    interrupted: the error is raised when it returns.

    Args:
        seconds: None for no limit.
        message: the error's message.
    Raises:
        TimeoutError: the time is over; the traceback of its cause shows the line that hung.
    """
    if seconds is None:
        return func()
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


def interrupt(thread: threading.Thread) -> None:
    """Raise `TimeUp` in a thread. A call that blocks outside of Python code is interrupted when it returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))


def call_in_thread(seconds: float | None, message: str, func: Callable[[], T]) -> T:
    """Return the function's result, or raise a TimeoutError after some seconds; for any thread, unlike `call_within`.

    The function runs in a thread of its own, which is abandoned when the time is over; `interrupt` then ends it.
    Compiled code that keeps the interpreter's lock, such as a regular expression, stops all threads.

    Args:
        seconds: None for no limit; the function then runs in this thread.
        message: the error's message.
    Raises:
        TimeoutError: the time is over; a note shows the line that hung.
    """
    if seconds is None:
        return func()
    answer: Future = Future()
    may_leave = threading.Event()  # until then the interruption cannot reach the end of the thread

    def run() -> None:
        with suppress(TimeUp), torch.no_grad():
            try:
                answer.set_result(func())
            except TimeUp:
                raise
            except BaseException as error:
                answer.set_exception(error)
            may_leave.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        if wait_briefly([answer], seconds):
            return answer.result()
        late = TimeoutError(message)
        late.add_note("It was at\n" + "".join(traceback.format_stack(sys._current_frames()[thread.ident])))
        raise late
    finally:
        if not answer.done():
            interrupt(thread)
        may_leave.set()


def finish_in_thread(seconds: float | None, message: str, func: Callable[[], object]) -> Any:
    """Return the result of a function, or an awaitable of it; each has the time limit of `call_in_thread`.

    Raises:
        TimeoutError: the time is over.
    """
    value = call_in_thread(seconds, message, func)
    return awaited_within(seconds, message, value) if inspect.isawaitable(value) else value
