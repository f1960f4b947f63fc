"""Teach a small model to answer sums it already knows: PPO from start to finish in a minute on two CPU cores.

    accelerate launch recipes/arithmetic/arithmetic.py --config recipes/arithmetic/arithmetic.yaml

The base in `recipes/arithmetic/base` judges claims like 请问1+1=2？ and should say 是的，等于2！ or, when the claim is
wrong, 不对，等于…！ It answers sloppily. PPO is told only whether every character of an answer is right.
"""

from dataclasses import dataclass, field
from pathlib import Path

import rich
import torch
from datasets import load_dataset
from transformers import EvalPrediction

from hfppo import PPOConfig, PPOTrainer, TokenTable
from hfppo.cli import ActorArguments, PPOParser, actor_config

FOLDER = Path(__file__).parent


@dataclass
class ArithmeticArguments:
    """Arguments of this recipe."""

    train_file: str = field(default=str(FOLDER / "train.jsonl"), metadata={"help": "Rows with 'prompt' and 'answer'."})
    test_file: str = field(default=str(FOLDER / "test.jsonl"), metadata={"help": "Held-out rows of the same form."})
    critic: str = field(
        default="adapter", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )
    show_prompt: str = field(default="请问1+1=2？", metadata={"help": "The prompt whose token table is shown."})
    show_answer: str = field(default="是的，等于2！", metadata={"help": "Its right answer."})


@dataclass
class ArithmeticActor(ActorArguments):
    """Arguments of the actor, with the shipped base as default."""

    model_name_or_path: str = field(default=str(FOLDER / "base"), metadata={"help": "The base."})


def right_answer(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Return 1 for an answer with every character right, else 0."""
    return [float(given == wanted) for given, wanted in zip(completions, answer, strict=True)]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of answers with every character right."""
    right = right_answer(prediction.predictions, prediction.label_ids["answer"])
    return {"accuracy": sum(right) / len(right)}


def main(script_args: ArithmeticArguments, args: PPOConfig, model_args: ArithmeticActor) -> None:
    dataset = load_dataset("json", data_files={"train": script_args.train_file, "test": script_args.test_file})
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=right_answer,
        args=args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=accuracy,
    )
    if sum(weight.numel() for weight in trainer.model.parameters()) < 10**7:
        torch.set_num_threads(1)  # more threads cost such a small model more than they save

    def measure(when: str) -> None:
        for mode, do_sample in (("sampled", True), ("greedy", False)):
            with trainer.eval_sampling(do_sample):
                metrics = trainer.evaluate(metric_key_prefix=f"{when}_{mode}")
            trainer.log_metrics(f"{when}_{mode}", metrics)
            trainer.save_metrics(f"{when}_{mode}", metrics)
        rollout = trainer.rollout([script_args.show_prompt], answer=[script_args.show_answer])
        if trainer.is_world_process_zero():
            rich.print(f"[bold]{when} training[/bold]", TokenTable.from_rollout(rollout, 0, trainer.processing_class))

    if args.resume_from_checkpoint is None:
        measure("before")
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    measure("after")
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*PPOParser((ArithmeticArguments, PPOConfig, ArithmeticActor)).parse_args_and_config())
