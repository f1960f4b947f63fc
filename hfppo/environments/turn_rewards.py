"""The rewards that tools and environments give, as one more reward function."""

import inspect
from collections.abc import Awaitable, Sequence

from hfppo.environments.agents import Agents
from hfppo.environments.environment import finite_reward
from hfppo.environments.episodes import Episode
from hfppo.rewards.reward_func import Log, RewardBatch
from hfppo.support.calls import awaited

Scores = list[list[float] | None]  # a reward per token for each episode; None for an episode without a score


class EpisodeReward:
    """Gives the rewards of each turn, and adds the reward of `get_reward` at the end of an episode.

    An episode has no score if it is of another environment, if its environment's state is unknown, or if it got no
    reward.

    Args:
        environment_class: None for tools without an environment.
        is_only: whether the run has no other reward function. An episode without a reward then has the score 0.
    """

    def __init__(self, environment_class: type | None, is_only: bool):
        self.environment_class, self.is_only = environment_class, is_only
        self.__name__ = "tools" if environment_class is None else environment_class.__name__

    def score_batch(self, batch: RewardBatch, log: Log) -> Scores | Awaitable[Scores]:
        """Score the episodes; returns an awaitable if a `get_reward` is asynchronous."""
        episodes = batch.episodes
        finals = [self.final_reward(episode) for episode in episodes]
        if any(map(inspect.isawaitable, finals)):
            return self.scores_later(episodes, finals)
        return self.scores(episodes, finals)

    def final_reward(self, episode: Episode) -> object:
        """Return the value of `get_reward`; None without one, and for an episode without a score."""
        get_reward = getattr(episode.environment, "get_reward", None)
        return get_reward() if get_reward is not None and self.is_scored(episode) else None

    def is_scored(self, episode: Episode) -> bool:
        """Return whether an episode may have a score from this function."""
        own = self.environment_class is None or type(episode.environment) is self.environment_class
        return own and not episode.failed

    def scores(self, episodes: Sequence[Episode], finals: Sequence[object]) -> Scores:
        """Return the scores of episodes with their final rewards."""
        return [self.score(*pair) for pair in zip(episodes, finals, strict=True)]

    async def scores_later(self, episodes: Sequence[Episode], finals: Sequence[object]) -> Scores:
        """Await the final rewards, and return the scores."""
        return self.scores(episodes, [await awaited(final) for final in finals])

    def score(self, episode: Episode, final: object) -> list[float] | None:
        """Return the score of an episode."""
        if not self.is_scored(episode) or (final is None and not (episode.rewards or self.is_only)):
            return None
        source = f"{type(episode.environment).__name__}.get_reward, row {episode.row.number},"
        return episode.token_rewards(0.0 if final is None else finite_reward(source, final))


def episode_rewards(agents: Agents | None, given: Sequence[object]) -> list[EpisodeReward]:
    """Return the functions of the rewards that tools and environments give, one for each class.

    Args:
        given: the run's other reward functions.
    """
    if agents is None:
        return []
    if agents.pool is None:
        return [EpisodeReward(None, not given)]
    classes = dict.fromkeys(type(instance) for instance in agents.pool.examples.values())
    return [EpisodeReward(environment_class, not given) for environment_class in classes]
