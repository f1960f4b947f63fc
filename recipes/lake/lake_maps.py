"""The lake's values in the picture: exact ones of the best and of the trained policy, and the critic's."""

from pathlib import Path

import numpy as np
from lake_game import (
    CHEST,
    HOLES,
    PROMPT,
    START_CELLS,
    STATES,
    TURNS,
    exact_values,
    expected_return,
    show,
    uniform_policy,
)
from matplotlib.figure import Figure
from value_maps import ask_critic, compare, draw_curve, draw_map

from hfppo import PPOTrainer

ASKED = [i for i, (cell, _) in enumerate(STATES) if cell in START_CELLS]  # indices of the states in the picture


def compare_with_exact_values(trainer: PPOTrainer, policy: np.ndarray, file: Path) -> dict[str, float]:
    """Return how the critic's values agree with the exact ones, and write the picture.

    Args:
        policy: (S, 4), the share of each move in each state.
    """
    prompts = [[{"role": "user", "content": PROMPT[0]["content"] + show(STATES[i])}] for i in ASKED]
    critic = ask_critic(trainer, prompts)
    maps = {  # of each asked state with all turns left, (N,)
        "best policy, exact": exact_values()[TURNS, ASKED],
        "this policy, exact": exact_values(policy)[TURNS, ASKED],
        "this policy, critic": critic,
    }
    if trainer.is_world_process_zero():
        draw(trainer, maps, policy[ASKED], file)
    return compare(critic, *list(maps.values())[:2])


def draw(trainer: PPOTrainer, maps: dict[str, np.ndarray], policy: np.ndarray, file: Path) -> None:
    """Write a picture of the learning curve, of the critic's values and of the exact values."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.7))
    lines = {"optimum": expected_return(), "uniform play": expected_return(uniform_policy())}
    draw_curve(left.subplots(), trainer, lines)
    limits = {"vmin": min(map(np.min, maps.values())), "vmax": max(map(np.max, maps.values()))}
    words = dict.fromkeys(HOLES, "hole") | {CHEST: "chest"}
    axes = right.subplots(2, 3)
    for row, key in enumerate((False, True)):
        chosen = [n for n, i in enumerate(ASKED) if STATES[i][1] == key]
        cells = [STATES[ASKED[n]][0] for n in chosen]
        for ax, (title, values) in zip(axes[row], maps.items(), strict=True):
            draw_map(ax, cells, values[chosen], policy[chosen] if "this" in title else None, words, **limits)
            ax.set_title(f"{title}, {'with' if key else 'no'} key", fontsize=9)
    figure.savefig(file, dpi=110)
