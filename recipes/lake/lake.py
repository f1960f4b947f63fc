"""Teach a small model to find a key and a chest on a slippery lake: PPO over the 32 turns of a game, in two minutes.

    accelerate launch recipes/lake/lake.py --config recipes/lake/lake.yaml

The base in `recipes/lake/base` knows the moves and plays each with the same probability. The game gives a reward after
every turn, and its exact values are known: `lake.png` shows how near the policy comes to the best one, and the
critic's values beside the exact ones.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from lake_game import PROMPT, STATES, Lake, expected_return, state_of, uniform_policy
from lake_maps import compare_with_exact_values
from value_maps import MoveCounter

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import ActorArguments, PPOParser, actor_config

FOLDER = Path(__file__).parent


@dataclass
class LakeArguments:
    """Arguments of this recipe."""

    critic: str = field(
        default="adapter", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )
    num_eval_games: int = field(default=512, metadata={"help": "Games that are played before and after training."})


@dataclass
class LakeActor(ActorArguments):
    """Arguments of the actor, with the shipped base as default."""

    model_name_or_path: str = field(default=str(FOLDER / "base"), metadata={"help": "The base."})


def main(script_args: LakeArguments, args: PPOConfig, model_args: LakeActor) -> None:
    moves = MoveCounter(state_of, len(STATES))
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        environment_factory=Lake,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
        eval_dataset=Dataset.from_dict({"prompt": [PROMPT] * script_args.num_eval_games}),
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=moves,
    )
    if sum(weight.numel() for weight in trainer.model.parameters()) < 10**7:
        torch.set_num_threads(1)  # more threads cost such a small model more than they save

    def measure(when: str) -> None:
        with trainer.eval_sampling(True):
            metrics = trainer.evaluate(metric_key_prefix=f"{when}_sampled")
        metrics[f"{when}_sampled_return"] = metrics[f"{when}_sampled_reward"]
        metrics |= {"optimum": expected_return(), "uniform": expected_return(uniform_policy())}
        if when == "after":
            metrics["distance_to_optimum"] = metrics["optimum"] - metrics["after_sampled_return"]
            if args.needs_critic:
                metrics |= compare_with_exact_values(trainer, moves.policy, Path(args.output_dir) / "lake.png")
        trainer.log_metrics(when, metrics)
        trainer.save_metrics(when, metrics)

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
    main(*PPOParser((LakeArguments, PPOConfig, LakeActor)).parse_args_and_config())
