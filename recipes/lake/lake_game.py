"""A slippery lake with a key and a chest: a game of 32 turns in text, and its exact values.

    . . . . K      . ice   # hole   K key   G chest
    . . # . .
    . . . . .      The player sees a cell, row and column from 0, and whether the key is in hand, 有, or not, 无:
    . # . . .      走 2,3 无. The answer is one word: 上 up, 下 down, 左 left, 右 right.
    . . . . G

A move slips to either side with probability 0.1 each; a move into a wall stays in place. Each turn costs 0.02. The
reward is 1 for reaching the chest with the key and −0.5 for a hole; after both the game continues from a new random
start. It ends after exactly 32 turns.
"""

import random
from typing import Any

import numpy as np

from hfppo import TextEnvironment

TURNS = 32
SIZE = 5
KEY, CHEST, HOLES = (0, 4), (4, 4), ((1, 2), (3, 1))
MOVES = {"上": (-1, 0), "下": (1, 0), "左": (0, -1), "右": (0, 1)}
SLIP = 0.1  # to each side
STEP_REWARD, CHEST_REWARD, HOLE_REWARD = -0.02, 1.0, -0.5
MOVED, FOUND_CHEST, FELL, ILLEGAL = "走", "宝", "洞", "?"
HAS_KEY = {False: "无", True: "有"}
PROMPT = [{"role": "user", "content": f"{MOVED} "}]  # the environment appends where the game begins

Cell = tuple[int, int]
State = tuple[Cell, bool]  # where, and whether with the key

CELLS = [(row, column) for row in range(SIZE) for column in range(SIZE)]
STATES: list[State] = [(cell, key) for cell in CELLS if cell not in HOLES for key in (False, True)]
START_CELLS = [cell for cell in CELLS if cell not in (*HOLES, CHEST)]


def slide(state: State, step: tuple[int, int]) -> tuple[str, float, State | None]:
    """Return the word for what happened, the reward, and the next state; None is a new start."""
    (row, column), key = state
    cell = min(max(row + step[0], 0), SIZE - 1), min(max(column + step[1], 0), SIZE - 1)
    if cell in HOLES:
        return FELL, STEP_REWARD + HOLE_REWARD, None
    if cell == CHEST and key:
        return FOUND_CHEST, STEP_REWARD + CHEST_REWARD, None
    return MOVED, STEP_REWARD, (cell, key or cell == KEY)


def directions(move: str) -> list[tuple[float, tuple[int, int]]]:
    """Return where a move may go, with probabilities: ahead, and to either side."""
    down, right = MOVES[move]
    return [(1 - 2 * SLIP, (down, right)), (SLIP, (right, down)), (SLIP, (-right, -down))]


class Lake(TextEnvironment):
    """The game. `seed` draws the start, `episode_seed` slips and later starts: a group shares its start, not its luck.

    Args:
        turns: length of an episode.
    """

    def __init__(self, turns: int = TURNS):
        self.turns = turns

    def reset(self, seed: int | None = None, episode_seed: int | None = None, **row: Any) -> str:
        """Begin at a random start, and return the state as text."""
        self.turn, self.luck = 0, random.Random(episode_seed)
        self.state = draw_start(random.Random(seed))
        return show(self.state)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn. A text that is not exactly one move costs the turn."""
        self.turn += 1
        word, reward, state = ILLEGAL, STEP_REWARD, self.state
        if (move := text.strip()) in MOVES:
            chances, steps = zip(*directions(move), strict=True)
            word, reward, state = slide(self.state, self.luck.choices(steps, chances)[0])
        self.state = draw_start(self.luck) if state is None else state
        return f"{word} {show(self.state)}", reward, self.turn == self.turns, False, {}


def draw_start(luck: random.Random) -> State:
    """Draw a cell that is neither hole nor chest; the key is in hand half of the time, and always on its cell."""
    cell = luck.choice(START_CELLS)
    return cell, luck.random() < 0.5 or cell == KEY


def show(state: State) -> str:
    """Return a state as text."""
    (row, column), key = state
    return f"{row},{column} {HAS_KEY[key]}"


def state_of(observation: str) -> int:
    """Return the index of the state that an observation ends with."""
    *_, cell, key = observation.split()
    row, column = map(int, cell.split(","))
    return STATES.index(((row, column), key == HAS_KEY[True]))


# The exact solution


def start_distribution() -> np.ndarray:
    """Return the probability of each state as a start, (S,)."""
    starts = np.zeros(len(STATES))
    for cell in START_CELLS:
        for key in (False, True):
            starts[STATES.index((cell, key or cell == KEY))] += 0.5 / len(START_CELLS)
    return starts


def dynamics() -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of each next state, (S, A, S), and the expected reward, (S, A); A in order of `MOVES`."""
    starts = start_distribution()
    probabilities = np.zeros((len(STATES), len(MOVES), len(STATES)))
    rewards = np.zeros((len(STATES), len(MOVES)))
    for s, state in enumerate(STATES):
        for a, move in enumerate(MOVES):
            for chance, step in directions(move):
                _, reward, after = slide(state, step)
                rewards[s, a] += chance * reward
                probabilities[s, a] += chance * (starts if after is None else np.eye(len(STATES))[STATES.index(after)])
    return probabilities, rewards


def exact_values(policy: np.ndarray | None = None, turns: int = TURNS) -> np.ndarray:
    """Return the expected sum of rewards from each state, (turns + 1, S), by the number of turns left.

        V_0 = 0,   V_n(s) = max_a or Σ_a π(a|s) of  R(s, a) + Σ_s' P(s'|s, a)·V_{n−1}(s')

    Args:
        policy: (S, A) or, by turns left, (turns + 1, S, A) probabilities of moves; None is the best policy.
    """
    probabilities, rewards = dynamics()
    values = np.zeros((turns + 1, len(STATES)))
    for left in range(1, turns + 1):
        of_moves = rewards + probabilities @ values[left - 1]
        if policy is None:
            values[left] = of_moves.max(axis=1)
        else:
            values[left] = ((policy if policy.ndim == 2 else policy[left]) * of_moves).sum(axis=1)
    return values


def expected_return(policy: np.ndarray | None = None, turns: int = TURNS) -> float:
    """Return the expected return of an episode, of a policy as in `exact_values`."""
    return float(start_distribution() @ exact_values(policy, turns)[turns])


def uniform_policy() -> np.ndarray:
    """Return the policy that makes each move with the same probability, (S, A)."""
    return np.full((len(STATES), len(MOVES)), 1 / len(MOVES))
