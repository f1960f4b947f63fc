"""Call functions of users, plain or async, with time limits."""

import asyncio
import ctypes
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MOMENT = 0.05  # seconds
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


@asynccontextmanager
async def time_limit(seconds: float | None, message: str) -> AsyncIterator[None]:
    """Cancel the block after some seconds.

    Args:
        seconds: None for no limit.
        message: the error's message.
    Raises:
        TimeoutError: the time is over.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(message) from error
        raise


async def awaited_within(seconds: float | None, message: str, value: object) -> Any:
    """Return the value, or the result of an awaitable that has a `time_limit`."""
    async with time_limit(seconds, message):
        return await awaited(value)


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


class Worker(threading.Thread):
    """A daemon thread that calls functions one after the other, without gradients; `interrupt` ends it.

    Making a thread takes longer than a game's step, so one whose call has returned waits in `IDLE` for the next.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Call functions until there is None, or nothing for a while."""
        with suppress(TimeUp), torch.no_grad():
            while True:
                try:
                    call = self._calls.get(timeout=MOMENT)
                except Empty:
                    with suppress(ValueError):  # it has been taken for a call, or is not back yet
                        IDLE.remove(self)
                        return
                    continue
                if call is None:
                    return
                func, result = call
                try:
                    result.set_result(func())
                except TimeUp:
                    raise
                except BaseException as error:
                    result.set_exception(error)
                del call, func, result  # a thread that waits keeps nothing alive

    def call(self, func: Callable[[], T]) -> Future[T]:
        """Begin to call a function."""
        result = Future[T]()
        self._calls.put((func, result))
        return result

    def end(self) -> None:
        """End the thread when its call has returned."""
        self._calls.put(None)


IDLE: list[Worker] = []


def start_thread(func: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    """Call a function in a thread of its own; `interrupt` ends the thread."""
    worker = Worker()
    result = worker.call(func)
    worker.end()
    return worker, result


async def call_in_thread(func: Callable[[], T]) -> T:
    """Call a function in a thread. If the waiting is cancelled, the thread is interrupted and left behind."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    try:
        worker = IDLE.pop()
    except IndexError:
        worker = Worker()
    if not worker.is_alive():  # of the process from which this one was forked
        worker = Worker()
    result = worker.call(func)
    result.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    try:
        await done.wait()
    except BaseException:
        if not result.done():
            interrupt(worker)
        worker.end()
        raise
    IDLE.append(worker)
    return result.result()


@cache
def room_in(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """Return what bounds the concurrent plain calls of an event loop."""
    return asyncio.Semaphore(MOST_THREADS)


async def start_call(func: Callable[[], Any], seconds: float | None, message: str) -> Any:
    """Return what a function returns, which of an async one is awaitable; see `call_with_limit`."""
    if inspect.iscoroutinefunction(func):
        return func()
    async with room_in(asyncio.get_running_loop()), time_limit(seconds, message):
        return await call_in_thread(func)


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
    return await awaited_within(seconds, message, await start_call(func, seconds, message))
