"""Code that the games share: policy and critic asked about each state, and pictures of their answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from hfppo import PPOTrainer

MOVES = {"上": "↑", "下": "↓", "左": "←", "右": "→"}  # with the arrows that show them

Cell = tuple[int, int]


@torch.no_grad()
def ask_states(trainer: PPOTrainer, prompts: list[list[dict[str, Any]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the critic's value of each prompt, (N,), and the policy's probability of each of `MOVES`, (N, 4).

    Args:
        prompts: conversations of equally many tokens that end with an observation.
    """
    tokenizer = trainer.processing_class
    rendered: Any = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids = rendered["input_ids"].to(trainer.args.device)
    moves = tokenizer.convert_tokens_to_ids(list(MOVES))
    policy = trainer.model(input_ids=ids).logits[:, -1].float().softmax(dim=-1)[:, moves]
    # The value of the state before a token: of any one, here padding.
    longer = torch.nn.functional.pad(ids, (0, 1), value=tokenizer.pad_token_id)
    one = torch.ones_like(ids[:, :1], dtype=torch.bool)
    outputs = trainer.model(longer, torch.ones_like(longer), completion_mask=one, policy=False)
    return outputs.values[:, 0].cpu().numpy(), policy.cpu().numpy()


def compare(values: np.ndarray, best: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Return how the critic's values agree with the exact ones of the best policy and of its own; NaN if constant."""
    with np.errstate(invalid="ignore", divide="ignore"):
        to_best, to_own = (float(np.corrcoef(values, exact)[0, 1]) for exact in (best, own))
    return {
        "value_correlation_best_policy": to_best,
        "value_correlation_own_policy": to_own,
        "value_mean_difference_own_policy": float((values - own).mean()),
    }


def draw_curve(axes: Axes, history: list[dict[str, float]], games_per_step: float, lines: dict[str, float]) -> None:
    """Draw the score of each logged rollout, and horizontal lines by name."""
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
