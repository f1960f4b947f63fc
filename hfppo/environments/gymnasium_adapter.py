"""A gymnasium environment as a `TextEnvironment`."""

from collections.abc import Callable, Mapping
from typing import Any

from hfppo.environments.environment import TextEnvironment


class GymnasiumEnvironment(TextEnvironment):
    """Plays a `gymnasium.Env`: the model's text names an action, and an observation is described in text.

        PPOTrainer(environment_factory=functools.partial(GymnasiumEnvironment, "FrozenLake-v1", actions={…}), …)

    Args:
        env: id of an environment, or a loaded one.
        actions: action by the word that the model writes for it; None passes the text itself.
        describe: text from an observation.
        unknown: stands before the last observation to answer a text that is no action. The environment takes no step
            for it, and its reward is `unknown_reward`.
        unknown_reward: of such a turn.
        make_kwargs: for `gymnasium.make`.
    Raises:
        ImportError: gymnasium is not installed and `env` is an id.
    """

    def __init__(
        self,
        env: Any,
        actions: Mapping[str, Any] | None = None,
        describe: Callable[[Any], str] = str,
        unknown: str = "?",
        unknown_reward: float = 0.0,
        **make_kwargs: Any,
    ):
        if isinstance(env, str):
            import gymnasium

            env = gymnasium.make(env, **make_kwargs)
        self.env, self.actions, self.describe = env, actions, describe
        self.unknown, self.unknown_reward = unknown, unknown_reward

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begin an episode; see `TextEnvironment`."""
        observation, _ = self.env.reset(seed=seed)
        self.seen = self.describe(observation)
        return self.seen

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn of the model; see `TextEnvironment`."""
        action = text.strip() if self.actions is None else self.actions.get(text.strip())
        if action is None:
            return f"{self.unknown} {self.seen}", self.unknown_reward, False, False, {}
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.seen = self.describe(observation)
        return self.seen, float(reward), terminated, truncated, info
