"""Check and load the arguments of `PPOTrainer`; nothing is generated or written here."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.config import PPOConfig
from hfppo.data.chat_template import CLOCK, RunDate
from hfppo.data.prompts import RESERVED_COLUMNS, Prompts
from hfppo.environments.episodes import EpisodePlayer
from hfppo.environments.loading import Agents, load_agents
from hfppo.environments.pool import EnvironmentFactory
from hfppo.generation import eos_token_ids
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import find_critic
from hfppo.models.loading import (
    check_architecture,
    check_model,
    check_vocabulary,
    load_model,
    load_reference,
    load_tokenizer,
    positions_of,
    separate_adapter,
)
from hfppo.prompt_maker import DatasetPrompts, PromptMaker
from hfppo.rewards.contract import Private, bound_names, plain_name, remove_wrappers, unwrap, with_private
from hfppo.rewards.functions import RewardFunctions, check_weights
from hfppo.rewards.loading import load_reward_funcs
from hfppo.rewards.model import RewardAdapter, RewardModel, check_conversations
from hfppo.rewards.server import RewardServer

logger = logging.getLogger(__name__)

END = "the end of sequence"  # the name in errors


@dataclass(frozen=True)
class Parts:
    """The checked and loaded parts of a trainer."""

    model: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]
    rewards: RewardFunctions
    peft_config: PeftConfig
    prompts: DatasetPrompts
    prompt_maker: PromptMaker  # for datasets that come later
    sources: list[tuple[str, Any]]  # models and reward functions, each after its argument
    player: EpisodePlayer | None  # plays with tools and environments


def assemble(
    model: str | PreTrainedModel | PeftModel,
    reward_funcs: Any,
    args: PPOConfig,
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: PeftConfig | None,
    ref_model: str | PreTrainedModel | None,
    critic: str | PreTrainedModel,
    reward_tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
    date: RunDate | None = None,
) -> Parts:
    """Return the parts of `PPOTrainer` from its arguments; quick checks come before slow loading.

    Args:
        date: for chat templates; None: today.
    Raises:
        TypeError, ValueError: names the input that cannot be used, and the remedy.
    """
    init_kwargs = cast(dict[str, Any], args.model_init_kwargs or {})
    of_model = init_kwargs if isinstance(model, str) else {}
    if not isinstance(model, str):
        check_architecture("model", model)
    tokenizer = load_tokenizer(model, **of_model) if tokenizer is None else tokenizer
    check_tokenizer(tokenizer)
    prompt_maker = make_prompt_maker(tokenizer, args, tools, environment_factory, date)
    agents = prompt_maker.agents
    prompts = prompt_maker.of_datasets(train_dataset, eval_dataset)
    known = {name: some.head for name, some in prompts.named.items()}
    longest = max((some.longest for some in prompts.named.values()), default=0)
    loaded = load_model(model, **of_model)
    check_model(loaded, peft_config)
    check_lengths("the model", loaded, longest, args)
    eos_ids = eos_token_ids(tokenizer, loaded.generation_config)
    padding = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    check_ids(loaded, known, {END: eos_ids, "the padding token": [padding]})
    warn_of_ended_prompts(known, eos_ids)
    player = None if agents is None else agents.player(eos_ids, args, positions_of(loaded)[0])
    reference = load_reference(ref_model, **init_kwargs)
    if reference is not None:
        check_lengths("ref_model", reference, longest, args)
    base_name = loaded.config.name_or_path
    rewards = prepare_rewards(reward_funcs, reward_tokenizers, base_name, prompt_maker)
    check_calls(rewards, known, agents)
    critic_kwargs = cast(dict[str, Any], args.critic_init_kwargs or {})
    critic_source = find_critic(critic, **critic_kwargs) if args.needs_critic else None
    critic_source = critic_source and critic_source.with_layers(args.critic_layers, critic, loaded)
    if critic_source is not None and isinstance(critic_source.model, PreTrainedModel):
        # Checkpoints of one tokenizer pad their vocabularies to different sizes.
        check_vocabulary("critic", critic_source.model, max(tokenizer.get_vocab().values()) + 1)
        check_lengths("the critic", critic_source.model, longest, args)
    actor = separate_adapter(loaded, peft_config, of_model.get("revision"))
    for func in map(unwrap, rewards.funcs):
        if isinstance(func, RewardAdapter):
            func.attach(actor.base)
    tokenizer.pad_token_id = padding
    actor_critic = ActorCritic(
        actor.base, actor.peft_config, critic_source, reference, actor.start_adapter, args.detach_shared_critic
    )
    sources = name_sources(reward_funcs, model, actor.base.name_or_path, ref_model, critic if critic_source else None)
    return Parts(actor_critic, tokenizer, eos_ids, rewards, actor.peft_config, prompts, prompt_maker, sources, player)


def name_sources(reward_funcs: Any, model: Any, base: str, ref_model: Any, critic: Any) -> list[tuple[str, Any]]:
    """Return what the run is made of, models and reward functions, each after its argument."""
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]  # None names no folder
    sources: list[tuple[str, Any]] = [("reward_funcs", unwrap(func)) for func in given]
    sources += [("model", model), ("the base's path", base), ("ref_model", ref_model)]
    return sources if critic in (None, "adapter", "shared") else [*sources, ("critic", critic)]


def make_prompt_maker(
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None,
    date: RunDate | None,
) -> PromptMaker:
    """Return what makes prompts, with the tools and environments of the run and its date; None: today."""
    date = RunDate.today() if date is None else date
    options = {CLOCK: date, **cast(dict[str, Any], args.chat_template_kwargs or {})}
    agents = load_agents(tools, environment_factory, tokenizer, args, options)
    return PromptMaker(tokenizer, args, agents, date, options if agents is None else agents.chat_format.options)


def prepare_rewards(
    reward_funcs: Any,
    tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None,
    base_name: str,
    run: PromptMaker,
) -> RewardFunctions:
    """Return the reward functions, those of tools and environments last and with weight 1.

    Raises:
        TypeError, ValueError: a reward function cannot be used, or there is none; names it.
    """
    args, agents = run.args, run.agents
    init_kwargs = cast(dict[str, Any], args.reward_model_init_kwargs or {})
    given = []
    if reward_funcs is not None:
        given = load_reward_funcs(reward_funcs, tokenizers, base_name, args.device, **init_kwargs)
    own = [] if agents is None else agents.reward_funcs(given)
    weights = args.reward_weights
    if own and weights is not None:
        weights = [*check_weights(weights, [plain_name(func) for func in given]), *[1.0] * len(own)]
    for model in map(unwrap, given):
        if isinstance(model, RewardModel):
            model.date = run.date
    return RewardFunctions([*given, *own], weights)


def prepare_later_dataset(
    dataset: Dataset,
    name: str,
    model: ActorCritic,
    rewards: RewardFunctions,
    prompt_maker: PromptMaker,
) -> Prompts:
    """Return the checked prompts of a dataset that comes after construction; errors call it `name`.

    Raises:
        TypeError, ValueError: names the prompts or columns that do not fit.
    """
    prompts = prompt_maker.of_dataset(dataset, name)
    check_lengths("the model", model.causal_lm, prompts.longest, prompt_maker.args)
    check_ids(model.causal_lm, {name: prompts}, {})
    check_calls(rewards, {name: prompts}, prompt_maker.agents)
    return prompts


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse anything but a tokenizer, such as a processor.

    Raises:
        TypeError: names its type.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class is a {type(tokenizer).__name__} and no tokenizer; give one loaded by AutoTokenizer, or "
            "a processor's tokenizer"
        )


def check_arguments(model: Any, ref_model: Any, critic: Any, args: Any, callbacks: Any) -> None:
    """Refuse a wrong type, or the model as its own reference; warn of init_kwargs that nothing uses.

    Raises:
        TypeError, ValueError: names the argument.
    """
    if not isinstance(args, PPOConfig):
        raise TypeError(
            f"args is a {type(args).__name__}; give a PPOConfig, which takes the fields of TrainingArguments"
        )
    if ref_model is not None and ref_model is model and not isinstance(model, str):
        raise ValueError(
            "ref_model is the model that is trained; leave it out: the reference is that model with its adapter "
            "disabled, or a copy of the adapter that it comes with"
        )
    if not isinstance(callbacks, list | None):
        raise TypeError(f"callbacks is of type {type(callbacks).__name__}; give a list")
    if args.model_init_kwargs and not isinstance(model, str) and not isinstance(ref_model, str):
        logger.warning("model_init_kwargs is for models given by name; those given are loaded already")
    if args.critic_init_kwargs and (not isinstance(critic, str) or critic in ("adapter", "shared")):
        logger.warning("critic_init_kwargs is for a critic given by id or path, and this one is not; leave it out")


def check_output_folder(sources: list[tuple[str, Any]], args: PPOConfig) -> None:
    """Refuse an output folder that holds a model or reward function of the run.

    Args:
        sources: as in `Parts`; only those that name a folder are checked.
    Raises:
        ValueError: names the folder.
    """
    output_dir = Path(args.output_dir).resolve()
    for name, source in sources:
        if not isinstance(source, str) or not source or not Path(source).is_dir():
            continue
        folder = Path(source).resolve()
        if folder == output_dir:
            raise ValueError(
                f"{name} and output_dir are both {source!r}: saving would overwrite it; give another "
                "output_dir, or, to resume the run in it, the model that the run started from"
            )
        if output_dir in folder.parents and folder.relative_to(output_dir).parts[0].startswith(PREFIX_CHECKPOINT_DIR):
            raise ValueError(
                f"{name}={source!r} is a checkpoint in output_dir={args.output_dir!r}, where this run may delete it; "
                "give another output_dir"
            )


def check_ids(model: PreTrainedModel | PeftModel, prompts: dict[str, Prompts], special: dict[str, list[int]]) -> None:
    """Refuse token ids that the model does not have: the tokenizer belongs to another model.

    Args:
        special: further token ids by their purpose.
    Raises:
        ValueError: names the token id and its place.
    """
    size = cast(Any, model.get_input_embeddings()).weight.shape[0]
    suspects = dict(special)
    for name, some in prompts.items():
        if not some.longest:  # environments write these prompts
            continue
        row = int(np.searchsorted(some.ends, some.tokens.argmax(), side="right"))  # of the largest id
        suspects[f"{name} row {row}"] = some[row][1]
    for where, ids in suspects.items():
        if max(ids) >= size:
            culprit = "processing_class or model.generation_config" if where == END else "processing_class"
            raise ValueError(
                f"{where} has token id {max(ids)}, and the model knows {size} tokens, from 0; {culprit} is another "
                "model's: give the model's own, or resize_token_embeddings"
            )


def warn_of_ended_prompts(prompts: dict[str, Prompts], eos_ids: list[int]) -> None:
    """Warn of a dataset whose prompts all end with EOS, for example from a tokenizer that appends it."""
    for name, some in prompts.items():
        if some.longest > 1 and ((some.lengths > 1) & np.isin(some.tokens[some.ends - 1], eos_ids)).all():
            logger.warning(
                "every prompt of %s ends with EOS; have the tokenizer, or the chat template, leave it out", name
            )


def check_calls(rewards: RewardFunctions, prompts: dict[str, Prompts], agents: Agents | None) -> None:
    """Refuse reward functions whose parameters do not fit the columns of a dataset.

    Raises:
        TypeError, ValueError: names the function, the dataset and the columns.
    """
    examples = {} if agents is None or agents.pool is None else agents.pool.examples
    from_episodes = {"environments"} if examples else set()
    for environment, (dataset, some) in product(examples.values(), prompts.items()):
        check_names(f"{type(environment).__name__}.reset", environment.reset, dataset, some.rows.column_names)
    for name, func in zip(rewards.names, rewards.funcs, strict=True):
        for dataset, some in prompts.items():
            if shadowed := sorted(from_episodes & set(some.rows.column_names)):
                raise ValueError(
                    f"{dataset} has a column {shadowed[0]!r}, which reward functions get from the trainer; rename it"
                )
            columns = {*RESERVED_COLUMNS, *from_episodes, "completion_ids", *some.rows[0]} - {"prompt", "completion"}
            given = sorted(columns)
            check_conversations(name, func, dataset, some)
            called = remove_wrappers(func)
            if isinstance(called, RewardServer) and (missing := sorted(set(called.columns) - columns)):
                raise ValueError(
                    f"columns={called.columns} of reward server {name!r}: {dataset} has no column {missing[0]!r}; "
                    "rename one of the dataset's, or leave it out"
                )
            check_names(f"reward function {name!r}", called, dataset, columns)
            try:
                inspect.signature(with_private(called, Private())).bind(**dict.fromkeys(given))
            except TypeError as error:
                raise TypeError(
                    f"reward function {name!r} cannot be called for {dataset}: {error}; it is given "
                    f"{', '.join(given)} by keyword: name those it needs, and take the others by **kwargs"
                ) from error
            except ValueError:  # some builtins have no signature
                continue


def check_names(name: str, func: Callable[..., Any], dataset: str, columns: Iterable[str]) -> None:
    """Refuse columns with the name of a parameter that has a value already, such as `self`.

    Raises:
        ValueError: names the dataset, the column and the function.
    """
    if taken := sorted(bound_names(func) & set(columns)):
        raise ValueError(
            f"{dataset} has a column {taken[0]!r}, and {name} has a value for that parameter already; rename the "
            "column"
        )


def check_lengths(name: str, model: PreTrainedModel | PeftModel, longest: int, args: PPOConfig) -> None:
    """Refuse prompts and completions that together need more positions than a model has.

    With LongRoPE the positions before scaling count. Beyond them the whole batch is scaled differently, and a token's
    log-prob would depend on the other rows.

    Args:
        name: of the model, for the error.
        longest: tokens of the longest prompt.
    Raises:
        ValueError: names the lengths and the fields.
    """
    positions, scaled = positions_of(model)
    if positions is not None and longest + args.max_completion_length > positions:
        raise ValueError(
            f"prompts of up to {longest} tokens and max_completion_length={args.max_completion_length} are more "
            f"together than {name}'s {positions} positions{' before LongRoPE' if scaled else ''}; lower "
            "max_completion_length or max_prompt_length"
        )
