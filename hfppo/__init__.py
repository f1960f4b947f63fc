"""PPO for language models on the Hugging Face Trainer."""

from hfppo.callbacks import AdaptiveKLCallback, ClipMetricsCallback, PPOCallback, PPOControl
from hfppo.config import PPOConfig
from hfppo.environments.environment import Result, TextEnvironment
from hfppo.generation.sampler import Completions, Sampler
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
from hfppo.state import PPOState
from hfppo.token_trace import TokenTable, TokenTraceCallback
from hfppo.trainer import PPOTrainer

__version__ = "0.1.0"

__all__ = [
    "ActorCritic",
    "AdaptiveKLCallback",
    "ClipMetricsCallback",
    "Completions",
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
    "Sampler",
    "TextEnvironment",
    "TokenTable",
    "TokenTraceCallback",
    "TolerantReward",
    "Transcript",
]
