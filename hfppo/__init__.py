"""PPO for language models on the Hugging Face Trainer."""

from hfppo.callbacks import AdaptiveKLCallback, PPOCallback, PrintCompletionsCallback
from hfppo.config import PPOConfig
from hfppo.curves import PlotCallback
from hfppo.health import HealthCallback, HealthWarning
from hfppo.history import LogFileCallback
from hfppo.model import ActorCritic
from hfppo.reward_model import RewardModel
from hfppo.reward_server import RewardServer
from hfppo.rollout import Rollout, Transcript
from hfppo.state import PPOState
from hfppo.tolerant import TolerantReward
from hfppo.trace import TokenTable, TokenTraceCallback
from hfppo.trainer import PPOTrainer

__version__ = "0.1.0"

__all__ = [
    "ActorCritic",
    "AdaptiveKLCallback",
    "HealthCallback",
    "HealthWarning",
    "LogFileCallback",
    "PPOCallback",
    "PPOConfig",
    "PPOState",
    "PPOTrainer",
    "PlotCallback",
    "PrintCompletionsCallback",
    "RewardModel",
    "RewardServer",
    "Rollout",
    "TokenTable",
    "TokenTraceCallback",
    "TolerantReward",
    "Transcript",
]
