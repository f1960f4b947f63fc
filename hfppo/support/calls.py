"""Call functions of users, plain or async, with time limits."""

import asyncio
import ctypes
import inspect
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MOMENT = 0.05  # seconds
LULL = 0.5  # seconds for which a thread waits for another call; a batch of turns may be sampled meanwhile
MOST_THREADS = 64  # maximum number of concurrent plain calls of tools and environments
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
    """Return the value, or the result of an awaitable, which is cancelled after some seconds.

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
        return wait_for(partial(call_with_limit, func, seconds, message))
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
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return func()
        finally:
            running = False  # from here on the signal is too late
    except TimeUp as where:
        raise TimeoutError(message) from where
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def interrupt(thread: threading.Thread) -> None:
    """Raise `TimeUp` in a thread. A call that blocks outside of Python code is interrupted when it returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))


@dataclass(eq=False)
class Call:
    """A plain call for a coroutine, which waits for its value and its error."""

    func: Callable[[], Any]
    returned: asyncio.Future[tuple[Any, BaseException | None]]
    thread: threading.Thread | None = None
    begin: float | None = None  # time
    # Who locks the first makes the call, or withdraws it; who locks the second ends the waiting for it.
    begun: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Lock = field(default_factory=threading.Lock)


class Threads:
    """Daemon threads that make plain calls, without gradients, for the coroutines of an event loop.

    Quick calls, such as steps of a game, need few changes between threads: a thread takes the next call without a
    pause, and the loop is woken once for all that have returned.

    Args:
        most: maximum number of concurrent calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: float):
        self._loop, self._most = loop, most
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._returned: deque[tuple[asyncio.Future, Any, BaseException | None]] = deque()
        self._telling = False  # whether the loop is about to look at them
        self._lock = threading.Lock()
        self._pending = self._threads = 0  # numbers of calls, and of threads that are not left behind

    async def call(self, func: Callable[[], T], seconds: float | None, message: str) -> T:
        """Return the function's result. When the waiting ends before, the thread is interrupted and left behind.

        Args:
            seconds: None for no limit.
            message: the error's message.
        Raises:
            TimeoutError: the time is over.
        """
        call, is_left = Call(func, self._loop.create_future()), False
        self._calls.put(call)
        self._add(calls=1)
        if seconds is not None:
            self._expire(call, seconds, message)
        try:
            value, error = await call.returned
        except BaseException:
            is_left = not call.begun.acquire(blocking=False) and call.ended.acquire(blocking=False)
            if is_left and call.thread is not None:
                interrupt(call.thread)
            raise
        finally:
            self._add(calls=-1, threads=-is_left)
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # its traceback has this frame

    def _add(self, calls: int, threads: int = 0) -> None:
        """Add to the numbers, and start a thread if one is missing."""
        with self._lock:
            self._pending += calls
            self._threads += threads
            if self._threads < min(self._pending, self._most):
                self._threads += 1
                threading.Thread(target=self._work, daemon=True).start()

    def _expire(self, call: Call, seconds: float, message: str) -> None:
        """End the waiting for a call that has run for some seconds, or look again when it has."""
        left = seconds if call.begin is None else call.begin + seconds - time.monotonic()
        if call.returned.done():
            return
        if left > 0:
            self._loop.call_later(left, self._expire, call, seconds, message)
        else:
            call.returned.set_exception(TimeoutError(message))

    def _work(self) -> None:
        """Make calls, in a thread, until there is none for a while."""
        with suppress(TimeUp, Empty), torch.no_grad():
            while True:
                call = self._next()
                value, error = None, None
                try:
                    value = call.func()
                except TimeUp:
                    raise
                except BaseException as raised:
                    error = raised
                if not call.ended.acquire(blocking=False):
                    time.sleep(MOMENT)  # the interruption may still be on its way
                    return
                self._returned.append((call.returned, value, error))
                if not self._telling:
                    self._telling = True
                    self._loop.call_soon_threadsafe(self._tell)
                del call, value, error  # a thread that waits keeps nothing alive

    def _next(self) -> Call:
        """Return the next call; for a thread, which ends if there is none.

        Raises:
            Empty: there is none for a while.
        """
        while True:
            try:
                call = self._calls.get(timeout=LULL)
            except Empty:
                with self._lock:
                    if self._calls.empty():
                        self._threads -= 1
                        raise
                continue
            call.thread, call.begin = threading.current_thread(), time.monotonic()
            if call.begun.acquire(blocking=False):
                return call

    def _tell(self) -> None:
        """Wake the coroutines whose calls have returned, in the event loop."""
        self._telling = False
        while self._returned:
            future, *outcome = self._returned.popleft()
            if not future.done():
                future.set_result(outcome)


@cache
def threads_of(loop: asyncio.AbstractEventLoop, most: float) -> Threads:
    """Return the threads of an event loop that make up to so many calls at once."""
    return Threads(loop, most)


async def call_in_thread(
    func: Callable[[], T], seconds: float | None = None, message: str = "", most: float = math.inf
) -> T:
    """Call a function in a thread; see `Threads`."""
    return await threads_of(asyncio.get_running_loop(), most).call(func, seconds, message)


def start_thread(func: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    """Call a function in a thread of its own, without gradients; `interrupt` ends the thread."""
    result = Future[T]()

    def run() -> None:
        with suppress(TimeUp), torch.no_grad():
            try:
                result.set_result(func())
            except TimeUp:
                raise
            except BaseException as error:
                result.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


async def start_call(func: Callable[[], Any], seconds: float | None, message: str) -> Any:
    """Return what a function returns, which of an async one is awaitable; see `call_with_limit`."""
    if inspect.iscoroutinefunction(func):
        return func()
    return await call_in_thread(func, seconds, message, MOST_THREADS)


async def call_with_limit(func: Callable[[], Any], seconds: float | None, message: str) -> Any:
    """Return the result of a function, plain or async, each with a time limit.

    A plain function runs in a thread; one that takes too long is interrupted. Compiled code that keeps the
    interpreter's lock, such as a regular expression, stops all threads.

    Args:
        seconds: None for no limit.
        message: the error's message.
    Raises:
        TimeoutError: the time is over.
    """
    value = await start_call(func, seconds, message)
    return await awaited_within(seconds, message, value) if inspect.isawaitable(value) else value
