"""Checks of the arguments of `PPOTrainer`, before anything is generated or written."""

import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, cast

from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.config import PPOConfig
from hfppo.data.prompts import RESERVED_COLUMNS, Prompts
from hfppo.environments.agents import Agents
from hfppo.models.loading import positions_of
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.model import check_conversations
from hfppo.rewards.reward_func import BatchReward, RewardWrapper
from hfppo.rewards.server import RewardServer

# What arguments of PPOTrainer must be, unless they are None, and the remedy.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "args": (PPOConfig, "pass a PPOConfig, which takes the fields of TrainingArguments"),
    "processing_class": (PreTrainedTokenizerBase, "pass a tokenizer, such as AutoTokenizer's or a processor's"),
    "peft_config": (PeftConfig, "pass a configuration of PEFT, such as LoraConfig(target_modules='all-linear')"),
    "critic_peft_config": (PeftConfig, "pass a configuration of PEFT, such as LoraConfig(r=8)"),
    "tools": (Iterable, "pass a list of functions"),
}

logger = logging.getLogger(__name__)


def check_types(**given: object) -> None:
    """Raise TypeError if an argument has the wrong type; the error shows its value and the right type."""
    for name, (kind, advice) in ARGUMENTS.items():
        if not isinstance(given[name], (kind, NoneType)):
            raise TypeError(f"{name}={given[name]!r:.200} cannot be used; {advice}")


def check_output_folder(sources: dict[str, object], args: PPOConfig) -> None:
    """Raise if the output folder, or a checkpoint in it, contains a model of the run.

    Args:
        sources: as in `Parts`; only folder names are checked.
    Raises:
        ValueError: the output folder contains one.
    """
    output_dir = Path(str(args.output_dir)).resolve()
    for name, source in sources.items():
        if not isinstance(source, str) or not Path(source).is_dir():
            continue
        folder = Path(source).resolve()
        checkpoints = (parent for parent in (folder, *folder.parents) if parent.parent == output_dir)
        if folder == output_dir or any(one.name.startswith(PREFIX_CHECKPOINT_DIR) for one in checkpoints):
            raise ValueError(
                f"{name}={source!r} is in output_dir={args.output_dir!r}, where saving may overwrite or delete it; "
                "set another output_dir, or, to resume the run in it, pass the model that the run started from"
            )


def check_ids(model: PreTrainedModel | PeftModel, prompts: dict[str, Prompts], special: dict[str, list[int]]) -> None:
    """Raise if a prompt or the tokenizer has token ids that the model does not have.

    Args:
        special: other token ids to check, keyed by a description for the error.
    Raises:
        ValueError: a token id is outside the model's vocabulary.
    """
    size = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    # Where environments write the prompts, the dataset has no tokens.
    of_prompts = {name: [int(some.tokens.max())] for name, some in prompts.items() if some.longest}
    for where, ids in {**special, **of_prompts}.items():
        if max(ids) >= size:
            raise ValueError(
                f"{where} has token id {max(ids)}, but the model's {size} token ids end at {size - 1}; give its own "
                "processing_class, generation_config and stop_token_ids, or call resize_token_embeddings"
            )


def check_ends(prompts: dict[str, Prompts], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if the tokenizer adds EOS to text prompts, and warn if it begins prompts with BOS twice; reads the first.

    Raises:
        ValueError: the completions would begin after EOS.
    """
    for name, some in prompts.items():
        ids = some.ids[0].as_py()
        if ids[:2] == [tokenizer.bos_token_id] * 2:
            logger.warning(
                "%s: prompts begin with two %r, the text's and the tokenizer's; take it out of the text, or set "
                "processing_class.add_bos_token=False",
                *(name, tokenizer.bos_token),
            )
        last = tokenizer.convert_ids_to_tokens(ids[-1:])
        is_end = last in ([tokenizer.eos_token], [getattr(tokenizer, "sep_token", None)])
        if is_end and not some.conversational and not some[0][0]["prompt"].endswith(last[0]):
            raise ValueError(
                f"{name}: the tokenizer ends each prompt with {last[0]!r}, after which no completion follows; set "
                "processing_class.add_eos_token=False"
            )


def check_calls(rewards: RewardFunctions, prompts: dict[str, Prompts], agents: Agents | None) -> None:
    """Raise if a reward function or an agent cannot be called with the columns of a dataset.

    Raises:
        TypeError, ValueError: a function cannot be called with a dataset's columns.
    """
    agent = None if agents is None else agents.agent
    passed = {"environments"} if agents is not None and agents.environments else set()
    taken = RESERVED_COLUMNS | passed
    if agent is not None:
        passed, taken = {"outputs"}, taken | {"outputs", "base_url", "api_key", "seed", "episode_seed"}
    for dataset, some in prompts.items():
        names = set(some.rows.column_names)
        if shadowed := sorted(taken & names):
            raise ValueError(f"{dataset} has a column {shadowed[0]!r}, which the trainer passes itself; rename it")
        if agent is not None:
            seeds = {*inspect.signature(agent).parameters} & {"seed", "episode_seed"}
            check_call("the agent", agent, {"base_url", "api_key", *seeds, *names}, dataset)
        for name, func in zip(rewards.names, rewards.funcs, strict=True):
            check_conversations(name, func, dataset, some)
            columns = {*RESERVED_COLUMNS, *passed, "completion_ids", *some[0][0]} - {"prompt", "completion"}
            called = func.func if isinstance(func, RewardWrapper) else func
            if isinstance(called, RewardServer) and (missing := sorted(set(called.columns) - columns)):
                raise ValueError(
                    f"columns={called.columns} of reward server {name!r}: {dataset} has no column {missing[0]!r}; "
                    "rename one of the dataset's, or leave it out"
                )
            if not isinstance(called, BatchReward):
                check_call(f"reward function {name!r}", called, columns, dataset)


def check_call(subject: str, func: Callable[..., object], columns: set[str], dataset: str) -> None:
    """Raise TypeError if a function cannot be called with these keywords."""
    try:
        inspect.signature(func).bind(**dict.fromkeys(columns))
    except TypeError as error:
        raise TypeError(
            f"{subject} cannot be called for {dataset}: {error}; it gets {', '.join(sorted(columns))} by keyword: "
            "accept **kwargs, and give the dataset any other column that it needs"
        ) from error
    except ValueError:  # compiled functions may have no signature
        return


def check_lengths(name: str, model: PreTrainedModel | PeftModel, longest: int, args: PPOConfig) -> None:
    """Raise if prompts and completions together need more positions than a model has.

    Args:
        name: the model's name in the error.
        longest: tokens of the longest prompt.
    Raises:
        ValueError: the longest prompt and `max_completion_length` exceed the model's positions.
    """
    positions, scaling = positions_of(model)
    if positions is not None and longest + args.max_completion_length > positions:
        raise ValueError(
            f"prompts of up to {longest} tokens and max_completion_length={args.max_completion_length} together "
            f"exceed {name}'s {positions} positions{f' before {scaling} scaling' if scaling else ''}; lower "
            "max_completion_length or max_prompt_length"
        )
