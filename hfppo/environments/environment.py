"""The contract of tools and environments: that of TRL's GRPOTrainer, with a reward for each turn on top.

A tool is a function with type hints and a Google-style docstring, plain or `async def`. An environment is an object
with `reset(**row)`, called with the dataset's columns before each episode, which returns None or text that is appended
to the prompt's last message. Each public method but `reset` and `get_reward` is a tool. `get_reward()`, if there is
one, scores the finished episode. Whatever any of them returns as an awaitable is awaited. Text may also be a list of
content blocks of text, which are joined.

Beyond TRL, a tool may return a `Result` with a reward, and `reset` may name a parameter `seed`: it is the same for the
completions of one prompt, and another for each prompt. After `reset` an environment must play like a new one.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any, get_type_hints

from transformers.utils import get_json_schema

from hfppo.rewards.reward_func import unwrap

NOT_TOOLS = ("reset", "get_reward")


class Result(str):
    """A tool's answer: text for the model, the reward of the turn that called it, and whether the episode is over.

    For TRL, which knows only text, it is a plain string.

    Args:
        text: shown to the model, as `text_of` writes it.
        reward: added to the rewards of the turn, which stand on its last token.
        done: end the episode without another turn.
    Raises:
        ValueError: the reward is no finite number.
    """

    reward: float
    done: bool

    def __new__(cls, text: object, reward: float = 0.0, done: bool = False) -> "Result":
        result = super().__new__(cls, str(joined(text)))
        result.reward, result.done = check_reward("Result", reward), done
        return result


class TextEnvironment(ABC):
    """An environment that reads the model's turns as text and answers in text, in the manner of gymnasium.

    Its methods are no tools: each turn of the model is one step. Observations are rendered as messages of the user.
    """

    @abstractmethod
    def reset(self, **row: Any) -> str | list[dict[str, Any]] | None:
        """Begin an episode; return text, or content blocks of text, to append to the prompt's last message.

        Args:
            row: the dataset's columns, and `seed` if the method names it.
        """

    @abstractmethod
    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn of the model.

        Args:
            text: the turn without special tokens.
        Returns:
            observation: the user's next message.
            reward: of this turn.
            terminated: whether the episode has ended; what comes after it is worth 0.
            truncated: whether it is cut here although it would go on.
            info: unused.
        """


def joined(content: Any) -> Any:
    """Return content blocks of text, {"type": "text", "text": …} each, as one text, and anything else unchanged."""
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if blocks and len(known) == len(blocks) else content


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content blocks of text are joined, which every chat template renders."""
    return {**message, "content": joined(message["content"])} if isinstance(message.get("content"), list) else message


def text_of(value: Any) -> str:
    """Return what a tool or environment returned as text that a tokenizer takes: without lone surrogates."""
    return str(joined(value)).encode(errors="replace").decode()


def check_reward(source: str, reward: Any) -> float:
    """Return a reward as a float.

    Raises:
        ValueError: it is no finite number; names its source.
    """
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(f"{source} gave the reward {reward!r}; give a finite number")
    return float(reward)


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment by name: its class's public methods, in alphabetical order as in TRL."""
    if isinstance(environment, TextEnvironment):
        return {}
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)  # evaluates no property
    return {
        name: getattr(environment, name) for name, _ in methods if name not in NOT_TOOLS and not name.startswith("_")
    }


def check_environment(name: str, environment: Any) -> None:
    """Refuse an environment without `reset`.

    Raises:
        TypeError: names the factory and the class.
    """
    if not callable(getattr(environment, "reset", None)):
        raise TypeError(
            f"environment_factory{name} made a {type(environment).__name__} without a method reset(**row); add it: it "
            "is called with the dataset's columns before each episode"
        )


def tool_schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool's JSON schema, from its type hints and docstring.

    Raises:
        ValueError: it cannot be made; names the tool.
    """
    try:
        return get_json_schema(described(name, tool))
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, and what inspect raises
        function = "it" if inspect.isroutine(unwrap(tool)) else f"{type(unwrap(tool)).__name__}.__call__"
        raise ValueError(
            f"tool {name!r} has no schema: {error}; give {function} type hints and a docstring with a section Args "
            "that describes each argument; a decorator passes both on if it uses functools.wraps"
        ) from error


def described(name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that `get_json_schema` can read: it takes neither partials nor callable objects.

    The arguments that a partial binds are left out.
    """
    inner: Any = unwrap(tool)
    function = inner if inspect.isroutine(inner) else inner.__call__
    if function is tool:
        return tool
    bound = getattr(tool, "keywords", {})
    signature = inspect.signature(tool)
    free = {name: parameter for name, parameter in signature.parameters.items() if name not in bound}

    hints = get_type_hints(function)
    stub: Any = lambda: None  # noqa: E731
    stub.__name__, stub.__doc__ = name, function.__doc__ or ""
    stub.__signature__ = signature.replace(parameters=list(free.values()))
    stub.__annotations__ = {name: hint for name, hint in hints.items() if name in {*free, "return"}}
    return stub


def wants_seed(reset: Callable[..., Any]) -> bool:
    """Return whether `reset` names a parameter `seed`."""
    return "seed" in inspect.signature(reset).parameters
