"""The rewards that tools and environments give, as one more reward function."""

from collections.abc import Sequence
from types import NoneType
from typing import cast

from hfppo.environments.agents import Agents
from hfppo.environments.environment import finite_reward
from hfppo.environments.episodes import Episode
from hfppo.rewards.reward_func import BatchReward, Log, RewardBatch


class EpisodeReward(BatchReward):
    """Gives the rewards of each turn, and adds the reward of `get_reward` at the end of an episode.

    An episode has no score if it belongs to another environment, if its environment's state is unknown, or if it got
    no reward.

    Args:
        environment_class: NoneType for tools without an environment, and for an agent.
        name: the function's name in metrics.
        is_only: whether the run has no other reward function. An episode without a reward then has the score 0.
    """

    def __init__(self, environment_class: type, name: str, is_only: bool):
        self.environment_class, self.__name__, self.is_only = environment_class, name, is_only

    def score_batch(self, batch: RewardBatch, log: Log) -> list[list[float] | None]:
        """Return a reward per token for each episode; None for an episode without a score."""
        return [self.score(cast(Episode, sample)) for sample in batch.samples]

    def score(self, episode: Episode) -> list[float] | None:
        """Return the rewards of an episode, by token."""
        own, final = type(episode.pool.first) is self.environment_class, episode.final_reward
        if not own or episode.failed or (final is None and not (episode.turn_rewards or self.is_only)):
            return None
        rewards = [episode.turn_rewards.get(position, 0.0) for position in range(len(episode.ids))]
        if final is not None:
            rewards[episode.last_sampled] += finite_reward(episode.describe("get_reward"), final)
        return rewards


def episode_rewards(agents: Agents | None, given: Sequence[object]) -> list[EpisodeReward]:
    """Return the functions of the rewards that tools and environments give, one for each class.

    Args:
        given: the run's other reward functions.
    """
    if agents is None:
        return []
    if agents.agent is not None:
        return [EpisodeReward(NoneType, "agent", is_only=False)]
    classes = dict.fromkeys(type(pool.first) for pool in agents.pools.values())
    names = {one: "tools" if one is NoneType else one.__name__ for one in classes}
    return [EpisodeReward(one, name, not given) for one, name in names.items()]
