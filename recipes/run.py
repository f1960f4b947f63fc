"""What the recipes share: the actor's arguments, and the way from a trainer to a saved, measured adapter."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import TrainingArguments
from trl import ModelConfig

from hfppo import PPOTrainer


@dataclass
class ActorArguments(ModelConfig):
    """TRL's ModelConfig with the defaults of an actor."""

    use_peft: bool = field(default=True, metadata={"help": "The actor is an adapter; always on."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout would be noise in the ratio."})
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"], metadata={"help": "LoRA layers."})


def resume_argument(args: TrainingArguments) -> str | bool | None:
    """`args.resume_from_checkpoint` as `Trainer.train` wants it: "true" is the last checkpoint in `output_dir`."""
    value = args.resume_from_checkpoint
    return {"true": True, "false": None}.get(value.lower(), value) if isinstance(value, str) else value


def evaluate(trainer: PPOTrainer, name: str, do_sample: bool) -> None:
    """Evaluate, and save the metrics under a name."""
    metrics = trainer.evaluate(metric_key_prefix=name, do_sample=do_sample)
    trainer.log_metrics(name, metrics)
    trainer.save_metrics(name, metrics)


def run(trainer: PPOTrainer, measure: Callable[[str], None]) -> None:
    """Measure unless a run is resumed, train, save, measure again, and push if that is asked for.

    Args:
        measure: called with "before" and "after"; not without an eval_dataset.
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
    if trainer.eval_dataset is not None:
        measure("after")
    if args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()
