"""Code that the recipes share: arguments, their parser, and a run from a trainer to a saved, measured adapter."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from peft import PeftConfig
from transformers import TrainingArguments
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from hfppo import PPOTrainer
from hfppo.models.loading import adapter_config
from hfppo.reporting.progress import describe_sizes


@dataclass
class ActorArguments(ModelConfig):
    """TRL's ModelConfig with the defaults of an actor."""

    use_peft: bool = field(default=True, metadata={"help": "Always True: the actor is an adapter."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout adds noise to the ratio."})
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"], metadata={"help": "LoRA layers."})


class RecipeParser(TrlParser):
    """TRL's parser; `--help` ends with the sizes that the defaults make, those of `--config` included."""

    def format_help(self) -> str:
        """Return the help, with sizes in completions for the number of processes that were launched."""
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
        batch, accumulation, mini_batches = (self.get_default(name) for name in names)
        epochs = max(self.get_default("num_ppo_epochs"), self.get_default("num_critic_epochs") or 0)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        sizes = describe_sizes(batch * accumulation * mini_batches, processes, epochs * mini_batches)
        self.epilog = f"sizes with these defaults and {processes} process(es): {sizes}"
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
    if adapter_config(model_args.model_name_or_path, revision=model_args.model_revision) is None:
        return get_peft_config(model_args)
    default = type(model_args)()
    names = [f.name for f in fields(model_args) if f.name.startswith(("lora_", "use_rslora", "use_dora"))]
    if given := [name for name in names if getattr(model_args, name) != getattr(default, name)]:
        raise ValueError(
            f"{', '.join(given)}: model_name_or_path={model_args.model_name_or_path!r} is an adapter, and is trained "
            "on as it is configured; leave them out, or start from its base"
        )
    return None


def resume_argument(args: TrainingArguments) -> str | bool | None:
    """Convert `args.resume_from_checkpoint` for `Trainer.train`: "true" means the last checkpoint in `output_dir`."""
    value = args.resume_from_checkpoint
    return {"true": True, "false": None}.get(str(value).lower(), value)  # a YAML file gives a bool, a flag gives text


def evaluate(trainer: PPOTrainer, name: str, do_sample: bool) -> None:
    """Evaluate, and log and save the metrics under a name."""
    with trainer.eval_sampling(do_sample):
        metrics = trainer.evaluate(metric_key_prefix=name)
    trainer.log_metrics(name, metrics)
    trainer.save_metrics(name, metrics)


def run(trainer: PPOTrainer, measure: Callable[[str], None]) -> None:
    """Measure (unless resuming), train, save, measure again, and push if `push_to_hub` is set.

    Args:
        measure: called with "before" and "after" if there is an eval_dataset.
    """
    args = trainer.args
    checkpoint = resume_argument(args)
    if trainer.eval_dataset is not None and checkpoint is None:
        measure("before")
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    if pretraining := trainer.ppo_state.critic_pretraining.results():
        trainer.log_metrics("critic_pretraining", pretraining)
        trainer.save_metrics("critic_pretraining", pretraining)
    if trainer.eval_dataset is not None:
        measure("after")
    if args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()
