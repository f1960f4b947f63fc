"""The lake game: its rules, its exact values, and the base that plays it."""

import build_lake_base
import lake
import numpy as np
import pytest
from lake_game import (
    MOVES,
    STATES,
    Lake,
    dynamics,
    exact_values,
    expected_return,
    start_distribution,
    state_of,
    uniform_policy,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, EvalPrediction
from value_maps import MoveCounter

from helpers.recipes import run_copy

BASE = lake.FOLDER / "base"


class NoLuck:
    """Moves never slip, and every new start is 2,2 without the key."""

    def choices(self, population, weights):
        return [population[0]]

    def choice(self, cells):
        return 2, 2

    def random(self):
        return 0.9


@pytest.mark.parametrize(
    ("state", "moves", "expected"),
    [
        (((0, 3), False), "右下", [("走 0,4 有", -0.02), ("走 1,4 有", -0.02)]),
        (((4, 3), True), "右上", [("宝 2,2 无", 0.98), ("洞 2,2 无", -0.52)]),
        (((4, 3), False), "右左", [("走 4,4 无", -0.02), ("走 4,3 无", -0.02)]),
        (((3, 0), True), "左右", [("走 3,0 有", -0.02), ("洞 2,2 无", -0.52)]),
        (((0, 0), False), ["上 下", "", "走", " 下 "], [("? 0,0 无", -0.02)] * 3 + [("走 1,0 无", -0.02)]),
    ],
    ids=["key", "chest with key", "chest without key", "wall and hole", "illegal"],
)
def test_rules_without_slips(state, moves, expected):
    game = Lake()
    game.reset()
    game.state, game.luck = state, NoLuck()
    assert [game.step(move)[:2] for move in moves] == expected


def test_a_seed_is_a_start_and_that_of_the_episode_the_luck():
    def play(seed, luck):
        game = Lake()
        return [game.reset(seed=seed, episode_seed=luck, other=1), *(game.step("下") for _ in range(32))]

    assert play(3, 1) == play(3, 1)
    assert play(3, 1)[0] == play(3, 2)[0] != play(4, 1)[0]
    assert play(3, 1) != play(3, 2)
    assert [turn[2:4] for turn in play(3, 1)[1:]] == [(False, False)] * 31 + [(True, False)]


@pytest.mark.parametrize("move", MOVES)
def test_the_dynamics_are_those_of_the_game(move):
    """2,000 turns from a cell beside a hole, at the wall; a frequency has a standard error of 0.011 at most."""
    probabilities, rewards = dynamics()
    assert np.allclose(probabilities.sum(axis=2), 1)
    beside = ((3, 0), True)
    s, a = STATES.index(beside), list(MOVES).index(move)
    game = Lake()
    game.reset(episode_seed=0)
    counts, total = np.zeros(len(STATES)), 0.0
    for _ in range(2000):
        game.state = beside
        total += game.step(move)[1]
        counts[STATES.index(game.state)] += 1
    assert np.abs(counts / 2000 - probabilities[s, a]).max() < 0.04
    assert total / 2000 == pytest.approx(rewards[s, a], abs=0.02)


def test_values_by_hand():
    def value(values, turns, cell, key):
        return values[turns, STATES.index((cell, key))]

    best = exact_values()
    assert (best[0] == 0).all()
    # One turn, above the chest: 0.8·1 − 0.02. Two turns, a cell further up: 0.8·0.78 + 0.2·(−0.02) − 0.02.
    assert value(best, 1, (3, 4), True) == pytest.approx(0.78)
    assert value(best, 1, (3, 4), False) == pytest.approx(-0.02)
    assert value(best, 2, (2, 4), True) == pytest.approx(0.6)
    # Above a hole: up −0.02, down −0.02 − 0.8·0.5, left and right −0.02 − 0.1·0.5.
    uniform = exact_values(uniform_policy())
    assert value(uniform, 1, (2, 1), False) == pytest.approx((-0.02 - 0.42 - 0.07 - 0.07) / 4)


def test_optimum_and_uniform_play():
    assert expected_return() == pytest.approx(2.900, abs=5e-4)
    assert expected_return(uniform_policy()) == pytest.approx(-1.488, abs=5e-4)
    assert start_distribution().sum() == pytest.approx(1)
    assert start_distribution()[STATES.index(((0, 4), False))] == 0  # the key lies there


def test_the_shipped_base_plays_each_move_alike_and_nearly_no_illegal_one():
    tokenizer, model = AutoTokenizer.from_pretrained(BASE), AutoModelForCausalLM.from_pretrained(BASE)
    assert model.num_parameters() < 350_000
    probabilities = build_lake_base.move_probabilities(model, tokenizer, num_games=20)
    assert 32 * (1 - float(probabilities.sum())) < 0.1
    assert ((probabilities - 0.25).abs() < 0.03).all()


def test_moves_are_counted_by_the_state_they_answer():
    """Of three turns the first answers the prompt, which is not in the completion, and the last is no move."""
    texts = ["上", "走 2,3 无", "下", "宝 0,0 有", "上 下"]
    game = [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(texts)]
    counter = MoveCounter(state_of, len(STATES))
    assert counter(EvalPrediction(predictions=[game, game[:1]], label_ids=None)) == {"illegal_turns": 0.5}
    assert counter.counts.sum() == 1
    s = STATES.index(((2, 3), False))
    assert counter.policy[s].tolist() == pytest.approx([0.125, 0.625, 0.125, 0.125])
    assert counter.policy[s - 1].tolist() == pytest.approx([0.25] * 4)


def test_the_recipe_in_small(tmp_path):
    results = run_copy("lake/lake.py", tmp_path, "--num_eval_games", "4")
    assert results["optimum"] == pytest.approx(2.900, abs=5e-4)
    assert -5 < results["before_sampled_return"] < results["optimum"]
    assert results["distance_to_optimum"] == pytest.approx(results["optimum"] - results["after_sampled_return"])
    assert results["before_sampled_turns/mean"] == 32
    assert 0 <= results["after_sampled_illegal_turns"] < 32
    assert (tmp_path / "out/lake.png").is_file()
