"""Callbacks that see rollouts."""

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import rich
from datasets import Dataset
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfppo.curves import PlotCallback
from hfppo.functional import adaptive_kl_coef
from hfppo.health import HealthCallback
from hfppo.history import LogFileCallback
from hfppo.model import ActorCritic
from hfppo.rollout import Rollout, Transcript
from hfppo.state import PPOState
from hfppo.visible import visible


class PPOCallback(TrainerCallback):
    """A TrainerCallback with two more events."""

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

    def on_update_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: ActorCritic,
        rollout: Rollout,
        ppo_state: PPOState,
    ) -> None:
        """Called on every process after the last optimiser step on a rollout, before that step is logged and saved.

        Args:
            model: what the update has made of the policy and the critic.
            rollout: this process's rows, as they were collected.
            ppo_state: of the rollout that has been used up.
        """


class TrainerHooks(TrainerCallback):
    """Calls functions of the trainer's own: when training begins, and after each optimiser step."""

    def __init__(self, train_begin: Callable[[], None], step_end: Callable[[], None]):
        self.train_begin, self.step_end = train_begin, step_end

    def on_train_begin(self, args, state, control, **kwargs):
        self.train_begin()

    def on_step_end(self, args, state, control, **kwargs):
        self.step_end()


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

    All of the first process's lie in `completions/completions_<step>.parquet` in the output folder, named and laid out
    as TRL does, and go as a table to W&B and trackio where `report_to` names them.

    Args:
        num_completions: rows to print.
    """

    def __init__(self, num_completions: int = 8):
        self.num_completions = num_completions

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state):
        if not state.is_world_process_zero:
            return
        columns = {"prompt": transcript.prompts, "completion": transcript.completions}
        for name, column in (*transcript.scores.items(), *transcript.extra.items()):
            while name in (*columns, "step", "score"):  # as the total is called in the file
                name += "_"
            columns[name] = column
        table = Table(title=f"step {state.global_step}", title_justify="left", show_lines=True)
        for name in columns:
            table.add_column(Text(visible(name)))
        for row in list(zip(*columns.values(), strict=False))[: self.num_completions]:
            table.add_row(*(Text(f"{x:.4g}" if isinstance(x, float) else visible(str(x))) for x in row))
        with tqdm.external_write_mode():  # the bar makes room
            rich.print(table)
        scores = {"score": rollout.scores.tolist()}
        self._save(args, {"step": [state.global_step] * len(rollout)} | columns | scores)

    def _save(self, args: TrainingArguments, columns: dict[str, list]) -> None:
        """Write the table into the output folder, and log it."""
        everything = Dataset.from_dict({name: of_one_type(column) for name, column in columns.items()})
        folder = Path(args.output_dir) / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        everything.to_pandas().to_parquet(folder / f"completions_{columns['step'][0]:05d}.parquet")
        log_table(args, "completions", everything)


def log_table(args: TrainingArguments, name: str, rows: Dataset) -> None:
    """Give a table to the trackers that Trainer reports to and that take tables, W&B and trackio."""
    for module in {"wandb", "trackio"} & set(args.report_to):
        tracker = import_module(module)
        tracker.log({name: tracker.Table(dataframe=rows.to_pandas())})


def of_one_type(column: list) -> list:
    """The column, as text if its values are of several types, which a table cannot hold."""
    try:
        Dataset.from_dict({"column": column})
    except (ValueError, TypeError, OverflowError):  # Arrow's own are some of these
        return [str(x) for x in column]
    return column


def with_default_callbacks(callbacks: list[TrainerCallback] | None, log_completions: bool) -> list[TrainerCallback]:
    """A user's callbacks and those that are on by default, unless the user has one of their kind."""
    # Trainer takes classes as well.
    made = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
    if not any(isinstance(callback, HealthCallback) for callback in made):
        targets = [callback.target for callback in made if isinstance(callback, AdaptiveKLCallback)]
        made.append(HealthCallback(max_kl=2 * targets[0]) if targets else HealthCallback())
    wanted = [LogFileCallback, PlotCallback, *([PrintCompletionsCallback] if log_completions else [])]
    return made + [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in made)]
