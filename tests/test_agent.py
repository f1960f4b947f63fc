"""The apple game: its rules, its best play, and a short run of its recipe."""

from functools import cache

import numpy as np
import pytest
from agent_game import BEST, OPTIMUM, Orchard, measure_games, regret, show, turns_of
from build_tiny_base import build
from transformers import EvalPrediction

from helpers.recipes import run_copy


class Luck:
    """Every draw is the largest: 3 apples, or a price of 9 dollars."""

    def choice(self, values):
        return max(values)


def test_rules_by_hand():
    game = Orchard(days=6)
    assert game.reset(episode_seed=0).startswith("\n6 days, $")
    game.luck, game.price = Luck(), 4
    assert game.step(" sell")[:3] == ("\n5 days, $9, 0 apples:", 0.0, False)
    assert game.step(" pick")[:3] == ("\n4 days, $9, 3 apples:", 0.0, False)
    assert game.step("pick sell")[:3] == ("\npick or sell!\n3 days, $9, 3 apples:", 0.0, False)
    game.apples = 8
    assert game.step("pick")[0] == "\n2 days, $9, 9 apples:"  # the basket is full
    assert game.step("sell\n")[:3] == ("\n1 day, $9, 0 apples:", pytest.approx(81 / 20), False)
    assert game.step("")[1:4] == (0.0, True, False)


def play(choose, seed, start=0):
    """Return a game's text after the first day, and its return."""
    game, text, total = Orchard(), "", 0.0
    observation, done = game.reset(seed=start, episode_seed=seed, other=1), False
    while not done:
        action = choose(*turns_of(observation)[-1][:3])
        observation, reward, done, *_ = game.step(action)
        text, total = text + f" {action}" + (observation if not done else ""), total + reward
    return text, total


def test_a_seed_is_the_first_price_and_that_of_the_episode_the_luck():
    always_pick = [play(lambda *state: "pick", seed)[0] for seed in (3, 3, 4)]
    assert always_pick[0] == always_pick[1] != always_pick[2]
    assert play(lambda *state: "pick", 3, start=1)[0] == always_pick[0]
    assert Orchard().reset(seed=0, episode_seed=1) == Orchard().reset(seed=0, episode_seed=2)
    assert len({Orchard().reset(seed=seed) for seed in range(50)}) == 9


def test_best_values_from_the_rules_alone():
    @cache
    def value(left, apples, price):
        if left == 0:
            return 0.0
        sold = price * apples / 20 + sum(value(left - 1, 0, p) for p in range(1, 10)) / 9
        more = [min(apples + found, 9) for found in (1, 2, 3)]
        return max(sold, sum(value(left - 1, n, p) for n in more for p in range(1, 10)) / 27)

    every = [[[value(left, apples, price) for price in range(1, 10)] for apples in range(10)] for left in range(9)]
    assert np.allclose(BEST, every)
    assert np.mean(every[8][0]) == pytest.approx(OPTIMUM) == pytest.approx(3.721, abs=5e-4)


def test_play_without_regret_is_the_best():
    def best(left, price, apples):
        sold = price * apples / 20 + BEST[left - 1, 0].mean()
        return "sell" if np.isclose(sold, BEST[left, apples, price - 1]) else "pick"

    games = [play(best, seed) for seed in range(1000)]
    assert max(abs(regret(text)) for text, _ in games) < 1e-12
    assert np.mean([total for _, total in games]) == pytest.approx(OPTIMUM, abs=0.12)


def test_games_are_measured_from_messages():
    answers = [" pick", "\n", " sell", " sell", " pick", " x", " pick", " sell"]
    days = [show(left, 3, 0) for left in range(7, 0, -1)]
    messages = [{"role": "assistant", "content": answers[0]}]
    for day, answer in zip(days, answers[1:], strict=True):
        messages += [{"role": "user", "content": day}, {"role": "assistant", "content": answer}]
    measured = measure_games(EvalPrediction(predictions=[messages], label_ids=None))
    assert measured["invalid_turns"] == 2 / 8
    text = "".join(message["content"] for message in messages)
    assert measured["expected_return"] == pytest.approx(OPTIMUM - regret(text))
    assert [turn[3] for turn in turns_of(text)] == [answer.strip() for answer in answers[1:]]


def test_the_recipe_in_small(tmp_path, capsys):
    build(str(tmp_path / "tiny"))
    flags = ["--num_mini_batches", "1", "--num_eval_games", "4", "--max_completion_length", "340"]
    results = run_copy("agent/agent.py", tmp_path, *flags, "--model_name_or_path", str(tmp_path / "tiny"))
    assert results["optimum"] == OPTIMUM
    assert results["after_turns/mean"] == 8
    assert results["before_expected_return"] <= OPTIMUM
    assert 0 <= results["after_invalid_turns"] <= 1
    assert results["train_runtime"] > 0
    shown = capsys.readouterr().out
    for when in ("before", "after"):
        table = (tmp_path / f"out/{when}_game.md").read_text()
        assert table in shown
        days = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
        assert days == [str(left) for left in range(8, 0, -1)]
