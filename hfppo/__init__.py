"""PPO for language models on the Hugging Face Trainer."""

from hfppo.callbacks import AdaptiveKLCallback, ClipMetricsCallback, PPOCallback, PPOState, PrintCompletionsCallback
from hfppo.config import PPOConfig
from hfppo.model import ActorCritic
from hfppo.rollout import Rollout, Transcript
from hfppo.trainer import PPOTrainer

__version__ = "0.1.0"

__all__ = [
    "ActorCritic",
    "AdaptiveKLCallback",
    "ClipMetricsCallback",
    "PPOCallback",
    "PPOConfig",
    "PPOState",
    "PPOTrainer",
    "PrintCompletionsCallback",
    "Rollout",
    "Transcript",
]
