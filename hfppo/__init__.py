"""PPO for language models on the Hugging Face Trainer.

Public names are imported when they are first used, as in transformers, because importing torch and transformers takes
seconds.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfppo.callbacks import AdaptiveKLCallback, ClipMetricsCallback, PPOCallback, PPOControl
    from hfppo.config import PPOConfig
    from hfppo.environments.environment import Result, TextEnvironment
    from hfppo.generation.sampler import Sampler
    from hfppo.learn.loss import LossTerm
    from hfppo.models.actor_critic import ActorCritic
    from hfppo.reporting.completions import PrintCompletionsCallback
    from hfppo.reporting.health import HealthCallback, HealthWarning
    from hfppo.reporting.log_file import LogFileCallback
    from hfppo.reporting.plot import PlotCallback
    from hfppo.rewards.model import RewardModel
    from hfppo.rewards.process_model import ProcessRewardModel
    from hfppo.rewards.server import RewardServer
    from hfppo.rewards.tolerant import TolerantReward
    from hfppo.rollout import Rollout, Transcript
    from hfppo.sample import Sample, Turn
    from hfppo.state import PPOState
    from hfppo.token_trace import TokenTable, TokenTraceCallback
    from hfppo.trainer import PPOTrainer

__version__ = "0.1.0"

# The modules of the public names.
_NAMES = {
    "callbacks": "AdaptiveKLCallback ClipMetricsCallback PPOCallback PPOControl",
    "config": "PPOConfig",
    "environments.environment": "Result TextEnvironment",
    "generation.sampler": "Sampler",
    "learn.loss": "LossTerm",
    "models.actor_critic": "ActorCritic",
    "reporting.completions": "PrintCompletionsCallback",
    "reporting.health": "HealthCallback HealthWarning",
    "reporting.log_file": "LogFileCallback",
    "reporting.plot": "PlotCallback",
    "rewards.model": "RewardModel",
    "rewards.process_model": "ProcessRewardModel",
    "rewards.server": "RewardServer",
    "rewards.tolerant": "TolerantReward",
    "rollout": "Rollout Transcript",
    "sample": "Sample Turn",
    "state": "PPOState",
    "token_trace": "TokenTable TokenTraceCallback",
    "trainer": "PPOTrainer",
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "ActorCritic",
    "AdaptiveKLCallback",
    "ClipMetricsCallback",
    "HealthCallback",
    "HealthWarning",
    "LogFileCallback",
    "LossTerm",
    "PPOCallback",
    "PPOConfig",
    "PPOControl",
    "PPOState",
    "PPOTrainer",
    "PlotCallback",
    "PrintCompletionsCallback",
    "ProcessRewardModel",
    "Result",
    "RewardModel",
    "RewardServer",
    "Rollout",
    "Sample",
    "Sampler",
    "TextEnvironment",
    "TokenTable",
    "TokenTraceCallback",
    "TolerantReward",
    "Transcript",
    "Turn",
]


if not TYPE_CHECKING:  # otherwise a type checker accepts any name

    def __getattr__(name: str) -> object:
        """Import a public name, or a module of the package."""
        if name in _MODULES:
            globals()[name] = found = getattr(import_module(_MODULES[name]), name)
            return found
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
