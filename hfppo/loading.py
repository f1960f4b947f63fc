"""Models and tokenizers as users give them."""

import copy
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights
from peft.utils import get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Actor:
    """What an actor is built from."""

    base: PreTrainedModel
    peft_config: PeftConfig
    start_adapter: dict[str, Tensor] | None  # None: a new adapter


def load_actor(model: str | PreTrainedModel | PeftModel, peft_config: PeftConfig | None, **init_kwargs: Any) -> Actor:
    """Take a model as users give it: an id or path of a base or of an adapter, a loaded base, a loaded adapter.

    Raises:
        ValueError: a second adapter is asked for on a trained one, or the loaded adapter is not trainable.
    """
    if isinstance(model, str):
        try:
            config = PeftConfig.from_pretrained(model)
        except (ValueError, OSError):  # no adapter there: a base
            base = AutoModelForCausalLM.from_pretrained(model, **init_kwargs)
            return Actor(base, peft_config or default_peft_config(), None)
        base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, **init_kwargs)
        start = load_peft_weights(model, device=str(base.device))
    elif isinstance(model, PeftModel):
        config = model.active_peft_config
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                "model is a PeftModel without a trainable weight, so training would change nothing; load it with "
                "PeftModel.from_pretrained(..., is_trainable=True)"
            )
        start = {k: v.clone() for k, v in get_peft_model_state_dict(model, adapter_name=model.active_adapter).items()}
        base = model.unload()
    else:
        return Actor(model, peft_config or default_peft_config(), None)
    if peft_config is not None:
        raise ValueError(
            "model is already an adapter and peft_config asks for another; leave peft_config out to train the "
            "adapter on, or merge it into its base first"
        )
    config = copy.deepcopy(config)
    config.inference_mode = False
    return Actor(base, config, start)


def default_peft_config() -> LoraConfig:
    """LoRA of rank 16 on every linear layer but the output head."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def load_tokenizer(model: str | PreTrainedModel | PeftModel) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model, or to the base of an adapter saved without one."""
    name = model if isinstance(model, str) else model.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left")
    except (ValueError, OSError):
        base = PeftConfig.from_pretrained(name).base_model_name_or_path
        return AutoTokenizer.from_pretrained(base, padding_side="left")
