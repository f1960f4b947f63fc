"""Callbacks that are on by default."""

from transformers import TrainerCallback

from hfppo.callbacks import AdaptiveKLCallback
from hfppo.config import PPOConfig
from hfppo.reporting.completions import PrintCompletionsCallback
from hfppo.reporting.health import HealthCallback
from hfppo.reporting.log_file import LogFileCallback
from hfppo.reporting.plot import PlotCallback


def with_default_callbacks(callbacks: list[TrainerCallback] | None, args: PPOConfig) -> list[TrainerCallback]:
    """Return the user's callbacks, and a default one of each class that the user did not give."""
    # Trainer accepts classes too.
    made = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
    targets = [callback.target for callback in made if isinstance(callback, AdaptiveKLCallback)]
    health = HealthCallback(**({"kl_to_the_reference": 2 * targets[0]} if targets else {}))
    defaults: list[TrainerCallback] = [health, LogFileCallback(), PlotCallback()]
    if args.log_completions:
        defaults.append(PrintCompletionsCallback(args.num_completions_to_print))
    return made + [own for own in defaults if not any(isinstance(given, type(own)) for given in made)]
