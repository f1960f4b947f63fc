"""Call functions of users, plain or async, with time limits."""

import asyncio
import ctypes
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")
MOMENT = 0.05  # seconds
MOST_THREADS = 64  # maximum number of concurrent plain calls
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


def wait_briefly(futures: Sequence[Future]) -> set[Future]:
    """Wait for all Futures or the first error, and return the finished Futures.

    Ctrl-C and `interrupt` end the wait: Python raises them only between waits, so each wait is short.
    """
    done: set[Future] = set()
    while len(done) < len(futures) and not any(future.exception() for future in done):
        done = wait(futures, MOMENT, FIRST_EXCEPTION).done
    return done


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
    if seconds is not None and threading.current_thread() is not threading.main_thread():
        return wait_for(partial(call_once, func, seconds, message))
    value = call_within(seconds, message, func)
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
        # The signal can arrive until `running` is False. The next one is a whole limit away, so it cannot interrupt
        # the clean-up below.
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


async def call_once(func: Callable[[], Any], seconds: float | None = None, message: str = "") -> Any:
    """Call a function in a thread of its own; see `Threads.call`."""
    with Threads() as threads:
        return await threads.call(func, seconds, message)


def interrupt(thread: threading.Thread) -> None:
    """Raise `TimeUp` in a thread. A call that blocks outside of Python code is interrupted when it returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))


class TooLate(TimeoutError):
    """A time limit is over. From an event loop, asyncio passes TimeoutError itself on without its notes."""


class Worker(threading.Thread):
    """A daemon thread that calls functions, one after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.jobs: SimpleQueue[tuple[Callable[[], Any], Future, Callable[[], object]] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Call functions until there is None."""
        with suppress(TimeUp), torch.no_grad():
            while (job := self.jobs.get()) is not None:
                func, result, tell = job
                try:
                    result.set_result(func())
                except TimeUp:
                    raise
                except BaseException as error:
                    result.set_exception(error)
                tell()

    def abandon(self) -> None:
        """Interrupt the call; the thread ends when it can."""
        interrupt(self)
        self.jobs.put(None)


class Threads:
    """Threads for plain functions that coroutines call; at most `MOST_THREADS` calls run at once."""

    def __init__(self) -> None:
        self._room, self._idle = asyncio.Semaphore(MOST_THREADS), list[Worker]()

    async def call(self, func: Callable[[], Any], seconds: float | None, message: str) -> Any:
        """Return the result of a function, plain or async, each with a time limit.

        A plain function that takes too long is interrupted. Compiled code that keeps the interpreter's lock, such as a
        regular expression, stops all threads.

        Args:
            seconds: None for no limit.
            message: the error's message.
        Raises:
            TooLate: the time is over; a note shows the line that hung.
        """
        return await awaited_within(seconds, message, await self.start(func, seconds, message))

    async def start(self, func: Callable[[], Any], seconds: float | None, message: str) -> Any:
        """Return what a function returns, which of an async one is awaitable; see `call`."""
        if inspect.iscoroutinefunction(func):
            return func()
        async with self._room:
            worker = self._idle.pop() if self._idle else Worker()
            result, done = Future[Any](), asyncio.Event()
            worker.jobs.put((func, result, partial(asyncio.get_running_loop().call_soon_threadsafe, done.set)))
            try:
                async with asyncio.timeout(seconds) as limit:
                    await done.wait()
            except BaseException as stopped:
                stack = traceback.format_stack(sys._current_frames().get(cast(int, worker.ident)))
                worker.abandon()
                if not limit.expired():
                    raise
                late = TooLate(message)
                late.add_note("It was at\n" + "".join(stack))
                raise late from stopped
            self._idle.append(worker)
        return result.result()

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, *error: object) -> None:
        event_loop().call_soon_threadsafe(self._close)

    def _close(self) -> None:
        """End the threads that have no call."""
        while self._idle:
            self._idle.pop().jobs.put(None)
