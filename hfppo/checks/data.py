"""Checks of what users pass to `PPOTrainer`: before anything is generated or written."""

import inspect
import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.config import PPOConfig
from hfppo.data.prompts import RESERVED_COLUMNS, Prompts
from hfppo.environments.agents import Agents
from hfppo.models.critic import CRITIC_KINDS
from hfppo.models.loading import positions_of
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.model import check_conversations
from hfppo.rewards.reward_func import RewardWrapper
from hfppo.rewards.server import RewardServer

logger = logging.getLogger(__name__)

END = "the end of sequence"  # the name in errors
STOPS = "generation_kwargs['stop_token_ids']"


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


def check_arguments(model: Any, ref_model: Any, critic: Any, args: Any, callbacks: Any, quantization: Any) -> None:
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
    by_name = any(isinstance(x, str) and x not in CRITIC_KINDS for x in (model, ref_model, critic))
    for name, value in {"model_init_kwargs": args.model_init_kwargs, "quantization_config": quantization}.items():
        if value and not by_name:
            logger.warning("%s is for models given by name; those given are loaded already", name)


def check_output_folder(sources: list[tuple[str, Any]], args: PPOConfig) -> None:
    """Refuse an output folder that holds a model or reward function of the run.

    Args:
        sources: as in `Parts`; only those that name a folder are checked.
    Raises:
        ValueError: names the folder.
    """
    output_dir = Path(str(args.output_dir)).resolve()
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
    examples = {} if agents is None or agents.pool is None else agents.pool.examples
    from_episodes = {"environments"} if examples else set()
    for name, func in zip(rewards.names, rewards.funcs, strict=True):
        for dataset, some in prompts.items():
            if shadowed := sorted(from_episodes & set(some.rows.column_names)):
                raise ValueError(
                    f"{dataset} has a column {shadowed[0]!r}, which reward functions get from the trainer; rename it"
                )
            columns = {*RESERVED_COLUMNS, *from_episodes, "completion_ids", *some.rows[0]} - {"prompt", "completion"}
            given = sorted(columns)
            check_conversations(name, func, dataset, some)
            called = func.func if isinstance(func, RewardWrapper) else func
            if isinstance(called, RewardServer) and (missing := sorted(set(called.columns) - columns)):
                raise ValueError(
                    f"columns={called.columns} of reward server {name!r}: {dataset} has no column {missing[0]!r}; "
                    "rename one of the dataset's, or leave it out"
                )
            if hasattr(called, "score_batch"):  # of this package
                continue
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
