"""From what users pass to `PPOTrainer` to its checked and loaded parts; nothing is generated or written here."""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.config import PPOConfig
from hfppo.data.prompts import RESERVED_COLUMNS, Prompts, datasets_by_name, prepare_prompts
from hfppo.data.stream import PromptStream
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
    separate_adapter,
)
from hfppo.rewards.contract import remove_wrappers, unwrap
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.loading import load_reward_funcs
from hfppo.rewards.model import RewardAdapter, check_conversations
from hfppo.rewards.server import RewardServer

logger = logging.getLogger(__name__)

END = "the end of sequence"  # as errors call it


@dataclass(frozen=True)
class DatasetPrompts:
    """The prompts of all datasets."""

    train: Prompts | PromptStream | None
    eval: dict[str | None, Prompts]  # by name; None: the only one

    @property
    def by_label(self) -> dict[str, Prompts | PromptStream]:
        """All of them, by the name that errors give their dataset."""
        training = {} if self.train is None else {"train_dataset": self.train}
        return {**training, **{eval_name(name): some for name, some in self.eval.items()}}

    @property
    def heads(self) -> dict[str, Prompts]:
        """The part of each that is known before the run."""
        return {name: some.head for name, some in self.by_label.items()}

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max((some.longest for some in self.by_label.values()), default=0)


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of."""

    model: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]
    rewards: RewardFunctions
    peft_config: PeftConfig
    prompts: DatasetPrompts
    sources: list[tuple[str, Any]]  # what the run is made of, and by which argument


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
) -> Parts:
    """The parts of `PPOTrainer`, whose arguments these are; what is quick to check comes before what loads.

    Raises:
        TypeError, ValueError: input that cannot be trained on; names it and the way out.
    """
    init_kwargs = cast(dict[str, Any], args.model_init_kwargs or {})
    of_model = init_kwargs if isinstance(model, str) else {}
    if not isinstance(model, str):
        check_architecture("model", model)
    tokenizer = load_tokenizer(model, **of_model) if tokenizer is None else tokenizer
    check_tokenizer(tokenizer)
    prompts = all_prompts(train_dataset, eval_dataset, tokenizer, args)
    loaded = load_model(model, **of_model)
    check_model(loaded, peft_config)
    check_lengths("the model", loaded, prompts.longest, args)
    eos_ids = eos_token_ids(tokenizer, loaded.generation_config)
    padding = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    check_ids(loaded, prompts.heads, {END: eos_ids, "the padding token": [padding]})
    warn_of_ended_prompts(prompts.heads, eos_ids)
    reference = load_reference(ref_model, **init_kwargs)
    if reference is not None:
        check_lengths("ref_model", reference, prompts.longest, args)
    base_name = loaded.config.name_or_path
    reward_kwargs = cast(dict[str, Any], args.reward_model_init_kwargs or {})
    funcs = load_reward_funcs(reward_funcs, reward_tokenizers, base_name, args.device, **reward_kwargs)
    rewards = RewardFunctions(funcs, args.reward_weights)
    check_calls(rewards, prompts.heads)
    critic_source = find_critic(critic) if args.needs_critic else None
    if critic_source is not None and isinstance(critic_source.model, PreTrainedModel):
        # Checkpoints of one tokenizer pad their vocabularies to different sizes.
        check_vocabulary("critic", critic_source.model, max(tokenizer.get_vocab().values()) + 1)
        check_lengths("the critic", critic_source.model, prompts.longest, args)
    actor = separate_adapter(loaded, peft_config, of_model.get("revision"))
    for func in map(unwrap, rewards.funcs):
        if isinstance(func, RewardAdapter):
            func.attach(actor.base)
    tokenizer.pad_token_id = padding
    actor_critic = ActorCritic(
        actor.base, actor.peft_config, critic_source, reference, actor.start_adapter, args.detach_shared_critic
    )
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    sources: list[tuple[str, Any]] = [("reward_funcs", unwrap(func)) for func in given]
    sources += [("model", model), ("the base's path", actor.base.name_or_path), ("ref_model", ref_model)]
    if critic_source is not None and critic not in ("adapter", "shared"):
        sources.append(("critic", critic))
    return Parts(actor_critic, tokenizer, eos_ids, rewards, actor.peft_config, prompts, sources)


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a processor or another object in its place.

    Raises:
        TypeError: names its type.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class is a {type(tokenizer).__name__} and no tokenizer; give one loaded by AutoTokenizer, or "
            "a processor's tokenizer"
        )


def check_arguments(model: Any, ref_model: Any, args: Any, callbacks: Any) -> None:
    """Refuse arguments in the place of others, and warn of one without use.

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


