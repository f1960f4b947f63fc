"""The contract of tools and environments, an extension of TRL's GRPOTrainer's.

A tool is a function, plain or `async def`, with type hints and a Google-style docstring; a `functools.partial` or
an object with `__call__` also works. An environment is an object with `reset(**row)`, called with the dataset's
columns before each episode, which returns None or text that is appended to the prompt's last message. Each public
method but `reset` and `get_reward` is a tool. `get_reward()`, if there is one, scores the finished episode. An
awaitable that one of them returns is awaited. Text may also be a list of content blocks of text, which are joined.

Beyond TRL, a tool may return a `Result` with a reward, and `reset` may name the parameters `seed` and `episode_seed`.
Completions of one prompt get the same `seed`, different prompts different ones; each completion has an `episode_seed`
of its own. After `reset` an environment must behave like a new one.

Calls of different episodes run at once: plain ones in threads, awaitables in one event loop. The calls of one episode
follow each other. Random numbers must come from the seeds, since the global generators are shared.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any

NOT_TOOLS = ("reset", "get_reward")

Environment = Any  # an object with `reset(**row)`
Tool = Callable[..., Any]


class Result(str):
    """A tool's answer: text for the model, the reward of the turn that called it, and whether the episode is over.

    For TRL, which reads only text, it is a plain string.

    Args:
        text: shown to the model, as `text_of` writes it.
        reward: added to the other rewards of the turn.
        done: end the episode without another turn.
    Raises:
        ValueError: the reward is not a finite number.
    """

    reward: float
    done: bool

    def __new__(cls, text: object, reward: float = 0.0, done: bool = False) -> "Result":
        result = super().__new__(cls, str(joined(text)))
        result.reward, result.done = finite_reward("Result", reward), done
        return result


class TextEnvironment(ABC):
    """An environment that reads the model's turns as text and answers in text, like a `gymnasium.Env`.

    Its methods are not tools: each turn of the model is one step. Observations are rendered as user messages.
    """

    @abstractmethod
    def reset(self, **row: Any) -> str | list[dict[str, Any]] | None:
        """Begin an episode; return text, or content blocks of text, to append to the prompt's last message.

        Args:
            row: the dataset's columns, and `seed` or `episode_seed` if the method names them.
        """

    @abstractmethod
    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer one turn of the model.

        Args:
            text: the turn without special tokens.
        Returns:
            observation: the user's next message.
            reward: the reward of this turn.
            terminated: whether the episode has ended; the value after it is 0.
            truncated: whether a limit ends the episode here.
            info: unused.
        """


def joined(content: Any) -> Any:
    """Return content blocks of text, {"type": "text", "text": …} each, as one text, and anything else unchanged."""
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if blocks and len(known) == len(blocks) else content


def text_of(value: object) -> str:
    """Return the answer of a tool or environment as text."""
    return replace_halves(str(joined(value)))


def replace_halves(value: Any) -> Any:
    """Return a value with "?" for each lone surrogate, at any depth: tokenizers and files take none."""
    if isinstance(value, dict):
        return {replace_halves(key): replace_halves(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [replace_halves(inner) for inner in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def finite_reward(source: str, reward: object) -> float:
    """Return a reward as a float.

    Raises:
        ValueError: it is not a finite number.
    """
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(f"{source} gave the reward {reward!r}; return a finite number")
    return float(reward)


def tools_of(environment: Environment) -> dict[str, Tool]:
    """Return the tools of an environment by name: its class's public methods, in alphabetical order as in TRL."""
    if environment is None or isinstance(environment, TextEnvironment):
        return {}
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)  # evaluates no property
    return {
        name: getattr(environment, name) for name, _ in methods if name not in NOT_TOOLS and not name.startswith("_")
    }
