"""The arguments `tools` and `environment_factory`, checked before anything is generated."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from hfppo.config import PPOConfig
from hfppo.data.chat_template import Schema
from hfppo.data.prompts import EMPTY_PROMPT
from hfppo.environments.chat_format import ChatFormat, make_chat_format
from hfppo.environments.environment import Environment, TextEnvironment, Tool, tools_of
from hfppo.rewards.reward_func import plain_name, unwrap
from hfppo.support.calls import finish_within

EnvironmentFactory = Callable[[], Environment]
EnvironmentFactories = EnvironmentFactory | Mapping[str, EnvironmentFactory]  # by the dataset's column `environment`

COLUMN = "environment"  # the dataset's column with each row's environment, if there are several
# Fields of PPOConfig that need tools or an environment.
OF_TURNS = ("gamma_turn", "lam_turn", "max_turn_length", "max_tool_calling_iterations", "tool_timeout")


class EnvironmentPool:
    """The instances of one environment, and the tools that its prompts show.

    Args:
        name: the factory's name in errors.
        factory: None for tools without an environment; the instances are None.
        tools: the run's other tools, by name.
    Raises:
        TypeError, ValueError: the environment or a tool cannot be used.
    """

    def __init__(self, name: str, factory: EnvironmentFactory | None, tools: Mapping[str, Tool]):
        self.name, self.factory = name, factory
        self.first: Environment = None  # the first instance; the later ones offer the same to the model
        self.first = self.make()
        self.schemas = self.describe(tools, tools_of(self.first))
        self.idle = [self.first]  # instances that no episode uses; no thread may still use them

    def take(self) -> Environment:
        """Return an idle instance, or a new one."""
        return self.idle.pop(0) if self.idle else self.make()

    def make(self) -> Environment:
        """Return a new instance.

        Raises:
            TypeError: the factory cannot be called, or makes an object without `reset` or unlike the first.
        """
        if self.factory is None:
            return None
        environment, first = finish_within(None, "", self.factory), self.first
        if not callable(getattr(environment, "reset", None)):
            raise TypeError(f"{self.name} made a {type(environment).__name__}, which has no method reset(**row)")
        if first is not None and offered_by(environment) != offered_by(first):
            raise TypeError(
                f"{self.name} made a {type(environment).__name__} with {offered_by(environment)} after a "
                f"{type(first).__name__} with {offered_by(first)}; pass a mapping with a factory for each"
            )
        return environment

    def describe(self, tools: Mapping[str, Tool], methods: Mapping[str, Tool]) -> list[Schema]:
        """Return the JSON schemas of the tools, then of the environment's methods.

        Raises:
            ValueError: the environment reads whole turns, or has a method with the name of a tool.
        """
        kind = type(self.first).__name__
        if tools and isinstance(self.first, TextEnvironment):
            raise ValueError(
                f"{self.name}'s {kind} reads whole turns, so the model cannot call tools={list(tools)}; leave them out"
            )
        if shared := sorted(set(tools) & set(methods)):
            raise ValueError(f"tools and {self.name}'s {kind} both have {shared[0]!r}; rename one")
        try:
            return [get_json_schema(tool) for tool in {**tools, **methods}.values()]
        except (DocstringParsingException, TypeHintParsingException) as error:
            if "step" in methods:
                error.add_note(
                    f"{kind}.step is a tool; to read whole turns as text, derive {kind} from TextEnvironment."
                )
            raise


@dataclass(frozen=True)
class Agents:
    """The tools and environments of a run."""

    tools: dict[str, Tool]
    # By the value of the dataset's column `environment`; None is the key of a single one.
    pools: dict[str | None, EnvironmentPool]
    chat_format: ChatFormat
    by_column: bool  # whether each row names its environment
    agent: Any = None  # a program of the user that plays the episodes, in place of tools and environments

    @property
    def environments(self) -> list[Environment]:
        """The first instance of each environment; empty with tools only."""
        return [pool.first for pool in self.pools.values() if pool.factory is not None]

    def pool_of(self, columns: Mapping[str, Any]) -> EnvironmentPool:
        """Return the environment of a dataset row."""
        return self.pools[columns[COLUMN] if self.by_column else None]

    def schemas_of(self, dataset: Dataset, name: str) -> list[list[Schema]]:
        """Return the tools that each row's prompt shows.

        Args:
            name: the dataset's name in errors.
        Raises:
            ValueError: a row has no environment, an unknown one, or tools of its own.
        """
        if "tools" in dataset.column_names and self.tools:
            raise ValueError(
                f"{name} has a column 'tools', but the trainer has an argument tools; leave one of them out"
            )
        names = list(dataset[COLUMN]) if self.by_column else [None] * len(dataset)
        for row, of_row in enumerate(names):
            if of_row not in self.pools:
                known = ", ".join(map(repr, self.pools))
                raise ValueError(f"{name} row {row}: {COLUMN}={of_row!r} is not among environment_factory's {known}")
        return [self.pools[of_row].schemas for of_row in names]


def load_agents(
    tools: Sequence[Tool] | None,
    environment_factory: EnvironmentFactories | None,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    options: dict[str, Any],
) -> Agents | None:
    """Return the tools and environments of a run; None if there are none.

    Args:
        options: arguments of the chat template.
    Raises:
        TypeError, ValueError: a tool, an environment, the chat template or a setting cannot be used.
    """
    if not tools and environment_factory is None:
        check_unused(args)
        return None
    by_name = named_tools(tools or [])
    pools: dict[str | None, EnvironmentPool] = {}
    if isinstance(environment_factory, Mapping):
        for name, factory in environment_factory.items():
            pools[name] = EnvironmentPool(f"environment_factory[{name!r}]", factory, by_name)
    else:
        pools[None] = EnvironmentPool("environment_factory", environment_factory, by_name)
    chat_format = make_chat_format(tokenizer, options, with_tools=any(pool.schemas for pool in pools.values()))
    return Agents(by_name, pools, chat_format, isinstance(environment_factory, Mapping))


def named_tools(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Return the tools by name.

    Raises:
        TypeError, ValueError: one cannot be called as a tool, or two have the same name.
    """
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if inspect.isclass(tool) or not callable(tool):
            raise TypeError(f"tools has {tool!r}; pass functions or methods, with type hints and a docstring")
        if (name := plain_name(tool)) in by_name:
            raise ValueError(f"tools has two functions named {name!r}; rename one")
        by_name[name] = tool if inspect.isroutine(tool) else as_function(tool)
    return by_name


