"""Play gymnasium's FrozenLake in text, and compare the critic's values with those of value iteration.

    accelerate launch recipes/frozen_lake.py --config recipes/frozen_lake.yaml

The ice is slippery: a move goes ahead with probability `success_rate`, else to either side. Reaching the goal pays 1
and ends the game, a hole ends it with nothing. Games begin anywhere, are cut after some turns, and the future is
discounted by `gamma_turn`; a cut game ends with the critic's value. Needs `pip install -e ".[games]"`.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from build_lake_base import PROMPT
from datasets import Dataset
from lake import LakeActor
from lake_game import HAS_KEY
from matplotlib.figure import Figure
from run import actor_config, init_kwargs, run
from trl import TrlParser
from value_maps import MOVES, MoveCounter, ask_critic, compare, draw_curve, draw_map

from hfppo import PPOConfig, PPOTrainer
from hfppo.environments import GymnasiumEnvironment

SIZE = 4
MAP = ["SSSS", "SHSH", "SSSH", "HSSG"]  # the map of FrozenLake-v1, with a start (S) on every cell of ice
WORDS = {"H": "hole", "G": "goal"}
ACTIONS = {"左": 0, "下": 1, "右": 2, "上": 3}


@dataclass
class FrozenLakeArguments:
    """Arguments of this recipe."""

    critic: str = field(default="adapter", metadata={"help": "'adapter', 'shared', or a model's id or path."})
    success_rate: float = field(default=1 / 3, metadata={"help": "Probability that a move goes ahead."})
    num_eval_games: int = field(default=512, metadata={"help": "Games that are played before and after training."})


def describe(cell: int) -> str:
    """Return an observation in words that the base knows."""
    return f"{cell // SIZE},{cell % SIZE} {HAS_KEY[False]}"


def value_iteration(
    transitions: dict[int, dict[int, list[tuple[float, int, float, bool]]]],
    gamma: float,
    policy: np.ndarray | None = None,
) -> np.ndarray:
    """Return the value of each state, (S,), without a limit of turns.

        V(s) ← max_a or Σ_a π(a|s) of  Σ_s' P(s'|s, a)·(r + γ·V(s') unless s' ends the game)

    Args:
        transitions: gymnasium's table P, by state and action: probability, next state, reward, terminated.
        policy: (S, A) probabilities of the actions; None is the best policy.
    """
    probabilities = np.zeros((len(transitions), len(transitions[0]), len(transitions)))
    rewards = np.zeros(probabilities.shape[:2])
    for state, actions in transitions.items():
        for action, outcomes in actions.items():
            for probability, after, reward, terminated in outcomes:
                rewards[state, action] += probability * reward
                probabilities[state, action, after] += probability * (not terminated)
    values, change = np.zeros(len(transitions)), 1.0
    while change > 1e-10:
        of_actions = rewards + gamma * probabilities @ values
        new = of_actions.max(axis=1) if policy is None else (policy * of_actions).sum(axis=1)
        change, values = np.abs(new - values).max(), new
    return values


def state_of(observation: str) -> int:
    """Return the state that `describe` has described."""
    row, column = map(int, observation.split()[-2].split(","))
    return row * SIZE + column


def look(trainer: PPOTrainer, moves: MoveCounter, transitions: dict[int, Any]) -> dict[str, float]:
    """Compare the critic's values with the exact ones, and write a picture of both."""
    args = trainer.args
    states = [state for state in range(SIZE**2) if MAP[state // SIZE][state % SIZE] == "S"]
    prompts = [[{"role": "user", "content": PROMPT[0]["content"] + describe(state)}] for state in states]
    critic = ask_critic(trainer, prompts)
    policy = moves.policy[:, [list(MOVES).index(word) for word in sorted(ACTIONS, key=ACTIONS.get)]]
    maps = {
        "best policy, value iteration": value_iteration(transitions, args.gamma_turn)[states],
        "this policy, value iteration": value_iteration(transitions, args.gamma_turn, policy)[states],
        "this policy, critic": critic,
    }
    if trainer.is_world_process_zero():
        draw(trainer, [divmod(state, SIZE) for state in states], maps, moves.policy[states])
    return compare(critic, *list(maps.values())[:2])


def draw(trainer: PPOTrainer, cells: list[tuple[int, int]], maps: dict[str, np.ndarray], policy: np.ndarray) -> None:
    """Write a picture of the learning curve, and of the values of the cells by their titles, (N,) each."""
    args = trainer.args
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    curve, *axes = figure.subplots(1, 1 + len(maps))
    games_per_step = args.rollout_size_per_process * args.world_size / args.updates_per_rollout
    draw_curve(curve, trainer.state.log_history, games_per_step, {})
    words = {(row, column): WORDS[c] for row, line in enumerate(MAP) for column, c in enumerate(line) if c in WORDS}
    limits = {"vmin": 0.0, "vmax": max(map(np.max, maps.values()))}
    for ax, (title, values) in zip(axes, maps.items(), strict=True):
        draw_map(ax, cells, values, policy if "this" in title else None, words, **limits)
        ax.set_title(title, fontsize=9)
    figure.savefig(Path(args.output_dir) / "frozen_lake.png", dpi=110)


def main(script_args: FrozenLakeArguments, args: PPOConfig, model_args: LakeActor) -> None:
    if args.device.type == "cpu":
        torch.set_num_threads(1)  # more threads cost such a small model more than they save
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

    def measure(when: str) -> None:
        with trainer.eval_sampling(True):
            metrics = trainer.evaluate(metric_key_prefix=f"{when}_sampled")
        metrics[f"{when}_sampled_return"] = metrics[f"{when}_sampled_reward"]
        if when == "after" and args.needs_critic:
            metrics |= look(trainer, moves, lake().unwrapped.P)
        trainer.log_metrics(when, metrics)
        trainer.save_metrics(when, metrics)

    run(trainer, measure)


if __name__ == "__main__":
    main(*TrlParser((FrozenLakeArguments, PPOConfig, LakeActor), allow_abbrev=False).parse_args_and_config())
