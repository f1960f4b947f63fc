"""A time limit for plain code, which holds."""

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


class TimeUp(BaseException):
    """Raised inside; no Exception, so that the code inside does not take it for an error of its own."""


def call_within(seconds: float | None, message: str, func: Callable[[], Any]) -> Any:
    """What a function returns, if it does so in time.

    A timer signal interrupts Python code, sleeping, locks and sockets, and regular expressions. Code that does not
    come back to the interpreter cannot be interrupted by anything: when it has taken twice the time, every thread's
    stack is printed and the process ends.

    Args:
        seconds: None for no limit.
        message: of the error.
    Raises:
        TimeoutError: the time was up; its cause holds the line at which the code was.
        RuntimeError: outside the main thread.
    """
    if seconds is None:
        return func()
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "a time limit for plain code needs the main thread; leave timeout out, or write the function as async def"
        )
    running = True

    def stop(*_: object) -> None:
        if running:
            raise TimeUp

    handler = signal.signal(signal.SIGALRM, stop)
    timer = (0.0, 0.0)
    try:
        # The alarm may ring at any line up to the one after `func`. The next is a whole limit away, so that what
        # puts things back is not interrupted.
        try:
            faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__ or 2)
            timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again, for one that catches everything
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
