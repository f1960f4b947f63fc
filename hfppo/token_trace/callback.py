"""Records token traces during a run."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset

from hfppo.callbacks.events import PPOCallback
from hfppo.learn.step_guard import NonFiniteError
from hfppo.models.output_head import is_sharded
from hfppo.reporting.completions import log_table
from hfppo.rollout import Rollout
from hfppo.support.files import ignore_write_errors
from hfppo.token_trace.page import write_page
from hfppo.token_trace.record import (
    TRACES,
    after_update,
    read_traces,
    recorded,
    rollout_of,
    trace_file,
    traces_of,
    write_traces,
)
from hfppo.token_trace.table import TokenTable

logger = logging.getLogger(__name__)


class Collects(Protocol):
    """A `PPOTrainer`, as far as it is needed here."""

    def rollout(self, prompts: Sequence[Any], **columns: Sequence[Any]) -> Rollout:
        """Collect a rollout for given prompts."""


class TokenTraceCallback(PPOCallback):
    """Records what actor, reference, reward and critic say about single completions, before and after the update.

    Each traced rollout has a file of JSON lines in `output_dir/_traces`. When training ends, `index.html` beside them
    shows them all; `python -m hfppo.token_trace OUTPUT_DIR` makes that page at any time. After the update they go as a
    table to W&B and trackio where `report_to` names them. Only the main process writes. Where FSDP2 or ZeRO-3 shard
    the model, what the update did is left out.

    Args:
        every: rollouts from one traced one to the next; the first and the last are always traced.
        num_completions: completions of a traced rollout, the first of the main process.
        trainer: needed with `prompts`; so add this callback with `trainer.add_callback`.
        prompts: texts or conversations to complete and trace in place of the run's own completions. They are drawn
            with the same random numbers each time, training does not notice, and nothing of them is whitened.
        columns: what else the reward functions need, one entry per prompt each.

    Raises:
        ValueError: a number below 1, or prompts without a trainer.
        TypeError: columns without prompts.
    """

    def __init__(
        self,
        every: int = 10,
        num_completions: int = 4,
        *,
        trainer: Collects | None = None,
        prompts: Sequence[Any] | None = None,
        **columns: Sequence[Any],
    ):
        if every < 1 or num_completions < 1:
            raise ValueError(f"every={every} and num_completions={num_completions} must be at least 1")
        if (prompts is None) != (trainer is None):
            raise ValueError(
                "prompts and trainer belong together: the trainer completes the prompts; "
                "trainer.add_callback(TokenTraceCallback(trainer=trainer, prompts=[...]))"
            )
        if prompts is None and columns:
            raise TypeError(f"{', '.join(columns)}: no such argument; columns belong to prompts, which are missing")
        self._kind = "rollout" if prompts is None else "prompts"
        self.every, self.num_completions = every, num_completions
        self.trainer, self.prompts, self.columns = trainer, prompts, columns

    def on_train_begin(self, args, state, control, processing_class=None, **kwargs):
        self._tokenizer = processing_class
        self._found = {path: path.stat().st_mtime_ns for path in recorded(args.output_dir)}

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state):
        number = ppo_state.rollouts
        if state.is_world_process_zero:
            for path, written in self._found.items():
                # Of an earlier run, or of this one, resumed from further back; unless another callback has written it.
                if rollout_of(path) >= number and path.exists() and path.stat().st_mtime_ns == written:
                    with ignore_write_errors(path):
                        path.unlink()
            self._found = {}
        last = state.global_step + args.updates_per_rollout >= state.max_steps
        if (number - 1) % self.every and not last:
            return
        if self.trainer is not None:
            try:
                rollout = self.trainer.rollout(self.prompts, **self.columns)  # a collective call, and so is its error
            except NonFiniteError as error:
                logger.warning("the prompts are not traced at rollout %d: %s", number, error)
                return
        if state.is_world_process_zero:
            # An AdaptiveKLCallback may have set β for the next rollout, which chosen prompts are completed with.
            kl_coef = metrics.get("kl_coef", ppo_state.kl_coef) if self.trainer is None else ppo_state.kl_coef
            count = len(rollout) if self.trainer is not None else min(self.num_completions, len(rollout))
            tables = [TokenTable.from_rollout(rollout, i, self._tokenizer, args.kl_estimator) for i in range(count)]
            traces = traces_of(rollout, tables, number, state.global_step, kl_coef)
            path = trace_file(args.output_dir, number, self._kind)
            with ignore_write_errors(path):
                write_traces(path, traces)

    def on_update_end(self, args, state, control, *, model, rollout, ppo_state):
        path = trace_file(args.output_dir, ppo_state.rollouts, self._kind)
        if not (state.is_world_process_zero and path.exists()):
            return
        traces = read_traces(path)
        if not is_sharded(model):  # its forward would need the other processes as well
            traces = after_update(traces, model, args, state.global_step)
            with ignore_write_errors(path):
                write_traces(path, traces)
        log_table(args, "traces", Dataset.from_list([row for trace in traces for row in trace.token_rows()]))

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and recorded(args.output_dir):
            with ignore_write_errors(Path(args.output_dir) / TRACES / "index.html"):
                write_page(args.output_dir)
