"""Check and load the arguments of `PPOTrainer`; nothing is generated or written here."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.config import PPOConfig
from hfppo.data.prompt_stream import PromptStream
from hfppo.data.prompts import RESERVED_COLUMNS, Prompts, datasets_by_name, is_stored, prepare_prompts
from hfppo.environments.episodes import EpisodePlayer
from hfppo.environments.loading import Agents, dataset_for, load_agents
from hfppo.environments.pool import EnvironmentFactory
from hfppo.generation import eos_token_ids
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import CRITIC_KINDS, find_critic
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
from hfppo.rewards.contract import plain_name, remove_wrappers, unwrap
from hfppo.rewards.functions import RewardFunctions, check_weights
from hfppo.rewards.loading import load_reward_funcs
from hfppo.rewards.model import RewardAdapter, check_conversations
from hfppo.rewards.server import RewardServer

logger = logging.getLogger(__name__)

END = "the end of sequence"  # the name in errors
STOPS = "generation_kwargs['stop_token_ids']"


@dataclass(frozen=True)
class DatasetPrompts:
    """The prompts of all datasets."""

    train: Prompts | PromptStream | None
    eval: dict[str | None, Prompts]  # by name; None: the only one


@dataclass(frozen=True)
class Parts:
    """The checked and loaded parts of a trainer."""

    model: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]
    rewards: RewardFunctions
    peft_config: PeftConfig
    prompts: DatasetPrompts
    sources: list[tuple[str, Any]]  # models and reward functions, each after its argument
    agents: Agents | None  # tools and environments
    player: EpisodePlayer | None  # plays with them


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
) -> Parts:
    """Return the parts of `PPOTrainer` from its arguments; quick checks come before slow loading.

    Raises:
        TypeError, ValueError: names the input that cannot be used, and the remedy.
    """
    init_kwargs = cast(dict[str, Any], args.model_init_kwargs or {})
    of_model = init_kwargs if isinstance(model, str) else {}
    if not isinstance(model, str):
        check_architecture("model", model)
    tokenizer = load_tokenizer(model, **of_model) if tokenizer is None else tokenizer
    check_tokenizer(tokenizer)
    agents = load_agents(tools, environment_factory, tokenizer, args)
    prompts = prepare_datasets(train_dataset, eval_dataset, tokenizer, args, agents)
    datasets = {"train_dataset": prompts.train} if prompts.train is not None else {}
    datasets |= {label_eval(name): some for name, some in prompts.eval.items()}
    known = {name: some.head for name, some in datasets.items()}
    longest = max((some.longest for some in datasets.values()), default=0)
    loaded = load_model(model, **of_model)
    check_model(loaded, peft_config)
    check_lengths("the model", loaded, longest, args)
    eos_ids = eos_token_ids(tokenizer, loaded.generation_config)
    padding = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    check_ids(loaded, known, {END: eos_ids, "the padding token": [padding], STOPS: args.stop_token_ids or eos_ids})
    warn_of_ended_prompts(known, eos_ids)
    player = None if agents is None else agents.player(eos_ids, args, positions_of(loaded)[0])
    reference = load_reference(ref_model, **init_kwargs)
    if reference is not None:
        check_lengths("ref_model", reference, longest, args)
    base_name = loaded.config.name_or_path
    rewards = prepare_rewards(reward_funcs, reward_tokenizers, base_name, agents, args)
    check_calls(rewards, known, agents)
    of_critic = {key: value for key, value in init_kwargs.items() if key != "revision" or critic == model}
    critic_source = find_critic(critic, **of_critic) if args.needs_critic else None
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
    actor_critic = ActorCritic(actor.base, actor.peft_config, critic_source, reference, actor.start_adapter)
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]  # None names no folder
    sources: list[tuple[str, Any]] = [("reward_funcs", unwrap(func)) for func in given]
    sources += [("model", model), ("the base's path", actor.base.name_or_path), ("ref_model", ref_model)]
    sources += [("critic", critic)] if critic_source and critic not in CRITIC_KINDS else []
    return Parts(actor_critic, tokenizer, eos_ids, rewards, actor.peft_config, prompts, sources, agents, player)


def prepare_rewards(
    reward_funcs: Any,
    tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None,
    base_name: str,
    agents: Agents | None,
    args: PPOConfig,
) -> RewardFunctions:
    """Return the reward functions, those of tools and environments last and with weight 1.

    Raises:
        TypeError, ValueError: a reward function cannot be used, or there is none; names it.
    """
    init_kwargs = cast(dict[str, Any], args.reward_model_init_kwargs or {})
    given = []
    if reward_funcs is not None:
        given = load_reward_funcs(reward_funcs, tokenizers, base_name, args.device, **init_kwargs)
    own = [] if agents is None else agents.reward_funcs(given)
    weights = args.reward_weights
    if own and weights is not None:
        weights = [*check_weights(weights, [plain_name(func) for func in given]), *[1.0] * len(own)]
    return RewardFunctions([*given, *own], weights)


def prepare_datasets(
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    agents: Agents | None = None,
) -> DatasetPrompts:
    """Return the prompts of all datasets."""
    train: Prompts | PromptStream | None = None
    if isinstance(train_dataset, IterableDataset):
        train = prepare_stream(train_dataset, tokenizer, args, agents)
    elif train_dataset is not None:
        train = prepare_dataset(train_dataset, "train_dataset", tokenizer, args, agents)
    of_eval = {
        name: prepare_dataset(some, label_eval(name), tokenizer, args, agents)
        for name, some in datasets_by_name(eval_dataset).items()
    }
    return DatasetPrompts(train, of_eval)


def label_eval(name: str | None) -> str:
    """Return the name of an evaluation dataset in errors."""
    return "eval_dataset" if name is None else f"eval_dataset[{name!r}]"


def prepare_dataset(
    dataset: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    agents: Agents | None = None,
    may_be_empty: bool = False,
) -> Prompts:
    """Return the prompts of a dataset, which errors call `name`."""
    options = cast(dict[str, Any] | None, args.chat_template_kwargs)
    completed = dataset_for(dataset, agents)
    # One process of each machine tokenizes, the others find what it has stored.
    with args.main_process_first() if is_stored(completed) else nullcontext():
        prompts = prepare_prompts(
            completed,
            tokenizer,
            args.max_prompt_length,
            args.overlong_prompts,
            options if agents is None else agents.chat_format.options,
            name,
            may_be_empty,
            None if agents is None else agents.schemas_of(completed, name),
            completed=agents is not None and agents.pool is not None,
        )
    return prompts if completed is dataset else replace(prompts, rows=prompts.rows.remove_columns("prompt"))


def prepare_later_dataset(
    dataset: Dataset,
    name: str,
    model: ActorCritic,
    rewards: RewardFunctions,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    agents: Agents | None,
) -> Prompts:
    """Return the checked prompts of a dataset that comes after construction; errors call it `name`.

    Raises:
        TypeError, ValueError: names the prompts or columns that do not fit.
    """
    prompts = prepare_dataset(dataset, name, tokenizer, args, agents)
    check_lengths("the model", model.causal_lm, prompts.longest, args)
    check_ids(model.causal_lm, {name: prompts}, {})
    check_calls(rewards, {name: prompts}, agents)
    return prompts


def prepare_stream(
    dataset: IterableDataset, tokenizer: PreTrainedTokenizerBase, args: PPOConfig, agents: Agents | None
) -> PromptStream:
    """Return the prompts of a stream.

    Raises:
        ValueError: neither max_steps nor total_episodes is set, or max_prompt_length is not.
    """
    if args.max_steps <= 0:
        raise ValueError("train_dataset is a stream, whose length is not known; set max_steps or total_episodes")
    if (longest := args.max_prompt_length) is None:
        raise ValueError("train_dataset is a stream, whose longest prompt is not known; set max_prompt_length")

    def prepare(rows: Dataset, name: str) -> Prompts:
        return prepare_dataset(rows, name, tokenizer, args, agents, may_be_empty=True)

    return PromptStream(dataset, prepare, longest)


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
    if args.model_init_kwargs and not any(
        isinstance(x, str) and x not in CRITIC_KINDS for x in (model, ref_model, critic)
    ):
        logger.warning("model_init_kwargs is for models given by name; those given are loaded already")


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
            others = {END: "processing_class or model.generation_config", STOPS: STOPS}
            culprit = others.get(where, "processing_class")
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
    from_episodes = set() if agents is None or agents.pool is None else {"environments"}
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
            try:
                inspect.signature(called).bind(**dict.fromkeys(given))
            except TypeError as error:
                raise TypeError(
                    f"reward function {name!r} cannot be called for {dataset}: {error}; it is given "
                    f"{', '.join(given)} by keyword: name those it needs, and take the others by **kwargs"
                ) from error
            except ValueError:  # some builtins have no signature
                continue


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
