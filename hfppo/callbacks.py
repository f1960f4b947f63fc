"""Callbacks that see rollouts."""

import math

import rich
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfppo.functional import adaptive_kl_coef
from hfppo.health import HealthCallback
from hfppo.rollout import Rollout, Transcript
from hfppo.state import PPOState


class PPOCallback(TrainerCallback):
    """A TrainerCallback with one more event."""

    def on_rollout_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        rollout: Rollout,
        transcript: Transcript,
        metrics: dict[str, float],
        ppo_state: PPOState,
    ) -> None:
        """Called on every process after a rollout was collected, before its first update.

        Args:
            rollout: this process's rows.
            transcript: the same rows as text, with what each reward function said.
            metrics: the rollout's metrics over all processes, by the names of `hfppo.metrics.METRICS`.
            ppo_state: `kl_coef` set here holds from the next rollout on.
        """


class AdaptiveKLCallback(PPOCallback):
    """Steers the KL to the reference by changing β. arXiv:1909.08593, section 2.2.

    Its state is β itself, which is in the checkpoint.

    Args:
        target: KL per token to steer to, nats.
        horizon: completions over which β moves by at most 20 %.
    """

    def __init__(self, target: float = 0.1, horizon: float = 10_000):
        if not target > 0 or not horizon > 0:
            raise ValueError(f"target={target} and horizon={horizon} must be above 0")
        self.target, self.horizon = target, horizon

    def on_train_begin(self, args, state, control, **kwargs):
        if args.kl_coef == 0:
            raise ValueError("AdaptiveKLCallback multiplies kl_coef, and kl_coef=0 stays 0; start from 0.05, say")

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state):
        completions = len(rollout) * args.world_size
        ppo_state.kl_coef = adaptive_kl_coef(
            ppo_state.kl_coef, metrics.get("kl", math.nan), self.target, self.horizon, completions
        )


class PrintCompletionsCallback(PPOCallback):
    """Prints some completions of each rollout with their scores. `log_completions=True` adds it.

    Args:
        num_completions: rows to print.
    """

    def __init__(self, num_completions: int = 8):
        self.num_completions = num_completions

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state):
        if not state.is_world_process_zero:
            return
        columns = {"prompt": transcript.prompts, "completion": transcript.completions}
        columns |= transcript.scores | transcript.extra
        table = Table(*columns, title=f"step {state.global_step}", title_justify="left", show_lines=True)
        for row in list(zip(*columns.values(), strict=False))[: self.num_completions]:
            table.add_row(*(Text(f"{x:.4g}" if isinstance(x, float) else str(x)) for x in row))
        rich.print(table)


def with_default_callbacks(callbacks: list[TrainerCallback] | None, log_completions: bool) -> list[TrainerCallback]:
    """A user's callbacks and those that are on by default, unless the user has one of their kind."""
    made = list(callbacks or [])
    if not any(isinstance(callback, HealthCallback) for callback in made):
        targets = [callback.target for callback in made if isinstance(callback, AdaptiveKLCallback)]
        made.append(HealthCallback(max_kl=2 * targets[0]) if targets else HealthCallback())
    if log_completions and not any(isinstance(callback, PrintCompletionsCallback) for callback in made):
        made.append(PrintCompletionsCallback())
    return made
