"""Load reward functions, models, adapters and servers as users name them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from peft import PeftConfig, PeftModel
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hfppo.models.loading import NO_CODE, adapter_config, as_name, load_tokenizer, name_in_errors
from hfppo.rewards.model import RewardAdapter, RewardModel
from hfppo.rewards.process_model import ProcessRewardModel
from hfppo.rewards.server import RewardServer
from hfppo.rewards.tolerant import TolerantReward

# A tokenizer for each reward function, or one for a single function.
RewardTokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None

# By the end of a class's name, how it is loaded and how it rewards.
MODELS: dict[str, tuple[Any, type[RewardModel]]] = {
    "ForSequenceClassification": (AutoModelForSequenceClassification, RewardModel),
    "ForTokenClassification": (AutoModelForTokenClassification, ProcessRewardModel),
}


def load_reward_funcs(funcs: object, tokenizers: RewardTokenizers, base_name: str, device: torch.device) -> list[Any]:
    """Load the reward models, adapters and servers among `reward_funcs`.

    Args:
        funcs: one or several functions, models, or ids or paths of models or adapters.
        tokenizers: one for each, or a single one for a single function; None for the model's own.
        base_name: name of the actor's base; adapters must have been trained on it.
        device: the trainer's; models are loaded to it, and loaded models are moved to it from the CPU.
    Raises:
        ValueError: a model cannot be loaded, has no score head, or is an adapter for another base.
    """
    several = list(funcs) if isinstance(funcs, Sequence) and not isinstance(funcs, str) else [funcs]
    given = [tokenizers] if isinstance(tokenizers, PreTrainedTokenizerBase) else tokenizers
    own = [None] * len(several) if given is None else list(given)
    if len(own) != len(several):
        raise ValueError(
            f"reward_processing_classes has {len(own)} entries for {len(several)} reward functions; give one each, "
            "None for functions"
        )
    return [load_reward_func(*pair, base_name, device) for pair in zip(several, own, strict=True)]


def load_reward_func(
    func: object, tokenizer: PreTrainedTokenizerBase | None, base_name: str, device: torch.device
) -> Any:
    """Load one entry of `reward_funcs`; return a function as it is, and check that a server answers."""
    func = as_name(func)
    if isinstance(func, TolerantReward):
        return replace(func, func=load_reward_func(func.func, tokenizer, base_name, device))
    if isinstance(func, PreTrainedModel | PeftModel):
        return wrap_loaded(func, tokenizer, device)
    if isinstance(func, str) and func.startswith(("http://", "https://")):
        func = RewardServer(func)
    if isinstance(func, RewardServer):
        func.check()
    if not isinstance(func, str):
        return func
    if (config := adapter_config(func)) is None:
        return load_classifier(func, tokenizer, device)
    return load_adapter(func, config, tokenizer, base_name)


def wrap_loaded(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase | None, device: torch.device
) -> RewardModel:
    """Return a loaded model as a reward function; raise if it has no score head."""
    kind = type(model.get_base_model() if isinstance(model, PeftModel) else model).__name__
    rewards = [rewards for end, (_, rewards) in MODELS.items() if kind.endswith(end)]
    if not rewards:
        raise TypeError(
            f"reward_funcs has {kind}, which gives no scores; give a function, or a model made by "
            f"{' or '.join(auto.__name__ for auto, _ in MODELS.values())}"
        )
    tokenizer = tokenizer or load_tokenizer(model, "reward_funcs")
    return rewards[0](model, tokenizer, device=device if model.device.type == "cpu" else None)


def load_adapter(
    name: str, config: PeftConfig, tokenizer: PreTrainedTokenizerBase | None, base_name: str
) -> RewardAdapter:
    """Return an adapter for the actor's base; raise if it is for another one, or rewards tokens."""
    if config.task_type == "TOKEN_CLS":
        raise ValueError(
            f"reward_funcs: the adapter {name!r} rewards tokens, which needs a model of its own; merge the adapter "
            "into its base and give the merged model"
        )
    if os.path.realpath(str(config.base_model_name_or_path)) != os.path.realpath(base_name):  # or two ids
        raise ValueError(
            f"reward_funcs: the adapter {name!r} was trained on {config.base_model_name_or_path!r}, but the actor's "
            f"base is {base_name!r}; merge the adapter into its base and give the merged model"
        )
    return RewardAdapter(name, tokenizer or load_tokenizer(name, "reward_funcs"))


def load_classifier(name: str, tokenizer: PreTrainedTokenizerBase | None, device: torch.device) -> RewardModel:
    """Load a classification model; raise if its head is untrained, since its scores are then noise."""
    with name_in_errors("reward_funcs", name):
        names = AutoConfig.from_pretrained(name, **NO_CODE).architectures or []
        of_tokens = any(architecture.endswith("ForTokenClassification") for architecture in names)
        auto, rewards = MODELS["ForTokenClassification" if of_tokens else "ForSequenceClassification"]
        model, info = auto.from_pretrained(name, output_loading_info=True, device_map=str(device), **NO_CODE)
    if info["missing_keys"]:
        raise ValueError(
            f"reward_funcs: {name!r} has no weights for {', '.join(sorted(info['missing_keys']))}: it is not a "
            "reward model; train one with recipes/reward_model.py"
        )
    return rewards(model, tokenizer or load_tokenizer(name, "reward_funcs"))
