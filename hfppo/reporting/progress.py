"""Show the progress of a run: a bar on a terminal, or a plain line from time to time."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm
from transformers import ProgressCallback, TrainerState

from hfppo.config import CHECKPOINTING, PPOConfig
from hfppo.support.log_entries import numbers_of
from hfppo.support.printing import is_terminal, show

LINE_EVERY = 30.0  # seconds between two lines where there is no terminal
BAR = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"
LINE = "step {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"

# The most-read metrics, in the line of a log: metric, label, format.
SHORT = (
    ("reward", "reward", "{:.3f}"),
    ("kl", "KL", "{:.4f}"),
    ("kl_coef", "β", "{:.3g}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("completions/truncated_frac", "cut", "{:.1%}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("policy/clip_frac", "clipped", "{:.1%}"),
    ("value/explained_variance", "explained", "{:.2f}"),
)


class RunProgress(ProgressCallback):
    """Trainer's progress bar with the phase of the rollout that is collected, and one short line per log.

    The trainer enters `phase` around each phase; the sampler calls `advance` with the share that is done. Both do
    nothing without a bar: with `disable_tqdm`, and on processes other than the first.
    """

    training_bar: tqdm | None  # disabled if stderr is not a terminal; None outside of training

    def __init__(self) -> None:
        super().__init__()
        self._phases: list[str] = []  # entered, outermost first

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase while the block runs; phases may be nested, as generation is in a rollout.

        Args:
            name: the metric that measures it, such as "time/generation".
        """
        self._phases.append(name.removeprefix("time/"))
        self._show(redraw=True)
        try:
            yield
        finally:
            self._phases.pop()
            self._show(redraw=True)

    def advance(self, share: float) -> None:
        """Show how much of the current phase is done, from 0 to 1."""
        self._show(f"{share:.0%}")

    def on_train_begin(self, args, state, control, **kwargs):
        """Print the sizes of the run, and start the bar at the step of the checkpoint that is resumed."""
        self._first = self.current_step = state.global_step
        self._began = self._last_line = time.monotonic()
        if state.is_world_process_zero:
            show(print, describe_rollouts(args, state), file=sys.stderr, flush=True)
            # `smoothing=0` averages over the whole run: rollouts and steps alternate, so the latest rate says little.
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                bar_format=BAR,
                dynamic_ncols=True,
                smoothing=0,
                miniters=0,
                file=sys.stderr,
                disable=not is_terminal(sys.stderr),
            )

    def on_step_end(self, args, state, control, **kwargs):
        """Advance by a step."""
        super().on_step_end(args, state, control, **kwargs)
        self._show()

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Show Trainer's bar for evaluations, on a terminal."""
        if is_terminal(sys.stderr):
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write one short line for a log of training steps, and other logs as Trainer does."""
        if self.training_bar is not None and "loss" in logs:
            cells = [f"{label} {text}" for label, text in short_cells(logs).items()]
            show(print, f"step {state.global_step}", *cells, sep="  ")
        else:
            show(super().on_log, args, state, control, logs=logs, **kwargs)

    def _show(self, share: str = "", redraw: bool = False) -> None:
        """Draw the bar, at most every 0.1 s unless `redraw`; without a terminal print a line every 30 s."""
        bar, now = self.training_bar, time.monotonic()
        if bar is None:
            return
        doing = " ".join([*self._phases, share]).strip()
        if not bar.disable:
            bar.set_postfix_str(doing, refresh=redraw)
            bar.update(0)
        elif now - self._last_line >= LINE_EVERY:
            self._last_line = now
            elapsed = now - self._began
            place = {"n": self.current_step, "total": bar.total, "initial": self._first, "elapsed": elapsed}
            show(print, tqdm.format_meter(**place, postfix=doing, bar_format=LINE), file=sys.stderr, flush=True)


def short_cells(logs: dict[str, float]) -> dict[str, str]:
    """Return the most-read metrics of a log, formatted, by their labels, and the time of a rollout and its update."""
    logs = numbers_of(logs)
    shown = {metric: x for metric, x in logs.items() if metric != "kl_coef" or x}  # without a penalty, no β
    cells = {label: form.format(shown[metric]) for metric, label, form in SHORT if metric in shown}
    if "time/rollout" in logs:
        ahead = "time/trainer_waited" in logs  # then it was sampled during an update
        rollout = logs["time/trainer_waited"] + logs["time/passes"] if ahead else logs["time/rollout"]
        others = logs.get("time/candidates", 0.0) + logs.get("time/update", 0.0)
        cells["time"] = f"{rollout + others:.1f} s"
    return cells


def describe_rollouts(args: PPOConfig, state: TrainerState) -> str:
    """Return the number of rollouts in a run, their sizes, and on a GPU the settings that follow from base and GPU."""
    rollouts, size = -(-state.max_steps // args.updates_per_rollout), args.rollout_size_per_process
    total = f"{rollouts} rollout{'s' * (rollouts != 1)} of {size * args.world_size} completions ({size} per process)"
    sizes = f"{total}, {args.updates_per_rollout} optimizer steps each"
    if args.device.type != "cuda":
        return sizes
    checkpointing = any(getattr(args, name) for name in CHECKPOINTING)
    rows = args.local_rollout_forward_batch_size or "as free memory allows"
    switches = f"autocast: {args.mixed_precision}, activation_checkpointing: {checkpointing}"
    return f"{sizes}\n{switches}, rows sampled at once: {rows}"


def show_resume(checkpoint: str, rollout: int, state: TrainerState) -> None:
    """Print, on the main process, where a resumed run begins.

    Args:
        rollout: number of the rollout, from 1, that the next step belongs to.
    """
    if state.is_world_process_zero:
        begin = f"rollout {rollout}, step {state.global_step} of {state.max_steps}"
        show(print, f"resumed from {checkpoint}, {begin}", file=sys.stderr, flush=True)
