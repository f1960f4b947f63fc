"""Run users' functions concurrently, with their own random numbers."""

import inspect
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from hfppo.support.calls import TimeUp, interrupt, schedule

MOST_THREADS = 64  # maximum number of concurrent plain calls
MOMENT = 0.005  # seconds; Python handles a Ctrl-C that comes just before a wait only after it

logger = logging.getLogger(__name__)


class Background:
    """Runs functions concurrently in its block: plain code in threads, awaitables that they return in the event loop.

    The global generators are the block's own: seeded at its beginning, their states restored at its end. An error
    leaves the block without waiting: awaitables are cancelled, and threads are interrupted and end when they can.

    Args:
        seed: seeds the global generators. None leaves them alone, because other code runs during the block.
    """

    def __init__(self, seed: int | None):
        self.pending = 0  # calls whose Futures `finished` has not returned
        self._random_state = global_random_numbers(seed)
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue = SimpleQueue()
        self._done: SimpleQueue = SimpleQueue()
        self._awaited: set[Future] = set()

    def __enter__(self) -> "Background":
        self._random_state.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.pending:
            for thread in self._threads:
                interrupt(thread)
            for future in [*self._awaited]:
                future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        self._random_state.__exit__(*error)

    def start(self, key: Hashable, func: Callable[[], object]) -> None:
        """Call a function, and await what it returns if that is awaitable."""
        self.pending += 1
        if len(self._threads) < min(self.pending, MOST_THREADS):
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()
        self._jobs.put((key, func))

    def finished(self) -> list[tuple[Any, Future]]:
        """Wait a moment for a call, and return the keys and Futures of all that have finished."""
        found = []
        with suppress(Empty):
            found.append(self._done.get(timeout=MOMENT))
            while True:
                found.append(self._done.get_nowait())
        self.pending -= len(found)
        return found

    def _work(self) -> None:
        """Run calls, in a thread."""
        with suppress(TimeUp), torch.no_grad():
            while (job := self._jobs.get()) is not None:
                key, func = job
                future: Future = Future()
                try:
                    value = func()
                    if inspect.isawaitable(value):
                        future = schedule(value)
                        self._awaited.add(future)
                    else:
                        future.set_result(value)
                except TimeUp:
                    raise
                except BaseException as error:
                    future.set_exception(error)
                future.add_done_callback(partial(self._put, key))

    def _put(self, key: Hashable, future: Future) -> None:
        self._awaited.discard(future)
        self._done.put((key, future))


class Tasks:
    """Advances generators, each at its own pace.

    A generator yields functions, which are called in the background, and receives their Futures. Anything else that it
    yields is `ready`, until `give` answers it.
    """

    def __init__(self, tasks: Sequence[Generator[Any, Any, Any]], background: Background):
        self.tasks, self.background = tasks, background
        self.ready: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.promised: set[tuple[int, ...]] = set()  # the tasks of each call of `give_later` that has not finished
        for i in range(len(tasks)):
            self._advance(i, None)

    def _advance(self, i: int, received: object) -> None:
        try:
            wanted = self.tasks[i].send(received)
        except StopIteration as end:
            self.results[i] = end.value
            return
        if callable(wanted):
            self.background.start(i, wanted)
        else:
            self.ready[i] = wanted

    def wait(self, patience: float, timed: Callable[[], AbstractContextManager]) -> bool:
        """Advance tasks whose calls finish, until no call runs, or for some seconds after a task is ready.

        Args:
            timed: measures the waiting, unless a call of `give_later` runs; the waiting ends when the last one does.
        Returns:
            whether a task has no result.
        """
        promised, left = bool(self.promised), math.inf
        with nullcontext() if promised else timed():
            while self.background.pending and bool(self.promised) == promised and left > 0:
                left = min(left, patience) if self.ready else left
                start = time.monotonic()
                found = self.background.finished()
                # On a busy machine the wait is longer, and so are the calls.
                left -= min(time.monotonic() - start, MOMENT)
                for key, called in found:
                    if isinstance(key, tuple):
                        self.promised.discard(key)
                        self.give(key, called.result())
                    else:
                        self._advance(key, called)
        return len(self.results) < len(self.tasks)

    def take_ready(self) -> dict[int, Any]:
        """Return what is ready, in the order of the tasks, which wait until `give` answers them."""
        taken, self.ready = dict(sorted(self.ready.items())), {}
        return taken

    def give(self, tasks: Iterable[int], value: object) -> None:
        """Advance tasks, each with the value and its number among them."""
        for number, i in enumerate(tasks):
            self._advance(i, (value, number))

    def give_later(self, tasks: Iterable[int], func: Callable[[], object]) -> None:
        """Give tasks the value of a function that is called in the background."""
        self.promised.add(tuple(tasks))
        self.background.start(tuple(tasks), func)


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

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        first = states()
        try:
            yield
        finally:
            if states() != first:
                warn_of_global_draws()
            if seed is not None:
                random.setstate(python)
                np.random.set_state(numpy)


@cache
def warn_of_global_draws() -> None:
    """Log a warning, once."""
    logger.warning(
        "a tool, an environment or a library drew from the global random numbers of Python, NumPy or torch; calls run "
        "at once, so another run with the same seed may draw others. Draw from random.Random(seed), with a seed that "
        "reset gets"
    )
