"""Callbacks that see rollouts."""

import math
import warnings
from typing import Any

import rich
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfppo.functional import adaptive_kl_coef
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


def tell_rollout(
    callbacks: list[TrainerCallback],
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    **rollout: Any,
) -> None:
    """Call `on_rollout_end`, whose arguments these are, of those that have it."""
    for callback in callbacks:
        if isinstance(callback, PPOCallback):
            callback.on_rollout_end(args, state, control, **rollout)


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


class ClipMetricsCallback(PPOCallback):
    """Warns, once per cause, when clip and ratio metrics show a run that goes wrong. On by default.

    Args:
        max_clip_frac: share of clipped tokens above which the update is too large.
        max_first_ratio_deviation: |ratio − 1| on a rollout's first mini-batch above which the passes disagree.
        min_kl: nats per token below which a k1 estimate is more than noise.
    """

    def __init__(self, max_clip_frac: float = 0.5, max_first_ratio_deviation: float = 0.05, min_kl: float = -0.05):
        self.max_clip_frac = max_clip_frac
        self.max_first_ratio_deviation = max_first_ratio_deviation
        self.min_kl = min_kl
        self._warned: set[str] = set()

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        if (share := logs.get("policy/clip_frac", 0.0)) > self.max_clip_frac:
            self._warn(
                "policy/clip_frac",
                f"policy/clip_frac is {share:.2f}: most tokens are clipped and teach nothing. Lower learning_rate "
                f"(now {args.learning_rate:g}), or num_ppo_epochs (now {args.num_ppo_epochs}).",
            )
        if (deviation := logs.get("policy/first_ratio_deviation", 0.0)) > self.max_first_ratio_deviation:
            self._warn(
                "policy/first_ratio_deviation",
                f"policy/first_ratio_deviation is {deviation:.3g}: on a rollout's first mini-batch the ratio must be "
                "1. The rollout's pass and the update's pass disagree: low precision (try float32), "
                "policy_mode='bypass' with a sampler whose numerics differ, or noise in the model such as dropout.",
            )
        if (kl := logs.get("kl", 0.0)) < self.min_kl:
            self._warn(
                "kl",
                f"kl is {kl:.3g} nats per token, and a KL is never negative: the completions were not drawn from the "
                "policy that scores them (impure sampling, a wrong mask or temperature), or too few of them were.",
            )

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(message, stacklevel=2)


def with_default_callbacks(callbacks: list[TrainerCallback] | None, log_completions: bool) -> list[TrainerCallback]:
    """A user's callbacks and those that are on by default, unless the user has one of their kind."""
    given = list(callbacks or [])
    wanted = [ClipMetricsCallback, *([PrintCompletionsCallback] if log_completions else [])]
    return given + [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in given)]
