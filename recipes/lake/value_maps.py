"""Code that the games share: the moves of a policy and the values of a critic by state, and pictures of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from transformers import EvalPrediction

from hfppo import PPOTrainer

MOVES = {"上": "↑", "下": "↓", "左": "←", "右": "→"}  # with the arrows that show them

Cell = tuple[int, int]


class MoveCounter:
    """A `compute_metrics` that counts which moves were made in which states.

    Args:
        state_of: index of a state from an observation.
        num_states: S.
    """

    def __init__(self, state_of: Callable[[str], int], num_states: int):
        self.state_of = state_of
        self.counts = np.zeros((num_states, len(MOVES)))

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Count anew, and return the mean number of turns per game that were no move."""
        self.counts = np.zeros_like(self.counts)
        illegal = 0
        for game in prediction.predictions:
            illegal += sum(m["role"] == "assistant" and m["content"].strip() not in MOVES for m in game)
            for asked, turn in pairwise(game):  # the first observation, which belongs to the prompt, is left out
                if asked["role"] == "user" and (move := turn["content"].strip()) in MOVES:
                    self.counts[self.state_of(asked["content"]), list(MOVES).index(move)] += 1
        return {"illegal_turns": illegal / len(prediction.predictions)}

    @property
    def policy(self) -> np.ndarray:
        """(S, 4): the share of each move in each state, with one uniformly random move more than were made."""
        more = self.counts + 1 / len(MOVES)
        return more / more.sum(axis=1, keepdims=True)


@torch.no_grad()
def ask_critic(trainer: PPOTrainer, prompts: list[list[dict[str, Any]]]) -> np.ndarray:
    """Return the critic's value of each prompt, (N,).

    Args:
        prompts: conversations of equally many tokens that end with an observation.
    """
    tokenizer = trainer.processing_class
    rendered: Any = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    # The value of the state before a token: of any one, here padding.
    ids = torch.nn.functional.pad(rendered["input_ids"], (0, 1), value=tokenizer.pad_token_id)
    ids = ids.to(trainer.args.device)
    one = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return trainer.model(ids, torch.ones_like(ids), completion_mask=one).values[:, 0].cpu().numpy()


def compare(values: np.ndarray, best: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Return how the critic's values agree with the exact ones of the best policy and of its own; NaN if constant."""
    with np.errstate(invalid="ignore", divide="ignore"):
        to_best, to_own = (float(np.corrcoef(values, exact)[0, 1]) for exact in (best, own))
    return {
        "value_correlation_best_policy": to_best,
        "value_correlation_own_policy": to_own,
        "value_mean_difference_own_policy": float((values - own).mean()),
    }


def draw_curve(axes: Axes, trainer: PPOTrainer, lines: dict[str, float]) -> None:
    """Draw the score of each logged rollout, and horizontal lines by name."""
    args, history = trainer.args, trainer.state.log_history
    games_per_step = args.rollout_size_per_process * args.world_size / args.updates_per_rollout
    points = [(entry["step"] * games_per_step, entry["reward"]) for entry in history if "reward" in entry]
    axes.plot([games for games, _ in points], [reward for _, reward in points], label="PPO")
    for name, value in lines.items():
        axes.axhline(value, color="black", linestyle="--" if value == max(lines.values()) else ":", label=name)
    axes.set_xlabel("games")
    axes.set_ylabel("return of a game")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def draw_map(
    axes: Axes, cells: Sequence[Cell], values: np.ndarray, policy: np.ndarray | None, words: dict[Cell, str], **limits
) -> None:
    """Draw the value of each cell, and an arrow for the likeliest move.

    Args:
        values: (N,), of the cells.
        policy: (N, 4) probabilities of `MOVES`; None draws no arrows.
        words: what to write into other cells.
        limits: `vmin` and `vmax`, values of the darkest and of the lightest color.
    """
    size = 1 + max(map(max, [*cells, *words]))
    grid = np.full((size, size), np.nan)
    grid[tuple(zip(*cells, strict=True))] = values
    axes.imshow(grid, **limits)
    arrows = [""] * len(cells) if policy is None else [list(MOVES.values())[move] for move in policy.argmax(axis=1)]
    middle = sum(limits.values()) / 2
    for (row, column), value, arrow in zip(cells, values, arrows, strict=True):
        color = "white" if value < middle else "black"
        axes.text(column, row, f"{value:.2f}{arrow}", ha="center", va="center", color=color, fontsize=7)
    for (row, column), word in words.items():
        axes.text(column, row, word, ha="center", va="center", fontsize=7)
    axes.set_xticks([])
    axes.set_yticks([])
