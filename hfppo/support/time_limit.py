"""A time limit for synchronous functions.

Packages with signal timeouts raise an Exception, which `except Exception` in the function swallows. Packages with
worker processes need functions and models that can be pickled, and an environment would change in the worker only. In
a worker thread, a regular expression that backtracks keeps the interpreter's lock, and no other thread can stop it.
"""

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


class TimeUp(BaseException):
    """Raised inside the function; not an Exception, so that its own `except Exception` does not catch it."""


def require_main_thread(seconds: float | None) -> None:
    """Raise an error if plain code cannot have this time limit.

    Raises:
        RuntimeError: outside the main thread, where no signal arrives.
    """
    if seconds is not None and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "a time limit for plain code needs the main thread; leave timeout out, or write the function as async def"
        )


def call_within(seconds: float | None, message: str, func: Callable[[], Any]) -> Any:
    """Return the function's result, or raise a TimeoutError after some seconds.

    A timer signal interrupts Python code, sleep, locks, sockets and regular expressions. Other compiled code cannot be
    interrupted: the error is raised when it returns. After twice the time all threads' stacks are printed.

    Args:
        seconds: None for no limit.
        message: of the error.
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
            faulthandler.dump_traceback_later(2 * seconds, file=sys.__stderr__ or 2)
            timer = signal.setitimer(
                signal.ITIMER_REAL, seconds, seconds
            )  # repeated, for code that catches everything
            return func()
        finally:
            running = False
    except TimeUp as where:
        raise TimeoutError(message) from where
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, handler)