def as_function(tool: Callable[..., object]) -> Tool:
    """Return a `functools.partial` or a callable object as a function: transformers makes schemas of functions only.

    A keyword that a partial binds is not an argument of the tool.
    """

    def function(*args: object, **kwargs: object) -> object:
        return tool(*args, **kwargs)

    inner, bound = unwrap(tool), getattr(tool, "keywords", {})
    documented = inner if inspect.isroutine(inner) else type(inner).__call__
    signature = inspect.signature(tool)
    free = {name: parameter for name, parameter in signature.parameters.items() if name not in bound}
    hints = {name: hint for name, hint in get_type_hints(documented).items() if name in {*free, "return"}}
    function.__name__, function.__doc__ = plain_name(tool), documented.__doc__
    function.__signature__ = signature.replace(parameters=list(free.values()))  # type: ignore[attr-defined]
    function.__annotations__ = hints
    return function


def check_unused(args: PPOConfig) -> None:
    """Raise if a setting needs tools or an environment.

    Raises:
        ValueError: a field is set that needs tools or an environment.
    """
    for field in OF_TURNS:
        if (value := getattr(args, field)) is not None:
            raise ValueError(
                f"{field}={value!r} is for completions of several turns; pass tools, environment_factory or agent"
            )


def default_dataset(environment_factory: EnvironmentFactories | None, args: PPOConfig) -> Dataset | None:
    """Return the training set of a single environment that writes its own prompts: one empty user message.

    None without such an environment, or if the number of steps is not set.
    """
    if environment_factory is None or isinstance(environment_factory, Mapping) or args.max_steps <= 0:
        return None
    return Dataset.from_list([{"prompt": EMPTY_PROMPT}])


def offered_by(environment: Environment) -> str:
    """Return what an environment offers to the model, in words."""
    return "whole turns" if isinstance(environment, TextEnvironment) else f"tools {[*tools_of(environment)]}"
