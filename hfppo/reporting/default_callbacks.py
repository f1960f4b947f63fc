"""Callbacks that are on by default."""

from transformers import ProgressCallback, Trainer, TrainerCallback
from transformers import trainer as upstream

from hfppo.callbacks import AdaptiveKLCallback
from hfppo.config import PPOConfig
from hfppo.reporting.completions import PrintCompletionsCallback
from hfppo.reporting.health import HealthCallback
from hfppo.reporting.log_file import LogFileCallback
from hfppo.reporting.progress import RunProgress
from hfppo.reporting.run_page import RunPageCallback


def with_default_callbacks(callbacks: list[TrainerCallback] | None, args: PPOConfig) -> list[TrainerCallback]:
    """Return the user's callbacks, and a default one of each class that the user did not give."""
    # Trainer accepts classes too.
    made = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
    targets = [callback.target for callback in made if isinstance(callback, AdaptiveKLCallback)]
    given = [callback for callback in made if isinstance(callback, HealthCallback)]
    health = given[0] if given else HealthCallback(**({"kl_to_the_reference": 2 * targets[0]} if targets else {}))
    defaults: list[TrainerCallback] = [health, LogFileCallback(), RunPageCallback(health)]
    if args.log_completions:
        defaults.append(PrintCompletionsCallback())
    return made + [own for own in defaults if not any(isinstance(callback, type(own)) for callback in made)]


def show_progress(trainer: Trainer) -> RunProgress:
    """Replace the trainer's own bar and return the new one; it is silent if the user has another or no bar."""
    progress = RunProgress()
    callbacks = trainer.callback_handler.callbacks
    # TRL's RichProgressCallback is not a subclass of Trainer's.
    bars = [c for c in callbacks if isinstance(c, ProgressCallback) or "ProgressCallback" in type(c).__name__]
    default = next((bar for bar in bars if type(bar) is upstream.DEFAULT_PROGRESS_CALLBACK), None)
    if default is not None:
        trainer.remove_callback(default)
        if bars == [default]:
            trainer.add_callback(progress)
    return progress
