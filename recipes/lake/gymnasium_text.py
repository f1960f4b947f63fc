"""A gymnasium environment in text. Copy this file to play another game."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from hfppo import TextEnvironment


class GymnasiumEnvironment(TextEnvironment):
    """Plays a `gymnasium.Env`: the model writes the name of an action, and reads each observation as text.

    Args:
        env: the environment.
        actions: each action by the word that the model writes for it. For any other text the environment makes no
            step: "?" and the last observation answer it, and its reward is 0.
        describe: returns the text of an observation.
    """

    def __init__(self, env: gymnasium.Env, actions: Mapping[str, Any], describe: Callable[[Any], str] = str):
        self.env, self.actions, self.describe = env, actions, describe

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begin an episode; see `TextEnvironment`."""
        observation, _ = self.env.reset(seed=seed)
        self.seen = self.describe(observation)
        return self.seen

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn of the model; see `TextEnvironment`."""
        action = self.actions.get(text.strip())
        if action is None:
            return f"? {self.seen}", 0.0, False, False, {}
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.seen = self.describe(observation)
        return self.seen, float(reward), terminated, truncated, info
