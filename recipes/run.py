"""The arguments that recipes share, and their parser."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from peft import PeftConfig
from transformers import TrainingArguments
from transformers.utils import find_adapter_config_file
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config


@dataclass
class ActorArguments(ModelConfig):
    """TRL's ModelConfig with the defaults of an actor."""

    use_peft: bool = field(default=True, metadata={"help": "Always True: the actor is an adapter."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout adds noise to the ratio."})
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"], metadata={"help": "LoRA layers."})


class RecipeParser(TrlParser):
    """TRL's parser; flags need their whole name, and `--resume_from_checkpoint true` means the last checkpoint.

    `--help` ends with the sizes that the defaults make, those of `--config` included.
    """

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)

    def parse_args_and_config(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an instance of each dataclass; `resume_from_checkpoint` is a path, True or None."""
        parsed = super().parse_args_and_config(*args, **kwargs)
        for arguments in parsed:
            if isinstance(arguments, TrainingArguments):  # a flag gives text, a YAML file a bool
                value = arguments.resume_from_checkpoint
                arguments.resume_from_checkpoint = {"true": True, "false": None}.get(str(value).lower(), value)
        return parsed

    def format_help(self) -> str:
        """Return the help, with sizes in completions for the number of processes that were launched."""
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs")
        batch, accumulation, mini_batches, epochs = (self.get_default(name) for name in names)
        if epochs is not None:  # the arguments of PPO, not of sft.py or reward_model.py
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            completions = batch * accumulation * mini_batches
            steps = max(epochs, self.get_default("num_critic_epochs") or 0) * mini_batches
            self.epilog = (
                f"sizes with these defaults and {processes} process(es): rollouts of {completions * processes} "
                f"completions ({completions} per process), {steps} optimizer steps each"
            )
        return super().format_help()


def init_kwargs(args: TrainingArguments, model_args: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`: ModelConfig's flags, overridden by `args.model_init_kwargs`."""
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing; give the id or path of a model or of an adapter")
    quantization = get_quantization_config(model_args)
    flags = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "quantization_config": None if quantization is None else quantization.to_dict(),
    }
    return {name: value for name, value in flags.items() if value is not None} | (args.model_init_kwargs or {})


def actor_config(model_args: ActorArguments) -> PeftConfig | None:
    """Return the configuration of a new adapter from the flags; None if the model is already an adapter.

    Raises:
        ValueError: `use_peft` is False, or flags are set that would configure an existing adapter; names them.
    """
    if not model_args.use_peft:
        raise ValueError(
            "use_peft=False: the actor is always an adapter, so its other flags would go unread; leave use_peft out"
        )
    try:
        adapter = find_adapter_config_file(model_args.model_name_or_path, revision=model_args.model_revision)
    except OSError:  # no such model: PPOTrainer's error says more
        adapter = None
    if adapter is None:
        return get_peft_config(model_args)
    default = type(model_args)()
    names = [f.name for f in fields(model_args) if f.name.startswith(("lora_", "use_rslora", "use_dora"))]
    if given := [name for name in names if getattr(model_args, name) != getattr(default, name)]:
        raise ValueError(
            f"{', '.join(given)}: model_name_or_path={model_args.model_name_or_path!r} is an adapter, which keeps its "
            "own configuration; leave them out, or start from its base"
        )
    return None
