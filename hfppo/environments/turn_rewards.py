"""The rewards that tools and environments give, as one more reward function."""

import inspect
from collections.abc import Sequence
from typing import Any

from hfppo.environments.environment import check_reward
from hfppo.environments.episodes import Episode
from hfppo.rewards.reward_func import Log, RewardBatch, RewardFunc
from hfppo.support.calls import awaited


def episode_reward(kind: type | None, alone: bool) -> RewardFunc:
    """Return a function of the rewards of each turn, and of what `get_reward` gives at the end of an episode.

    It returns a reward for each token, or None for an episode that it does not score: of another environment, of one
    whose state is unknown, or one that got no reward.

    Args:
        kind: the class of an environment; None for tools without an environment.
        alone: whether the run has no other reward function: an episode without reward then has the score 0.
    """

    def score(episode: Episode, final: float | None) -> list[float] | None:
        if final is None and not (episode.rewards or alone):
            return None
        return episode.token_rewards(final or 0.0)

    def final_of(episode: Episode) -> Any:
        return getattr(episode.environment, "get_reward", lambda: None)()

    def checked(episode: Episode, final: Any) -> float | None:
        name = f"{type(episode.environment).__name__}.get_reward, row {episode.row.number},"
        return None if final is None else check_reward(name, final)

    def scored(episode: Episode) -> bool:
        return not episode.failed and (kind is None or type(episode.environment) is kind)

    def scores(episodes: Sequence[Episode], finals: list[Any]) -> list[list[float] | None]:
        return [score(e, checked(e, f)) if scored(e) else None for e, f in zip(episodes, finals, strict=True)]

    async def scores_later(episodes: Sequence[Episode], finals: list[Any]) -> list[list[float] | None]:
        return scores(episodes, [await awaited(final) for final in finals])

    def episode_scores(batch: RewardBatch, log: Log) -> Any:
        finals = [final_of(e) if scored(e) else None for e in batch.episodes]
        return (scores_later if any(map(inspect.isawaitable, finals)) else scores)(batch.episodes, finals)

    func: Any = episode_scores
    func.__name__ = "tools" if kind is None else kind.__name__
    func.score_batch = episode_scores
    return func
