"""An apple orchard: a game of eight turns in plain words, with luck between the turns, and its exact solution.

    8 days, $6, 0 apples: pick      Each day the player sees the days that are left, the price of an apple, and the
    7 days, $3, 2 apples: pick      apples in the basket, and answers one word. `pick` adds 1 to 3 apples; the basket
    6 days, $9, 5 apples: sell      holds 9. `sell` gives the day's price for each apple. The price is 1 to 9 dollars,
    5 days, $1, 0 apples: pick      drawn anew each day. Another answer loses the day.

The reward of a turn is a twentieth of its dollars. The best play sells at high prices and full baskets, and on the
last day at any price.
"""

import random
import re
from typing import Any

import numpy as np
from transformers import EvalPrediction

from hfppo import PPOTrainer, TextEnvironment

DAYS, HOLDS = 8, 9
PRICES, PICKED = range(1, 10), range(1, 4)
ACTIONS = ("pick", "sell")
REWARD = 1 / 20  # of a dollar

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # plain text, no markup
RULES = """Apples. Each day write one word, pick or sell.
pick: you find 1 to 3 apples. The basket holds 9.
sell: you get the price of the day in dollars for each apple.
The price is 1 to 9 dollars, new each day.

4 days, $4, 0 apples: pick
3 days, $8, 3 apples: sell
2 days, $5, 0 apples: sell
1 day, $2, 0 apples: pick
"""
PROMPT = [{"role": "user", "content": RULES}]  # `reset` appends the first day
REMINDER = "\npick or sell!"


class Orchard(TextEnvironment):
    """The game. `seed` draws the first price, `episode_seed` apples and later prices: a group shares only its start.

    Args:
        days: turns of a game.
    """

    def __init__(self, days: int = DAYS):
        self.days = days

    def reset(self, seed: int | None = None, episode_seed: int | None = None, **row: Any) -> str:
        """Begin with an empty basket, and return the first day as text."""
        self.left, self.apples, self.luck = self.days, 0, random.Random(episode_seed)
        self.price = random.Random(seed).choice(PRICES)
        return show(self.left, self.price, self.apples)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one day. A text that is not exactly one action loses the day."""
        action, reward, note = text.strip(), 0.0, ""
        if action == "pick":
            self.apples = min(self.apples + self.luck.choice(PICKED), HOLDS)
        elif action == "sell":
            reward, self.apples = REWARD * self.price * self.apples, 0
        else:
            note = REMINDER
        self.left, self.price = self.left - 1, self.luck.choice(PRICES)
        return note + show(self.left, self.price, self.apples), reward, self.left == 0, False, {}


def show(left: int, price: int, apples: int) -> str:
    """Return a day as text."""
    return f"\n{left} day{'s' * (left != 1)}, ${price}, {apples} apples:"


# The exact solution


def action_values(later: np.ndarray) -> np.ndarray:
    """Return the expected sum of rewards after each action, (2, 10, 9): by action, apples and price.

    Args:
        later: (10, 9) values of the next day's states.
    """
    kept = later.mean(axis=1)  # (10,) by apples, before the next price is known
    apples, prices = np.arange(HOLDS + 1), np.array(PRICES)
    pick = np.mean([kept[np.minimum(apples + found, HOLDS)] for found in PICKED], axis=0)
    sell = REWARD * apples[:, None] * prices + kept[0]
    return np.stack([np.broadcast_to(pick[:, None], sell.shape), sell])


def best_values(days: int = DAYS) -> np.ndarray:
    """Return the best expected sum of rewards, (days + 1, 10, 9): by days left, apples and price.

    V_0 = 0,   V_n(apples, price) = max_a Q_n(apples, price, a)
    """
    values = np.zeros((days + 1, HOLDS + 1, len(PRICES)))
    for left in range(1, days + 1):
        values[left] = action_values(values[left - 1]).max(axis=0)
    return values


def uniform_value(days: int = DAYS) -> float:
    """Return the expected return of play that picks and sells with probability ½ each."""
    values = np.zeros((HOLDS + 1, len(PRICES)))
    for _ in range(days):
        values = action_values(values).mean(axis=0)
    return float(values[0].mean())


BEST = best_values()
OPTIMUM = float(BEST[DAYS, 0].mean())  # expected return of the best play


def turns_of(text: str) -> list[tuple[int, int, int, str]]:
    """Return days left, price, apples and answer of each turn of a game's text."""
    found = re.findall(r"(\d+) days?, \$(\d), (\d) apples:(.*)", text)
    return [(int(left), int(price), int(apples), answer.strip()) for left, price, apples, answer in found]


def regret(completion: str) -> float:
    """Return the expected loss by a game's answers: the sum of V(s) − Q(s, a) over its turns, both of the best play.

    The optimum minus the mean regret estimates the expected return without bias. It does not depend on prices and
    apples that a right answer met, so it varies less the better the play is.

    Args:
        completion: text of a game of `DAYS` turns after the first day. On that day the price does not matter.
    """
    total = 0.0
    for left, price, apples, answer in turns_of(show(DAYS, PRICES[0], 0) + completion):
        now, later = BEST[left, apples, price - 1], BEST[left - 1]
        known = answer in ACTIONS
        taken = action_values(later)[ACTIONS.index(answer), apples, price - 1] if known else later[apples].mean()
        total += float(now - taken)
    return total


def measure_games(prediction: EvalPrediction) -> dict[str, float]:
    """Return the expected return as `regret` estimates it, and the share of turns that were no action."""
    games = [[message["content"] for message in messages] for messages in prediction.predictions]
    answers = [answer.strip() for game in games for answer in game[::2]]
    return {
        "expected_return": OPTIMUM - float(np.mean([regret("".join(game)) for game in games])),
        "invalid_turns": float(np.mean([answer not in ACTIONS for answer in answers])),
    }


def show_game(trainer: PPOTrainer) -> str:
    """Play a game, and return it as a table: each turn with its reward, the critic's value and that of the best play.

    Args:
        trainer: with `max_turn_length=1`, so that a turn is one token.
    """
    game = trainer.rollout([PROMPT])
    text = trainer.processing_class.decode(
        [*game.prompt_ids[0], *game.completion_ids[0][game.real[0]]], skip_special_tokens=True
    )
    rewards = game.rewards[game.mask].tolist()
    values = [None] * len(rewards) if game.values is None else game.values[game.mask].tolist()
    turns = turns_of(text)[-len(rewards) :]  # the rules show days, too
    lines = ["| days left | price | apples | answer | reward | critic | best play |", "|" + "---|" * 7]
    for (left, price, apples, answer), reward, value in zip(turns, rewards, values, strict=True):
        critic = "–" if value is None else f"{value:.2f}"
        best = BEST[left, apples, price - 1]
        lines.append(f"| {left} | ${price} | {apples} | {answer} | {reward:.2f} | {critic} | {best:.2f} |")
    return "\n".join(lines)
