"""Clip metrics of each PPO epoch: logged, printed, and used to steer the size of the update."""

from typing import Literal

import rich
from rich.table import Table
from tqdm import tqdm

from hfppo.callbacks.events import PPOCallback
from hfppo.metrics import UpdateStep

# Column of the table: the metric of a step, and its name under `clip/<part>/`.
COLUMNS = {
    "clipped": ("policy/clip_frac", "frac"),
    "below": ("policy/clip_frac_low", "frac_low"),
    "above": ("policy/clip_frac_high", "frac_high"),
    "dual": ("policy/dual_clip_frac", "frac_dual"),
    "value": ("value/clip_frac", "frac_value"),
    "ratio": ("policy/ratio", "ratio"),
    "KL": ("policy/approx_kl", "approx_kl"),
}
MOST_CHANGE = 0.2  # of the learning rate from one rollout to the next, as of β in AdaptiveKLCallback


class ClipMetricsCallback(PPOCallback):
    """Log how much of each PPO epoch's policy and value loss is clipped, and steer the update by it.

    Clipped tokens teach nothing, so their share says whether the steps on a rollout are too large or too many. With a
    `target` the callback acts on it:

    - `then="learning_rate"`: after each rollout the actor's learning rate is multiplied by
      1 + clip(1 − x/target, ±0.2), with x of the last PPO epoch; it never exceeds the scheduled rate.
    - `then="stop"`: once x of a mini-batch exceeds the target, the remaining steps on the rollout are dropped.

    Args:
        target: share of tokens for "clip_frac", nats per token for "approx_kl"; None only logs.
        by: what x is.
        then: what to change.
        per_mini_batch: log each mini-batch as well.
        show: print a table after each rollout.

    Raises:
        ValueError: a target that is not above 0, or an unknown `by` or `then`.
    """

    def __init__(
        self,
        target: float | None = None,
        by: Literal["clip_frac", "approx_kl"] = "clip_frac",
        then: Literal["learning_rate", "stop"] = "learning_rate",
        per_mini_batch: bool = False,
        show: bool = False,
    ):
        if target is not None and not target > 0:
            raise ValueError(f"target={target} must be above 0; leave it out to log only")
        for name, given, known in (
            ("by", by, ("clip_frac", "approx_kl")),
            ("then", then, ("learning_rate", "stop")),
        ):
            if given not in known:
                raise ValueError(f"{name}={given!r} must be one of {', '.join(map(repr, known))}")
        self.target, self.metric, self.then = target, f"policy/{by}", then
        self.per_mini_batch, self.show = per_mini_batch, show

    def on_mini_batch_end(self, args, state, control, *, step, **kwargs):
        if self.target is not None and self.then == "stop" and step.metrics.get(self.metric, 0.0) > self.target:
            control.should_end_rollout = True

    def on_update_end(self, args, state, control, *, steps, ppo_state, **kwargs):
        epochs = {f"epoch_{n + 1}": [step for step in steps if step.epoch == n] for n in {s.epoch for s in steps}}
        parts = {name: mean_metrics(some) for name, some in epochs.items()}
        if self.per_mini_batch:
            parts |= {f"epoch_{s.epoch + 1}_batch_{s.mini_batch + 1}": s.metrics for s in steps}
        for part, metrics in parts.items():
            for metric, name in COLUMNS.values():
                if metric in metrics:
                    control.logs[f"clip/{part}/{name}"] = metrics[metric]
        last = parts.get(f"epoch_{args.num_ppo_epochs}", {})
        if self.target is not None and self.then == "learning_rate" and self.metric in last:
            change = max(-MOST_CHANGE, min(MOST_CHANGE, 1 - last[self.metric] / self.target))
            control.learning_rate_factor = min(1.0, control.learning_rate_factor * (1 + change))
        control.logs["clip/learning_rate_factor"] = control.learning_rate_factor
        if self.show and state.is_world_process_zero:
            with tqdm.external_write_mode():  # clears the progress bar meanwhile
                rich.print(clip_table(f"clipped, rollout {ppo_state.rollouts}", parts))


def mean_metrics(steps: list[UpdateStep]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    found = {name: [step.metrics[name] for step in steps if name in step.metrics] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def clip_table(title: str, parts: dict[str, dict[str, float]]) -> Table:
    """Return a table with a row for each part of an update; shares in percent, the KL in nats per token."""
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    shown = {name: metric for name, (metric, _) in COLUMNS.items() if any(metric in m for m in parts.values())}
    for name in shown:
        table.add_column(name, justify="right")
    for part, metrics in parts.items():
        cells = [cell(metrics.get(metric), share=name not in ("ratio", "KL")) for name, metric in shown.items()]
        table.add_row(part.replace("_", " "), *cells)
    return table


def cell(number: float | None, share: bool) -> str:
    """Return a number as text."""
    if number is None:
        return "–"
    return f"{number:.1%}" if share else f"{number:.4f}"
