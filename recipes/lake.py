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
    MOVES,
    SIZE,
    START_CELLS,
    STATES,
    TURNS,
    Lake,
    exact_values,
    expected_return,
    uniform_policy,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from run import ActorArguments, actor_config, init_kwargs, run
from trl import TrlParser

from hfppo import PPOConfig, PPOTrainer

FOLDER = Path(__file__).parent / "lake"
ARROWS = dict(zip(MOVES, "↑↓←→", strict=True))


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
class Knowledge:
    """What policy and critic say about each state with all turns left."""

    states: list[int]  # their indices in `STATES`
    values: np.ndarray  # (N,) the critic's
    policy: np.ndarray  # (N, 4) probability of each move

    def exact_values(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the exact values of the states, (N,) each: of the best policy, and of this one as a table."""
        table = uniform_policy()
        table[self.states] = self.policy / self.policy.sum(axis=1, keepdims=True)
        return exact_values()[TURNS, self.states], exact_values(table)[TURNS, self.states]


def ask_states(trainer: PPOTrainer) -> Knowledge:
    """Begin a game in each state, and read policy and critic before the first move."""
    states = [i for i, (cell, _) in enumerate(STATES) if cell in START_CELLS]
    rollout = trainer.rollout([PROMPT] * len(states), start=states)
    with torch.no_grad():
        logits = trainer.model(input_ids=rollout.prompt_ids.to(trainer.args.device)).logits[:, -1]
    moves = trainer.processing_class.convert_tokens_to_ids(list(MOVES))
    return Knowledge(states, rollout.values[:, 0].numpy(), logits.float().softmax(dim=-1)[:, moves].cpu().numpy())


# The picture


def draw(history: list[dict[str, float]], games_per_step: float, known: Knowledge, file: Path) -> None:
    """Write a picture of the learning curve, and of the critic's values beside the exact ones."""
    best, own = known.exact_values()
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    curve, maps = figure.subfigures(1, 2, width_ratios=(1, 1.7))
    draw_curve(curve.subplots(), history, games_per_step)
    axes = maps.subplots(2, 3)
    columns = {"exact, best policy": best, "exact, this policy": own, "the critic": known.values}
    shown = np.concatenate(list(columns.values()))
    for column, (title, values) in enumerate(columns.items()):
        for row, key in enumerate((False, True)):
            which = [i for i, state in enumerate(known.states) if STATES[state][1] == key]
            cells = [STATES[known.states[i]][0] for i in which]
            moves = known.policy[which].argmax(axis=1) if title == "the critic" else None
            draw_map(axes[row, column], cells, values[which], moves, (shown.min(), shown.max()))
            axes[row, column].set_title(f"{title}, {'with' if key else 'without'} the key", fontsize=9)
    figure.savefig(file, dpi=110)


def draw_curve(axes: Axes, history: list[dict[str, float]], games_per_step: float) -> None:
    """Draw the return of the games of each rollout."""
    points = [(entry["step"] * games_per_step, entry["reward"]) for entry in history if "reward" in entry]
    axes.plot(*zip(*points, strict=True), label="PPO")
    axes.axhline(expected_return(), color="tab:green", linestyle="--", label="optimum")
    axes.axhline(expected_return(uniform_policy()), color="tab:gray", linestyle=":", label="uniform play")
    axes.set_xlabel("games")
    axes.set_ylabel("return of a game")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")


def draw_map(
    axes: Axes,
    cells: list[tuple[int, int]],
    values: np.ndarray,
    moves: np.ndarray | None,
    limits: tuple[float, float],
) -> None:
    """Draw the value of each cell, with an arrow for the likeliest move if given."""
    grid = np.full((SIZE, SIZE), np.nan)
    grid[tuple(zip(*cells, strict=True))] = values
    axes.imshow(grid, cmap="viridis", vmin=limits[0], vmax=limits[1])
    for i, (row, column) in enumerate(cells):
        arrow = "" if moves is None else list(ARROWS.values())[moves[i]]
        axes.text(column, row, f"{values[i]:.1f}{arrow}", ha="center", va="center", color="white", fontsize=8)
    for row, column in HOLES:
        axes.text(column, row, "hole", ha="center", va="center", fontsize=8)
    axes.text(CHEST[1], CHEST[0], "chest", ha="center", va="center", fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])


def play(trainer: PPOTrainer, when: str) -> dict[str, float]:
    """Play the games of the evaluation, and return their metrics."""
    with trainer.eval_sampling(True):
        metrics = trainer.evaluate(metric_key_prefix=f"{when}_sampled")
    return {**metrics, f"{when}_sampled_return": metrics[f"{when}_sampled_reward"]}


def compare(known: Knowledge) -> dict[str, float]:
    """Return how the critic's values agree with the exact ones of the best policy and of this one."""
    best, own = known.exact_values()
    return {
        "value_correlation_best_policy": float(np.corrcoef(known.values, best)[0, 1]),
        "value_correlation_this_policy": float(np.corrcoef(known.values, own)[0, 1]),
        "value_mean_difference_this_policy": float((known.values - own).mean()),
    }


def main(script_args: LakeArguments, args: PPOConfig, model_args: LakeActor) -> None:
    if args.device.type == "cpu":
        torch.set_num_threads(1)  # more threads cost such a small model more than they save
    args.model_init_kwargs = init_kwargs(args, model_args)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        environment_factory=Lake,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
        eval_dataset=Dataset.from_dict({"prompt": [PROMPT] * script_args.num_eval_games}),
        peft_config=actor_config(model_args),
        critic=script_args.critic,
    )

    def measure(when: str) -> None:
        metrics = play(trainer, when) | {"optimum": expected_return(), "uniform": expected_return(uniform_policy())}
        if when == "after":
            metrics["distance_to_optimum"] = metrics["optimum"] - metrics["after_sampled_return"]
            if args.needs_critic:
                known = ask_states(trainer)
                metrics |= compare(known)
                if trainer.is_world_process_zero():
                    games_per_step = args.rollout_size_per_process * args.world_size / args.updates_per_rollout
                    draw(trainer.state.log_history, games_per_step, known, Path(args.output_dir) / "lake.png")
        trainer.log_metrics(when, metrics)
        trainer.save_metrics(when, metrics)

    run(trainer, measure)


if __name__ == "__main__":
    main(*TrlParser((LakeArguments, PPOConfig, LakeActor), allow_abbrev=False).parse_args_and_config())
