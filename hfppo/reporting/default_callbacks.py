"""Callbacks that are on by default."""

from transformers import TrainerCallback

from hfppo.callbacks.adaptive_kl import AdaptiveKLCallback
from hfppo.reporting.completions import PrintCompletionsCallback
from hfppo.reporting.health import HealthCallback
from hfppo.reporting.log_file import LogFileCallback
from hfppo.reporting.plot import PlotCallback


def with_default_callbacks(callbacks: list[TrainerCallback] | None, log_completions: bool) -> list[TrainerCallback]:
    """Return the user's callbacks, and a default one of each class that the user did not give."""
    # Trainer takes classes as well.
    made = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
    if not any(isinstance(callback, HealthCallback) for callback in made):
        targets = [callback.target for callback in made if isinstance(callback, AdaptiveKLCallback)]
        made.append(HealthCallback(kl_to_the_reference=2 * targets[0]) if targets else HealthCallback())
    wanted = [LogFileCallback, PlotCallback, *([PrintCompletionsCallback] if log_completions else [])]
    return made + [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in made)]
