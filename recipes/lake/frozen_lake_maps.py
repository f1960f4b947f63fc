"""FrozenLake in words, its exact values by value iteration, and a picture of them and of the critic's values."""

from pathlib import Path
from typing import Any

import numpy as np
from lake_game import HAS_KEY, PROMPT
from matplotlib.figure import Figure
from value_maps import MOVES, ask_critic, compare, draw_curve, draw_map

from hfppo import PPOTrainer

SIZE = 4
MAP = ["SSSS", "SHSH", "SSSH", "HSSG"]  # the map of FrozenLake-v1, with a start (S) on every cell of ice
WORDS = {"H": "hole", "G": "goal"}
ACTIONS = {"左": 0, "下": 1, "右": 2, "上": 3}


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


def compare_with_value_iteration(
    trainer: PPOTrainer, moves: np.ndarray, transitions: dict[int, Any], file: Path
) -> dict[str, float]:
    """Return how the critic's values agree with the exact ones, and write a picture of both.

    Args:
        moves: (S, 4), the share of each of `MOVES` in each state.
        transitions: as in `value_iteration`.
    """
    gamma = trainer.args.gamma_turn
    states = [state for state in range(SIZE**2) if MAP[state // SIZE][state % SIZE] == "S"]
    prompts = [[{"role": "user", "content": PROMPT[0]["content"] + describe(state)}] for state in states]
    critic = ask_critic(trainer, prompts)
    policy = moves[:, [list(MOVES).index(word) for word in sorted(ACTIONS, key=ACTIONS.get)]]
    maps = {
        "best policy, value iteration": value_iteration(transitions, gamma)[states],
        "this policy, value iteration": value_iteration(transitions, gamma, policy)[states],
        "this policy, critic": critic,
    }
    if trainer.is_world_process_zero():
        draw(trainer, [divmod(state, SIZE) for state in states], maps, moves[states], file)
    return compare(critic, *list(maps.values())[:2])


def draw(
    trainer: PPOTrainer, cells: list[tuple[int, int]], maps: dict[str, np.ndarray], policy: np.ndarray, file: Path
) -> None:
    """Write a picture of the learning curve, and of the values of the cells by their titles, (N,) each."""
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    curve, *axes = figure.subplots(1, 1 + len(maps))
    draw_curve(curve, trainer, {})
    words = {(row, column): WORDS[c] for row, line in enumerate(MAP) for column, c in enumerate(line) if c in WORDS}
    limits = {"vmin": 0.0, "vmax": max(map(np.max, maps.values()))}
    for ax, (title, values) in zip(axes, maps.items(), strict=True):
        draw_map(ax, cells, values, policy if "this" in title else None, words, **limits)
        ax.set_title(title, fontsize=9)
    figure.savefig(file, dpi=110)
