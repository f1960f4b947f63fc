"""A callback that records token traces during a run."""

import logging
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from hfppo.callbacks import PPOCallback
from hfppo.collect.check_finite import NonFiniteError
from hfppo.functional import Clip
from hfppo.models.modes import is_sharded
from hfppo.reporting.completions import log_table
from hfppo.reporting.traces import add_update, first_traces, read_traces, remove_traces, trace_file, write_traces

logger = logging.getLogger(__name__)


class TokenTraceCallback(PPOCallback):
    """Records the numbers of actor, reference, reward and critic for some completions, before and after the update.

    Each traced rollout has a file of JSON lines in `output_dir/_traces`, and `python -m hfppo.report OUTPUT_DIR` makes
    a page that shows them. After the update the rows also go as a table to W&B and
    trackio if `report_to` names them. Only the main process writes. If FSDP2 or ZeRO-3 shard the model, the numbers
    after the update are left out.

    Args:
        every: trace every n-th rollout; the first and the last are always traced.
        num_completions: number of completions per traced rollout, the first ones of the main process.
        trainer: the `PPOTrainer`, needed with `prompts`; add this callback with `trainer.add_callback`.
        prompts: texts or conversations to complete and trace in place of the run's own completions. They are sampled
            with the same random numbers each time, do not affect training, and none of their numbers are whitened.
        columns: further columns that the reward functions need, one entry per prompt each.

    Raises:
        ValueError: a number below 1, only some of prompts, columns and trainer, or no `critic_prompt` for a critic
            that was trained with it.
    """

    def __init__(
        self,
        every: int = 10,
        num_completions: int = 4,
        *,
        trainer: Any = None,
        prompts: Sequence[str] | Sequence[list[dict[str, Any]]] | None = None,
        **columns: Sequence[object],
    ):
        if every < 1 or num_completions < 1:
            raise ValueError(f"every={every} and num_completions={num_completions} must be at least 1")
        given = [trainer is not None, prompts is not None]
        if any(given) != all(given) or (columns and not all(given)):
            raise ValueError(
                f"prompts, trainer and columns ({', '.join(columns) or 'none'}) belong together; use "
                "trainer.add_callback(TokenTraceCallback(trainer=trainer, prompts=[...]))"
            )
        if trainer is not None and trainer.model.critic is not None:
            trainer.model.critic.check_columns(columns)
        self._kind = "rollout" if prompts is None else "prompts"
        self.every, self.num_completions = every, num_completions
        self.trainer, self.prompts, self.columns = trainer, prompts, columns

    def on_rollout_end(self, args, state, control, *, rollout, ppo_state, processing_class=None, **kwargs):
        number, step = ppo_state.rollouts, state.global_step
        if state.is_world_process_zero:
            remove_traces(args.output_dir, number, self._kind)
        last = step + args.updates_per_rollout >= state.max_steps
        if (number - 1) % self.every and not last:
            return
        if self.trainer is not None:
            try:
                rollout = self.trainer.rollout(self.prompts, **self.columns)  # every process calls it, or raises
            except NonFiniteError as error:
                logger.warning("the prompts are not traced at rollout %d: %s", number, error)
                return
        if state.is_world_process_zero:
            count = self.num_completions if self.trainer is None else len(rollout)
            traces = first_traces(rollout, count, processing_class, args, ppo_state, step, self._kind)
            write_traces(trace_file(args.output_dir, number, self._kind), traces)

    def on_update_end(self, args, state, control, *, model, ppo_state, **kwargs):
        path = trace_file(args.output_dir, ppo_state.rollouts, self._kind)
        if not (state.is_world_process_zero and path.exists()):
            return
        traces = read_traces(path)
        if not is_sharded(model):  # a forward pass needs the other processes as well
            clip = Clip(ppo_state.cliprange, ppo_state.cliprange_high, args.dual_clip)
            traces = [add_update(trace, model, args, clip, state.global_step) for trace in traces]
            write_traces(path, traces)
        log_table(args, "traces", Dataset.from_list([row for trace in traces for row in trace.token_rows()]))
