"""Coroutines that run in the background and ask for something now and then."""

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from hfppo.support.calls import call_once, schedule

MOMENT = 0.005  # seconds; Python handles a Ctrl-C that comes just before a wait only after it

Q = TypeVar("Q")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked(Generic[Q]):
    """What a coroutine asks for; it waits until the Future has the answer."""

    question: Q
    answer: Future


class Questions(Generic[Q]):
    """Coroutines run in the event loop and ask, each at its own pace; the thread that runs this block answers.

    An error of a coroutine is raised by the next `wait`. At the end of the block all coroutines are cancelled.

    Args:
        coroutines: each gets a coroutine function to ask with.
    """

    def __init__(self, coroutines: Sequence[Callable[[Callable[[Q], Coroutine[Any, Any, Any]]], Coroutine]]):
        self._changed = threading.Condition()
        self._asked: dict[int, Asked[Q]] = {}
        self._busy = len(coroutines)  # coroutines that neither wait for an answer nor have ended
        self._running = [schedule(coroutine(partial(self._ask, i))) for i, coroutine in enumerate(coroutines)]
        self._later: list[Future] = []  # of `answer_later`
        for future in self._running:
            future.add_done_callback(lambda _: self._count(-1))

    def __enter__(self) -> "Questions[Q]":
        return self

    def __exit__(self, *error: object) -> None:
        for future in [*self._running, *self._later]:
            future.cancel()

    async def _ask(self, i: int, question: Q) -> Any:
        answer: Future[Any] = Future()
        self._asked[i] = Asked(question, answer)
        self._count(-1)
        return await asyncio.wrap_future(answer)

    def _count(self, busy: int) -> None:
        with self._changed:
            self._busy += busy
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
            while (self._busy or promised) and self._has_promised() == promised and left > 0:
                left = min(left, patience) if self._asked else left
                start = time.monotonic()
                self._changed.wait(MOMENT)
                # On a busy machine the wait is longer, and so are the calls.
                left -= min(time.monotonic() - start, MOMENT)
                self.results()
        return len(self.results()) < len(self._running)

    def results(self) -> list[Any]:
        """Return the results of the coroutines that have ended, in their order; raise the error of one that failed."""
        for future in self._later:
            if future.done():
                future.result()
        return [future.result() for future in self._running if future.done()]

    def take(self) -> list[Asked[Q]]:
        """Return what is asked, in the order of the coroutines."""
        with self._changed:
            taken, self._asked = [self._asked[i] for i in sorted(self._asked)], {}
        return taken

    def answer(self, asked: Sequence[Asked[Q]], answers: Sequence[object]) -> None:
        """Answer some coroutines."""
        self._count(len(asked))
        for one, answer in zip(asked, answers if asked else [], strict=True):
            one.answer.set_result(answer)

    def answer_later(self, asked: Sequence[Asked[Q]], answers: Callable[[], Sequence[object]]) -> None:
        """Answer some coroutines with the values of a function that is called in a thread."""
        if not asked:
            return

        async def answer() -> None:
            self.answer(asked, await call_once(answers))

        self._later.append(schedule(answer()))
        self._later[-1].add_done_callback(lambda _: self._count(0))


@contextmanager
def global_random_numbers(seed: int | None) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU) for the block, and restore their states.

    Warns once if the block draws from them, because concurrent calls draw in no fixed order.

    Args:
        seed: None leaves the generators alone, and watches Python's and NumPy's only.
    """

    def states() -> str:
        torchs = [] if seed is None else torch.get_rng_state().tolist()
        return repr((random.getstate(), np.random.get_state(legacy=False), torchs))

    with ExitStack() as restored:
        if seed is not None:
            restored.enter_context(torch.random.fork_rng(devices=[]))
            restored.callback(random.setstate, random.getstate())
            restored.callback(np.random.set_state, np.random.get_state())
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        first = states()
        try:
            yield
        finally:
            if states() != first:
                warn_of_global_draws()


@cache
def warn_of_global_draws() -> None:
    """Log a warning, once."""
    logger.warning(
        "a tool, an environment or a library drew from the global random numbers of Python, NumPy or torch; calls run "
        "at once, so another run with the same seed may draw others. Draw from random.Random(seed), with a seed that "
        "reset gets"
    )
