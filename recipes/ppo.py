"""PPO on any prompts with any reward functions: the last of three steps.

    accelerate launch recipes/ppo.py --config recipes/ppo.yaml
    accelerate launch recipes/ppo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name org/prompts \\
        --reward_funcs org/reward-model trl.rewards.think_format_reward --output_dir out/ppo

Rows hold "prompt", as text or messages; other columns reach the reward functions. docs/rlhf.md has all three steps.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dataset import DataArguments, load
from run import ActorArguments, RecipeParser, actor_config, evaluate, init_kwargs, run

from hfppo import PPOConfig, PPOTrainer


@dataclass
class RewardArguments(DataArguments):
    """Arguments of recipes that take reward functions by name."""

    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Dotted paths of functions (trl.rewards.think_format_reward) and ids or paths of models."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # a single name in a YAML file
            self.reward_funcs = [self.reward_funcs]


@dataclass
class PPOArguments(RewardArguments):
    """Arguments of this recipe."""

    compute_metrics: str | None = field(
        default=None, metadata={"help": "Dotted path of a function from an EvalPrediction to metrics."}
    )
    critic: str = field(default="adapter", metadata={"help": "'adapter', 'shared', a model's id, or a saved critic."})
    ref_model: str | None = field(default=None, metadata={"help": "The reference; default: the start of training."})


def import_function(name: str) -> Callable[..., Any]:
    """Import a function by its dotted path, from a package or from a file in the working folder.

    Raises:
        ValueError: there is no such function.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no function that can be imported: {error}") from error


def load_reward_func(name: str) -> Any:
    """Return the id or path of a model as it is; import a function by its dotted path."""
    is_model = Path(name).exists() or "/" in name or "." not in name
    return name if is_model else import_function(name)


def main(script_args: PPOArguments, args: PPOConfig, model_args: ActorArguments) -> None:
    if args.device.type == "cpu" and torch.get_num_threads() > 1:
        torch.set_num_threads(1)  # more threads cost such small models more than they save
    train, test = load(script_args)
    args.model_init_kwargs = init_kwargs(args, model_args)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_reward_func(name) for name in script_args.reward_funcs],
        args=args,
        train_dataset=train,
        eval_dataset=test,
        peft_config=actor_config(model_args),
        ref_model=script_args.ref_model,
        critic=script_args.critic,
        compute_metrics=import_function(script_args.compute_metrics) if script_args.compute_metrics else None,
    )

    def measure(when: str) -> None:
        evaluate(trainer, f"{when}_sampled", do_sample=True)
        evaluate(trainer, f"{when}_greedy", do_sample=False)

    run(trainer, measure)


if __name__ == "__main__":
    main(*RecipeParser((PPOArguments, PPOConfig, ActorArguments), allow_abbrev=False).parse_args_and_config())
