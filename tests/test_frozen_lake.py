"""gymnasium's FrozenLake in text: the adapter, the exact values, and a short run of the recipe."""

import gymnasium
import numpy as np
import pytest
from frozen_lake_maps import ACTIONS, describe, value_iteration
from gymnasium_text import GymnasiumEnvironment

from helpers.recipes import run_copy


@pytest.fixture
def lake():
    env = gymnasium.make("FrozenLake-v1", desc=["SFFF", "FFFF", "FFFF", "FFFG"], is_slippery=False)
    return GymnasiumEnvironment(env, actions=ACTIONS, describe=describe)


def test_words_are_actions_and_observations_are_words(lake):
    assert lake.reset(seed=0, prompt="ignored") == "0,0 无"
    assert lake.step(" 右 ")[:4] == ("0,1 无", 0.0, False, False)
    assert lake.step("下")[0] == "1,1 无"
    for move in "右右下":
        lake.step(move)
    assert lake.step("下")[:4] == ("3,3 无", 1.0, True, False)


def test_a_text_that_is_no_action_changes_nothing(lake):
    lake.reset(seed=0)
    lake.step("右")
    assert lake.step("右 右") == ("? 0,1 无", 0.0, False, False, {})
    assert lake.step("右")[0] == "0,2 无"


def test_value_iteration_by_hand():
    """Action 0 ends with reward 1 half of the time and stays otherwise; action 1 stays. V = ½ + ½·0.9·V = 0.909."""
    transitions = {0: {0: [(0.5, 0, 1.0, True), (0.5, 0, 0.0, False)], 1: [(1.0, 0, 0.0, False)]}}
    assert value_iteration(transitions, 0.9) == pytest.approx([0.5 / 0.55])
    # Both alike: V = ½·(½ + 0.45·V) + ½·0.9·V
    assert value_iteration(transitions, 0.9, np.array([[0.5, 0.5]])) == pytest.approx([0.25 / 0.325])


def test_the_recipe_in_small(tmp_path):
    results = run_copy("lake/frozen_lake.py", tmp_path, "--num_eval_games", "4")
    assert 0 <= results["before_sampled_return"] <= 1
    assert 0 <= results["after_sampled_return"] <= 1
    assert "value_correlation_own_policy" in results
    assert (tmp_path / "out/frozen_lake.png").is_file()
