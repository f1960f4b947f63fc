"""Play gymnasium's FrozenLake in text, and compare the critic's values with value iteration.

    accelerate launch recipes/lake/frozen_lake.py --config recipes/lake/frozen_lake.yaml

The ice is slippery: a move goes ahead with probability `success_rate`, else to either side. The reward is 1 at the
goal and 0 in a hole; both end the game. Games begin anywhere, are cut after some turns, and the future is discounted
by `gamma_turn`; a cut game ends with the critic's value. Needs `pip install -e ".[games]"`.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import gymnasium
import torch
from datasets import Dataset
from frozen_lake_maps import ACTIONS, MAP, SIZE, compare_with_value_iteration, describe, state_of
from gymnasium_text import GymnasiumEnvironment
from lake import LakeActor
from lake_game import PROMPT
from value_maps import MoveCounter

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import PPOParser, actor_config


@dataclass
class FrozenLakeArguments:
    """Arguments of this recipe."""

    critic: str = field(
        default="adapter", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )
    success_rate: float = field(default=1 / 3, metadata={"help": "Probability that a move goes ahead."})
    num_eval_games: int = field(default=512, metadata={"help": "Games that are played before and after training."})


def main(script_args: FrozenLakeArguments, args: PPOConfig, model_args: LakeActor) -> None:
    lake = partial(gymnasium.make, "FrozenLake-v1", desc=MAP, success_rate=script_args.success_rate)
    moves = MoveCounter(state_of, SIZE**2)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        environment_factory=lambda: GymnasiumEnvironment(lake(), actions=ACTIONS, describe=describe),
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
        if when == "after" and args.needs_critic:
            file = Path(args.output_dir) / "frozen_lake.png"
            metrics |= compare_with_value_iteration(trainer, moves.policy, lake().unwrapped.P, file)
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
    main(*PPOParser((FrozenLakeArguments, PPOConfig, LakeActor)).parse_args_and_config())
