"""Show the progress of a run in a notebook: a bar, and a table with a row per log."""

import time

from transformers.utils.notebook import NotebookProgressCallback, NotebookTrainingTracker

from hfppo.reporting.progress import Phases, describe_rollouts, short_cells
from hfppo.support.log_entries import numbers_of

DRAW_EVERY = 0.5  # seconds between two pictures of the same step
# Suffixes of an evaluation's metrics that the table leaves out.
NOT_SHOWN = ("_reward_std", "_unscorable_frac", "_runtime", "_per_second", "_preparation_time", "epoch")


class NotebookProgress(Phases, NotebookProgressCallback):
    """Trainer's bar for notebooks, with the sizes of the run, the phase of the rollout, and a table of its own.

    Trainer's table has the loss, which means little in PPO. Here a row has the numbers of a terminal's line, and the
    rewards and the user's metrics of an evaluation.
    """

    training_tracker: NotebookTrainingTracker | None  # None outside of training, and except on the first process

    def on_train_begin(self, args, state, control, **kwargs):
        """Show the sizes of the run and a bar."""
        self._step, self._drawn = state.global_step, 0.0
        if state.is_world_process_zero:
            self.training_tracker = NotebookTrainingTracker(state.max_steps)
            self.training_tracker.prefix = f"<p>{describe_rollouts(args, state)}</p>"
            self._show(redraw=True)

    def on_step_end(self, args, state, control, **kwargs):
        """Advance by a step."""
        self._step = state.global_step
        self._show()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Add a row for a log of training steps."""
        if "loss" in logs:
            self._add_row(state.global_step, short_cells(logs))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Add the rewards and the user's metrics to the row of the step; outside of training, only remove the bar."""
        self.on_predict(args, state, control)
        if self.training_tracker is not None:
            numbers = numbers_of(metrics)
            shown = [name for name in numbers if "/" not in name and not name.endswith(NOT_SHOWN)]
            self._add_row(state.global_step, {name: f"{numbers[name]:.3f}" for name in shown})
            self.training_tracker.remove_child()

    def on_train_end(self, args, state, control, **kwargs):
        """Draw the bar a last time."""
        self._show(redraw=True)
        self.training_tracker = None

    def _add_row(self, step: int, cells: dict[str, str]) -> None:
        """Add cells to the row of a step, and draw the table."""
        if self.training_tracker is not None:
            self.training_tracker.write_line({"step": step, **cells})
            self._show(redraw=True)

    def _show(self, share: str = "", redraw: bool = False) -> None:
        """Draw bar and table, at most every 0.5 s unless `redraw`."""
        now = time.monotonic()
        if self.training_tracker is not None and (redraw or now - self._drawn >= DRAW_EVERY):
            self._drawn = now
            self.training_tracker.update(self._step, force_update=True, comment=self._doing(share))
