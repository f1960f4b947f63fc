"""Play gymnasium's FrozenLake in text, and compare the critic's values with value iteration.

    accelerate launch recipes/frozen_lake.py --config recipes/frozen_lake.yaml

The ice is slippery: a move goes ahead with probability `success_rate`, else to either side. The reward is 1 at the
goal and 0 in a hole; both end the game. Games begin anywhere, are cut after some turns, and the future is discounted
by `gamma_turn`; a cut game ends with the critic's value. Needs `pip install -e ".[games]"`.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import gymnasium
from build_lake_base import PROMPT
from datasets import Dataset
from frozen_lake_maps import ACTIONS, MAP, SIZE, compare_with_value_iteration, describe, state_of
from gymnasium_text import GymnasiumEnvironment
from lake import LakeActor
from run import RecipeParser, actor_config, init_kwargs, use_one_thread_if_small
from value_maps import MoveCounter

from hfppo import PPOConfig, PPOTrainer


@dataclass
class FrozenLakeArguments:
    """Arguments of this recipe."""

    critic: str = field(
        default="adapter", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )
    success_rate: float = field(default=1 / 3, metadata={"help": "Probability that a move goes ahead."})
    num_eval_games: int = field(default=512, metadata={"help": "Games that are played before and after training."})


def main(script_args: FrozenLakeArguments, args: PPOConfig, model_args: LakeActor) -> None:
    args.model_init_kwargs = init_kwargs(args, model_args)
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
    use_one_thread_if_small(trainer.model)

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
    metrics = result.metrics | trainer.ppo_state.pretraining_results
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    measure("after")
    if args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()


if __name__ == "__main__":
    main(*RecipeParser((FrozenLakeArguments, PPOConfig, LakeActor)).parse_args_and_config())
