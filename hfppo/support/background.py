"""Coroutines that run in the background and ask for something now and then."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from hfppo.support.calls import call_in_thread, schedule

MOMENT = 0.005  # seconds; Python handles a Ctrl-C that comes just before a wait only after it

Q = TypeVar("Q")
Ask = Callable[[Q], Coroutine[Any, Any, Any]]


@dataclass(eq=False)
class Asked(Generic[Q]):
    """What a coroutine asks for; it waits until the Future of its event loop has the answer."""

    number: int  # of the coroutine
    question: Q
    answer: asyncio.Future


class Questions(Generic[Q]):
    """Coroutines run in the event loop and ask, each at its own pace; the thread that runs this block answers.

    A coroutine is busy unless it has ended, or waits for an answer or for room. An error of a coroutine is raised by
    the next `wait`. At the end of the block all coroutines are cancelled.

    Args:
        coroutines: each gets a coroutine function to ask with, in any event loop.
        room: number of coroutines that run at once; None: all.
    """

    def __init__(self, coroutines: Sequence[Callable[[Ask[Q]], Coroutine]], room: int | None = None):
        self._changed = threading.Condition()  # its lock may be taken twice by one thread
        self._room = asyncio.Semaphore(room or len(coroutines))
        self._asked: list[Asked[Q]] = []
        self._waits = [0] * len(coroutines)  # for how many answers, or for room
        self._ended = [False] * len(coroutines)
        self._busy = len(coroutines)
        self._failed: list[Future] = []
        self._running = [schedule(self._run(i, coroutine)) for i, coroutine in enumerate(coroutines)]
        self._later: list[Future] = []  # of `answer_later`
        for i, future in enumerate(self._running):
            future.add_done_callback(partial(self._end, i))

    def __enter__(self) -> "Questions[Q]":
        return self

    def __exit__(self, *error: object) -> None:
        for future in [*self._running, *self._later]:
            future.cancel()

    async def _run(self, number: int, coroutine: Callable[[Ask[Q]], Coroutine]) -> Any:
        self._wait_for(1, number)
        async with self._room:
            self._wait_for(-1, number)
            return await coroutine(partial(self._ask, number))

    async def _ask(self, number: int, question: Q) -> Any:
        asked = Asked(number, question, asyncio.get_running_loop().create_future())
        with self._changed:
            self._asked.append(asked)
            self._wait_for(1, number)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            with self._changed:
                if asked in self._asked:  # it is not taken yet
                    self._asked.remove(asked)
                    self._wait_for(-1, number)
            raise

    def _wait_for(self, more: int, *numbers: int) -> None:
        """Note that some coroutines wait for more, or for less."""
        with self._changed:
            for number in numbers:
                was_busy = not self._waits[number]
                self._waits[number] += more
                if not self._ended[number]:
                    self._busy += (not self._waits[number]) - was_busy
            if not self._busy:  # otherwise the thread that waits would wake at every question
                self._changed.notify()

    def _end(self, number: int, future: Future) -> None:
        """Note that a coroutine has ended."""
        with self._changed:
            self._ended[number] = True
            self._busy -= not self._waits[number]
            self._note_failure(future)

    def _note_failure(self, future: Future) -> None:
        with self._changed:
            if not future.cancelled() and future.exception() is not None:
                self._failed.append(future)
            self._changed.notify()

    def _has_promised(self) -> bool:
        return not all(future.done() for future in self._later)

    def wait(self, patience: float = math.inf, timed: Callable[[], AbstractContextManager] = nullcontext) -> bool:
        """Wait until no coroutine is busy, or for some seconds after one has asked.

        Args:
            timed: measures the waiting, unless a call of `answer_later` runs; the waiting ends when the last one does.
        Returns:
            whether a coroutine has no result.
        """
        promised, left = self._has_promised(), math.inf
        with nullcontext() if promised else timed(), self._changed:
            while (self._busy or promised) and self._has_promised() == promised and left > 0 and not self._failed:
                left = min(left, patience) if self._asked else left
                start = time.monotonic()
                self._changed.wait(MOMENT)
                # On a busy machine the wait is longer, and so are the calls.
                left -= min(time.monotonic() - start, MOMENT)
        for future in self._failed:
            future.result()
        return not all(self._ended)

    def results(self) -> list[Any]:
        """Return the results of the coroutines that have ended, in their order."""
        return [future.result() for future in self._running if future.done()]

    def take(self) -> list[Asked[Q]]:
        """Return what is asked, in the order of the coroutines."""
        with self._changed:
            asked, self._asked = self._asked, []
        return sorted(asked, key=lambda one: one.number)

    def answer(self, asked: Sequence[Asked[Q]], answers: Sequence[object]) -> None:
        """Answer some coroutines."""
        self._wait_for(-1, *(one.number for one in asked))
        pairs = [*zip(asked, answers if asked else [], strict=True)]
        for loop in {one.answer.get_loop() for one in asked}:  # each is woken once
            loop.call_soon_threadsafe(set_answers, [pair for pair in pairs if pair[0].answer.get_loop() is loop])

    def answer_later(self, asked: Sequence[Asked[Q]], answers: Callable[[], Sequence[object]]) -> None:
        """Answer some coroutines with the values of a function that is called in a thread."""
        if not asked:
            return

        async def answer() -> None:
            self.answer(asked, await call_in_thread(answers))

        self._later.append(schedule(answer()))
        self._later[-1].add_done_callback(self._note_failure)


def set_answers(answered: Sequence[tuple[Asked, object]]) -> None:
    """Set the Futures of the event loop that calls this, but for those that were cancelled."""
    for asked, answer in answered:
        if not asked.answer.done():
            asked.answer.set_result(answer)