def check_output_folder(sources: list[tuple[str, Any]], args: PPOConfig) -> None:
    """Refuse to train into the folder that training starts from; evaluations write nothing.

    Args:
        sources: those of `Parts`; what is no folder is no matter.
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
                f"{name} and output_dir are both {source!r}: saving would overwrite what the run is made of; give "
                "another output_dir, or, to go on with the run in it, what it began with"
            )
        if output_dir in folder.parents and folder.relative_to(output_dir).parts[0].startswith(PREFIX_CHECKPOINT_DIR):
            raise ValueError(
                f"{name}={source!r} is a checkpoint in output_dir={args.output_dir!r}, and would make room for those "
                "of this run; give another output_dir"
            )


def eval_name(name: str | None) -> str:
    """How errors call an evaluation dataset."""
    return "eval_dataset" if name is None else f"eval_dataset[{name!r}]"


def check_ids(model: PreTrainedModel | PeftModel, prompts: dict[str, Prompts], special: dict[str, list[int]]) -> None:
    """Refuse a tokenizer that is not the model's, as far as its numbers show.

    Args:
        special: token ids beside those of the prompts, by what they are for.
    Raises:
        ValueError: names a token id that the model does not have, and where it stands.
    """
    size = cast(Any, model.get_input_embeddings()).weight.shape[0]
    suspects = dict(special)
    for name, some in prompts.items():
        if max(map(max, some.ids)) >= size:  # only then look at its rows one by one
            suspects |= {f"{name} row {row}": ids for row, ids in enumerate(some.ids)}
    for where, ids in suspects.items():
        if max(ids) >= size:
            culprit = "processing_class or model.generation_config" if where == END else "processing_class"
            raise ValueError(
                f"{where} has token id {max(ids)}, and the model knows {size} tokens, from 0; {culprit} is another "
                "model's: give the model's own, or resize_token_embeddings"
            )


def warn_of_ended_prompts(prompts: dict[str, Prompts], eos_ids: list[int]) -> None:
    """Warn of prompts that end the text before it is completed, as a tokenizer does that appends EOS."""
    for name, some in prompts.items():
        if all(len(ids) > 1 and ids[-1] in eos_ids for ids in some.ids):
            logger.warning(
                "every prompt of %s ends with EOS; have the tokenizer, or the chat template, leave it out", name
            )


def check_calls(rewards: RewardFunctions, prompts: dict[str, Prompts]) -> None:
    """Refuse reward functions whose parameters do not fit what they will be called with.

    Raises:
        TypeError, ValueError: names function, dataset, and what is given.
    """
    for name, func in zip(rewards.names, rewards.funcs, strict=True):
        for dataset, some in prompts.items():
            columns = {*RESERVED_COLUMNS, "completion_ids", *some.rows[0]} - {"prompt", "completion"}
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
            except ValueError:  # of some builtins nothing is known
                continue


def check_lengths(name: str, model: PreTrainedModel | PeftModel, longest: int, args: PPOConfig) -> None:
    """Refuse prompts and completions that together need more positions than a model has.

    With LongRoPE those from before its scaling count: beyond them the whole batch is scaled another way, so that a
    token's log-prob would depend on its neighbours.

    Args:
        name: of the model, for the error.
        longest: tokens of the longest prompt.
    Raises:
        ValueError: names the lengths and the fields.
    """
    config = model.config.get_text_config()
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type") == "longrope"
    positions = rope.get("original_max_position_embeddings") if scaled else None
    positions = positions or getattr(config, "max_position_embeddings", None)
    if positions is not None and longest + args.max_completion_length > positions:
        raise ValueError(
            f"prompts of up to {longest} tokens and max_completion_length={args.max_completion_length} are more "
            f"together than {name}'s {positions} positions{' before LongRoPE' if scaled else ''}; lower "
            "max_completion_length or max_prompt_length"
        )


def all_prompts(
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
) -> DatasetPrompts:
    """The datasets' prompts as the configuration has them."""
    train: Prompts | PromptStream | None = None
    if isinstance(train_dataset, IterableDataset):
        train = stream_of(train_dataset, tokenizer, args)
    elif train_dataset is not None:
        train = prompts_of(train_dataset, "train_dataset", tokenizer, args)
    of_eval = {
        name: prompts_of(some, eval_name(name), tokenizer, args)
        for name, some in datasets_by_name(eval_dataset).items()
    }
    return DatasetPrompts(train, of_eval)


def prompts_of(dataset: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, args: PPOConfig) -> Prompts:
    """A dataset's prompts as the configuration has them; `name` is how errors call it."""
    return prepare_prompts(
        dataset,
        tokenizer,
        args.max_prompt_length,
        args.overlong_prompts,
        cast(dict[str, Any] | None, args.chat_template_kwargs),
        name,
    )


def later_prompts(
    dataset: Dataset,
    name: str,
    model: ActorCritic,
    rewards: RewardFunctions,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
) -> Prompts:
    """The prompts of a dataset that comes when the trainer is made already, checked as those before.

    Raises:
        TypeError, ValueError: prompts or columns that do not fit; names them.
    """
    prompts = prompts_of(dataset, name, tokenizer, args)
    check_lengths("the model", model.causal_lm, prompts.longest, args)
    check_ids(model.causal_lm, {name: prompts}, {})
    check_calls(rewards, {name: prompts})
    return prompts


def stream_of(dataset: IterableDataset, tokenizer: PreTrainedTokenizerBase, args: PPOConfig) -> PromptStream:
    """A stream's prompts as the configuration has them.

    Raises:
        ValueError: the length of the run, or of the longest prompt, which only the end of the stream would tell, is
            not set.
    """
    if args.max_steps <= 0:
        raise ValueError("train_dataset is a stream, whose length is not known; set max_steps or total_episodes")
    if (longest := args.max_prompt_length) is None:
        raise ValueError("train_dataset is a stream, whose longest prompt is not known; set max_prompt_length")
    options = cast(dict[str, Any] | None, args.chat_template_kwargs)

    def prepare(rows: Dataset, name: str) -> Prompts:
        return prepare_prompts(rows, tokenizer, longest, args.overlong_prompts, options, name, may_be_empty=True)

    return PromptStream(dataset, prepare, longest)
