"""Teach a small model to find a key and a chest on a slippery lake: PPO over the 32 turns of a game, in two minutes.

    accelerate launch recipes/lake.py --config recipes/lake.yaml

The base in `recipes/lake/base` knows the moves and plays each with the same probability. The game pays after every
turn, and its exact values are known: `lake.png` shows how near the policy comes to the best one, and the critic's
values beside the exact ones.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from build_lake_base import PROMPT
from datasets import Dataset
from lake_game import (
    CHEST,
    HOLES,
    START_CELLS,
    STATES,
    TURNS,
    Lake,
    exact_values,
    expected_return,
    show,
    state_of,
    uniform_policy,
)
from matplotlib.figure import Figure
from run import ActorArguments, actor_config, init_kwargs, run
from trl import TrlParser
from value_maps import MoveCounter, ask_critic, compare, draw_curve, draw_map

from hfppo import PPOConfig, PPOTrainer

FOLDER = Path(__file__).parent / "lake"
ASKED = [i for i, (cell, _) in enumerate(STATES) if cell in START_CELLS]  # indices of the states in the picture


@dataclass
class LakeArguments:
    """Arguments of this recipe."""

    critic: str = field(default="adapter", metadata={"help": "'adapter', 'shared', or a model's id or path."})
    num_eval_games: int = field(default=512, metadata={"help": "Games that are played before and after training."})


@dataclass
class LakeActor(ActorArguments):
    """Arguments of the actor, with the shipped base as default."""

    model_name_or_path: str = field(default=str(FOLDER / "base"), metadata={"help": "The base."})


@dataclass(frozen=True)
class Maps:
    """Each asked state with all turns left: three values, (N,) each, and the shares of the moves, (N, 4)."""

    best: np.ndarray  # exact, of the best policy
    own: np.ndarray  # exact, of the policy that makes the moves below at every turn
    critic: np.ndarray
    policy: np.ndarray

    @classmethod
    def of(cls, trainer: PPOTrainer, policy: np.ndarray) -> "Maps":
        """Ask the critic about the states as first observations."""
        prompts = [[{"role": "user", "content": PROMPT[0]["content"] + show(STATES[i])}] for i in ASKED]
        own = exact_values(policy)[TURNS, ASKED]
        return cls(exact_values()[TURNS, ASKED], own, ask_critic(trainer, prompts), policy[ASKED])


def draw(history: list[dict[str, float]], games_per_step: float, maps: Maps, file: Path) -> None:
    """Write a picture of the learning curve, and of the critic's values beside the exact ones."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.7))
    lines = {"optimum": expected_return(), "uniform play": expected_return(uniform_policy())}
    draw_curve(left.subplots(), history, games_per_step, lines)
    columns = {"best policy, exact": maps.best, "this policy, exact": maps.own, "this policy, critic": maps.critic}
    limits = {"vmin": min(map(np.min, columns.values())), "vmax": max(map(np.max, columns.values()))}
    words = dict.fromkeys(HOLES, "hole") | {CHEST: "chest"}
    axes = right.subplots(2, 3)
    for row, key in enumerate((False, True)):
        chosen = [n for n, i in enumerate(ASKED) if STATES[i][1] == key]
        cells = [STATES[ASKED[n]][0] for n in chosen]
        for column, (title, values) in enumerate(columns.items()):
            policy = maps.policy[chosen] if column else None
            draw_map(axes[row, column], cells, values[chosen], policy, words, **limits)
            axes[row, column].set_title(f"{title}, {'with' if key else 'no'} key", fontsize=9)
    figure.savefig(file, dpi=110)


def play(trainer: PPOTrainer, when: str) -> dict[str, float]:
    """Play the games of the evaluation, and return their metrics."""
    with trainer.eval_sampling(True):
        metrics = trainer.evaluate(metric_key_prefix=f"{when}_sampled")
    return {**metrics, f"{when}_sampled_return": metrics[f"{when}_sampled_reward"]}


def main(script_args: LakeArguments, args: PPOConfig, model_args: LakeActor) -> None:
    if args.device.type == "cpu":
        torch.set_num_threads(1)  # more threads cost such a small model more than they save
    args.model_init_kwargs = init_kwargs(args, model_args)
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

    def measure(when: str) -> None:
        metrics = play(trainer, when) | {"optimum": expected_return(), "uniform": expected_return(uniform_policy())}
        if when == "after":
            metrics["distance_to_optimum"] = metrics["optimum"] - metrics["after_sampled_return"]
            if args.needs_critic:
                maps = Maps.of(trainer, moves.policy)
                metrics |= compare(maps.critic, maps.best, maps.own)
                if trainer.is_world_process_zero():
                    games_per_step = args.rollout_size_per_process * args.world_size / args.updates_per_rollout
                    draw(trainer.state.log_history, games_per_step, maps, Path(args.output_dir) / "lake.png")
        trainer.log_metrics(when, metrics)
        trainer.save_metrics(when, metrics)

    run(trainer, measure)


if __name__ == "__main__":
    main(*TrlParser((LakeArguments, PPOConfig, LakeActor), allow_abbrev=False).parse_args_and_config())
