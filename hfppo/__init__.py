"""PPO for language models on the Hugging Face Trainer."""

from hfppo.callbacks import AdaptiveKLCallback, ClipMetricsCallback, PPOCallback, PrintCompletionsCallback
from hfppo.config import PPOConfig
from hfppo.model import ActorCritic
from hfppo.reward_model import RewardModel
from hfppo.reward_server import RewardServer
from hfppo.rollout import Rollout, Transcript
from hfppo.state import PPOState
from hfppo.tolerant import TolerantReward
from hfppo.trace import TokenTable
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
    "RewardModel",
    "RewardServer",
    "Rollout",
    "TokenTable",
    "TolerantReward",
    "Transcript",
]
