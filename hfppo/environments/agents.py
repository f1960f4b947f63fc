"""The arguments `tools` and `environment_factory` as an `EpisodePlayer`, checked before anything is generated."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hfppo.config import PPOConfig
from hfppo.data.prompts import EMPTY_PROMPT
from hfppo.environments.chat_format import ChatFormat, make_chat_format, prove
from hfppo.environments.environment import TextEnvironment, tool_schema, tools_of
from hfppo.environments.episodes import EpisodePlayer
from hfppo.environments.pool import EnvironmentFactory, EnvironmentPool, label, pool_of
from hfppo.environments.turn_rewards import episode_reward
from hfppo.rewards.reward_func import RewardFunc, plain_name

COLUMN = "environment"  # of the dataset: names each row's environment where there are several


@dataclass(frozen=True)
class Agents:
    """The tools and environments of a run."""

    tools: dict[str, Callable[..., Any]]
    pool: EnvironmentPool | None
    chat_format: ChatFormat
    by_column: bool  # whether each row names its environment
    schemas: dict[str | None, list[dict[str, Any]]]  # of the tools, by environment

    def schemas_of(self, dataset: Dataset, name: str) -> list[list[dict[str, Any]]]:
        """Return the tools that each row's prompt shows.

        Args:
            name: of the dataset, for errors.
        Raises:
            ValueError: a row names no environment, or an unknown one; names dataset, row and value.
        """
        if "tools" in dataset.column_names and self.tools:
            raise ValueError(
                f"{name} has a column 'tools', and the trainer has tools of its own; leave one of them out"
            )
        if not self.by_column:
            return [self.schemas[None]] * len(dataset)
        if COLUMN not in dataset.column_names:
            raise ValueError(
                f"{name} has no column {COLUMN!r}, and environment_factory is a mapping; add it, or give one factory"
            )
        names = list(dataset[COLUMN])
        for row, of_row in enumerate(names):
            if of_row not in self.schemas:
                raise ValueError(
                    f"{name} row {row}: {COLUMN}={of_row!r} is not among environment_factory's "
                    f"{', '.join(map(repr, self.schemas))}"
                )
        return [self.schemas[of_row] for of_row in names]

    def reward_funcs(self, given: Sequence[RewardFunc]) -> list[RewardFunc]:
        """Return the functions of the rewards that tools and environments give, one for each class."""
        if self.pool is None:
            return [episode_reward(None, not given)] if self.tools else []
        kinds = dict.fromkeys(type(instance) for instance in self.pool.examples.values())
        return [episode_reward(kind, not given) for kind in kinds]

    def player(self, eos_ids: list[int], args: PPOConfig, positions: int | None) -> EpisodePlayer:
        """Return the player.

        Args:
            eos_ids: tokens that end a turn.
            positions: of the model; None: any number.
        Raises:
            ValueError: the chat template does not fit, see `chat_format.prove`.
        """
        chat_format = replace(self.chat_format, eos_ids=eos_ids)
        prove(chat_format, "user" if self.speaks_text else "tool")
        limits = [args.max_prompt_length, positions and positions - args.max_completion_length]
        return EpisodePlayer(
            tools=self.tools,
            schemas=self.schemas,
            pool=self.pool,
            chat_format=chat_format,
            max_prompt=min((limit for limit in limits if limit is not None), default=None),
            overlong=args.overlong_prompts,
            max_tokens=args.max_completion_length,
            max_turn=args.max_turn_length,
            max_rounds=args.max_tool_calling_iterations,
            timeout=args.tool_timeout,
            by_column=self.by_column,
        )

    @property
    def speaks_text(self) -> bool:
        """Whether no row has tools."""
        return not any(self.schemas.values())


def load_agents(
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    options: dict[str, Any],
) -> Agents | None:
    """Return the tools and environments of a run; None without any.

    Args:
        options: for the chat template.
    Raises:
        TypeError, ValueError: a tool, an environment, the chat template or a setting cannot be used; names it.
    """
    pool = pool_of(environment_factory)
    if not tools and pool is None:
        check_unused(args)
        return None
    by_name = named_tools(tools or [])
    examples = {None: None} if pool is None else pool.examples
    schemas: dict[str | None, list[dict[str, Any]]] = {}
    for name, environment in examples.items():
        own = tools_of(environment) if environment is not None else {}
        check_names(by_name, own, environment, name)
        schemas[name] = [tool_schema(tool, func) for tool, func in {**by_name, **own}.items()]
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise ValueError("tools and environments need a chat template; set processing_class.chat_template")
    eos_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    chat_format = make_chat_format(tokenizer, eos_ids, options, with_tools=any(schemas.values()))
    return Agents(by_name, pool, chat_format, isinstance(environment_factory, Mapping), schemas)


def named_tools(tools: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the tools by name.

    Raises:
        TypeError, ValueError: one cannot be called, or two have one name.
    """
    by_name: dict[str, Callable[..., Any]] = {}
    for tool in tools:
        if not callable(tool):
            raise TypeError(f"tools holds {tool!r}, which is no function; give functions")
        if inspect.isclass(tool):
            raise TypeError(f"tools holds the class {tool.__name__}; give an instance of it, which can be called")
        if (name := plain_name(tool)) in by_name:
            raise ValueError(f"tools holds two functions named {name!r}; rename one")
        by_name[name] = tool
    return by_name


def check_names(tools: Mapping[str, Any], methods: Mapping[str, Any], environment: Any, name: str | None) -> None:
    """Refuse tools beside an environment that reads text, and names that two tools share.

    Raises:
        ValueError: names the environment and the tool.
    """
    kind = f"environment_factory{label(name)}'s {type(environment).__name__}"
    if tools and isinstance(environment, TextEnvironment):
        raise ValueError(f"{kind} reads whole turns, so no turn is left to call tools={list(tools)}; leave them out")
    if shared := sorted(set(tools) & set(methods)):
        raise ValueError(f"tools and {kind} both have {shared[0]!r}; rename one")


def check_unused(args: PPOConfig) -> None:
    """Refuse settings that need tools or an environment.

    Raises:
        ValueError: names the field and its value.
    """
    for field in ("gamma_turn", "lam_turn", "max_turn_length", "max_tool_calling_iterations", "tool_timeout"):
        if (value := getattr(args, field)) is not None:
            raise ValueError(
                f"{field}={value!r} is for completions of several turns; give tools or environment_factory"
            )


def dataset_for(dataset: Dataset, agents: Agents | None) -> Dataset:
    """Return a dataset with prompts; with an environment, whose text completes them, the column may be missing.

    The added column is for tokenizing only: `reset` gets the dataset's own columns.
    """
    empty = agents is not None and agents.pool is not None and isinstance(dataset, Dataset)
    if empty and "prompt" not in dataset.column_names and len(dataset):
        return dataset.add_column("prompt", [EMPTY_PROMPT] * len(dataset))
    return dataset


def default_dataset(environment_factory: Any, args: PPOConfig) -> Dataset | None:
    """Return the training set of a single environment that brings its own text: one empty message of the user.

    None where there is no such environment, or the number of steps is not set.
    """
    if environment_factory is None or isinstance(environment_factory, Mapping) or args.max_steps <= 0:
        return None
    return Dataset.from_list([{"prompt": EMPTY_PROMPT}])
