"""Sample and score the next rollout in a thread, while the trainer learns from the one before.

The schedule depends on rollout numbers only, never on the clock: when the update on rollout r begins, rollout r + 1 is
sampled with the weights of that moment. A checkpoint has these weights and the prompts, so a resumed run samples the
same rollout again.
"""

import copy
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from hfppo.collect.candidates import Choice
from hfppo.collect.collector import Collector, PhaseDisplay, Phases, Sampled
from hfppo.data.prompt_stream import PromptStream
from hfppo.data.prompts import Prompts, Row
from hfppo.generation import keeping_policy
from hfppo.generation.generate import SnapshotSampler
from hfppo.generation.sampler_check import check_sampler
from hfppo.metrics import parts, parts_of
from hfppo.models.modes import place_model
from hfppo.support.calls import interrupt, start_thread, wait_briefly

PATIENCE = 5.0  # seconds that an interrupted thread gets to end


@dataclass(frozen=True)
class Order:
    """A rollout to be sampled ahead; part of a checkpoint."""

    choice: Choice  # its prompts
    weights: Mapping[str, Tensor]  # of the adapter that samples
    state: TrainerState  # of the step at which it was begun; reward functions see it

    def split(self) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """Return plain values, and the weights."""
        window = self.choice.positions
        choice = {**vars(self.choice), "positions": [window.start, window.stop]}
        return {"choice": choice, "state": asdict(self.state)}, self.weights

    @classmethod
    def join(cls, plain: dict[str, Any], weights: Mapping[str, Tensor]) -> "Order":
        """Make an order from what `split` returned."""
        choice = Choice(**{**plain["choice"], "positions": range(*plain["choice"]["positions"])})
        return cls(choice, weights, TrainerState(**plain["state"]))


class RolloutAhead:
    """The rollout that is sampled ahead.

    Args:
        collector: collects rollouts in the trainer's own thread.

    Raises:
        ValueError: the sampler reads weights that are trained meanwhile.
    """

    def __init__(self, collector: Collector):
        # A tokenizer keeps truncation and padding of its latest call, so a callback's call would change the thread's.
        tokenizer, player = copy.deepcopy(collector.tokenizer), collector.player
        if player is not None:
            player = replace(player, chat_format=replace(player.chat_format, tokenizer=tokenizer))
        sampler = keeping_policy(collector.sampler)  # samples from the weights of the order
        self.collector = replace(collector, sampler=sampler, tokenizer=tokenizer, player=player)
        self.order: Order | None = None  # None: nothing is sampled ahead
        self._thread: threading.Thread | None = None  # None: the order has not begun
        self._sampled: Future[tuple[Sampled, float]] = Future()  # and when it was done, by time.monotonic

    def prepare(self, device: torch.device) -> None:
        """Move the sampler's copy of the actor to its device, and check the sampler there."""
        sampler = self.collector.sampler
        if isinstance(sampler, SnapshotSampler):
            place_model(sampler.model, device)
        check_sampler(sampler, device)

    def begin(self, choice: Choice, prompts: Prompts | PromptStream, state: TrainerState) -> None:
        """Begin to sample chosen prompts with the present policy."""
        now = replace(state, log_history=[*state.log_history])
        self.order = Order(choice, self.collector.model.actor_weights(), now)
        self.resume(prompts)

    def resume(self, prompts: Prompts | PromptStream) -> None:
        """Begin to sample the order, if there is one and it has not begun, as after a checkpoint is loaded."""
        if self.order is None or self._thread is not None:
            return
        model, ready = self.collector.model, ExitStack()
        trained = model.actor_weights()
        model.load_actor_weights(self.order.weights)  # a resumed run has trained on since
        try:
            ready.enter_context(self.collector.sampler.ready())
        finally:
            model.load_actor_weights(trained)
        rows = self.collector.rows_of(self.order.choice, prompts)
        self._thread, self._sampled = start_thread(partial(self._sample, rows, self.order.state, ready))

    def _sample(self, rows: list[Row], state: TrainerState, ready: AbstractContextManager) -> tuple[Sampled, float]:
        """Sample and score rows, in the thread."""
        collector = self.collector
        phase, device = Phases(collector.args.use_vllm, nullcontext), collector.accelerator.device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)  # each thread begins with the first device
        sampled = collector.sample(rows, state, phase, ready)
        with sampled.pending, phase("rollout"), phase("rewards"):
            sampled.pending.result()
        return sampled, time.monotonic()

    def take(self, step: int, show: PhaseDisplay) -> tuple[Order, Sampled]:
        """Wait for the rollout, and return it; the next one may then begin.

        Args:
            step: the global step, for the rollout's age.
            show: shows the waiting.
        Raises:
            Exception: of sampler, environment or reward function, with its own traceback.
        """
        order, start = self.order, time.monotonic()
        assert order is not None
        with show("waiting"):
            self.wait()
        self.order = self._thread = None
        sampled, ended = self._sampled.result()
        age = torch.full((len(sampled.samples),), step - order.state.global_step)  # once for each completion
        measures = {
            "ahead/age": parts(age),
            "time/trainer_waited": parts_of(max(0.0, ended - start)),
            "time/sampler_waited": parts_of(max(0.0, start - ended)),
        }
        return order, replace(sampled, phase=replace(sampled.phase, show=show), measures=measures)

    def wait(self) -> None:
        """Wait until nothing is sampled; an error is kept until `take`."""
        if self._thread is not None:
            wait_briefly([self._sampled])

    def close(self) -> None:
        """Interrupt the sampling, and forget the order."""
        thread, self._thread, self.order = self._thread, None, None
        if thread is not None and thread.is_alive():
            interrupt(thread)
            thread.join(PATIENCE)
