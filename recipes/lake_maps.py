"""The lake's values in the picture: exact ones of the best and of the trained policy, and the critic's."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from build_lake_base import PROMPT
from lake_game import CHEST, HOLES, START_CELLS, STATES, TURNS, exact_values, expected_return, show, uniform_policy
from matplotlib.figure import Figure
from value_maps import ask_critic, compare, draw_curve, draw_map

from hfppo import PPOTrainer

ASKED = [i for i, (cell, _) in enumerate(STATES) if cell in START_CELLS]  # indices of the states in the picture


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


def draw(trainer: PPOTrainer, maps: Maps, file: Path) -> None:
    """Write a picture of the learning curve, of the critic's values and of the exact values."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.7))
    lines = {"optimum": expected_return(), "uniform play": expected_return(uniform_policy())}
    draw_curve(left.subplots(), trainer, lines)
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


def compare_with_exact_values(trainer: PPOTrainer, policy: np.ndarray, file: Path) -> dict[str, float]:
    """Return how the critic's values agree with the exact ones, and write the picture.

    Args:
        policy: (S, 4), the share of each move in each state.
    """
    maps = Maps.of(trainer, policy)
    if trainer.is_world_process_zero():
        draw(trainer, maps, file)
    return compare(maps.critic, maps.best, maps.own)
