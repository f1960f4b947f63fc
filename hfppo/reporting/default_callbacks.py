"""Callbacks that are on by default."""

from transformers import TrainerCallback

from hfppo.callbacks import AdaptiveKLCallback, ClipMetricsCallback
from hfppo.reporting.completions import PrintCompletionsCallback
from hfppo.reporting.health import HealthCallback
from hfppo.reporting.log_file import LogFileCallback
from hfppo.reporting.plot import PlotCallback


def with_default_callbacks(callbacks: list[TrainerCallback] | None, log_completions: bool) -> list[TrainerCallback]:
    """Return the user's callbacks, and a default one of each class that the user did not give."""
    # Trainer takes classes as well.
    made = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
    if not any(isinstance(callback, HealthCallback) for callback in made):
        made.append(HealthCallback(**limits_of_targets(made)))
    wanted = [LogFileCallback, PlotCallback, *([PrintCompletionsCallback] if log_completions else [])]
    return made + [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in made)]


def limits_of_targets(callbacks: list[TrainerCallback]) -> dict[str, float]:
    """Return the limits of the health checks whose metric a callback steers to a target; the first such counts."""
    limits: dict[str, float] = {}
    for callback in reversed(callbacks):
        if isinstance(callback, AdaptiveKLCallback):
            limits["kl_to_the_reference"] = 2 * callback.target
        if not isinstance(callback, ClipMetricsCallback) or callback.target is None:
            continue
        if (callback.metric, callback.then) == ("policy/approx_kl", "stop"):
            limits["approximate_kl"] = callback.target
    return limits
