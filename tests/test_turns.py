"""Credit across turns: factors of GAE by turn, worked by hand and from the definitions."""

import pytest
import torch
from torch.testing import assert_close

from helpers.formulas import bits
from hfppo.functional import gae, turn_ends, turn_factors, turn_starts

MASK = bits("1100110010")
CONTEXT = bits("0011001100")
REWARDS = torch.tensor([[0.0, 1.0, 0, 0, 0, -0.5, 0, 0, 2.0, 0]])
VALUES = torch.tensor([[0.5, 0.7, 9, 9, 0.2, 0.4, 9, 9, 1.5, 9]])


def factors(within, between, mask=MASK, context=CONTEXT):
    return turn_factors(within, between, turn_ends(mask, context))


def test_ends_and_starts_of_turns():
    assert turn_ends(MASK, CONTEXT).equal(bits("0100010000"))  # nothing follows the last turn
    assert turn_starts(MASK).equal(bits("1000100010"))
    assert turn_ends(bits("110"), bits("001")).equal(bits("010"))  # context that nothing answers
    assert not turn_ends(bits("111"), bits("000")).any()


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 0.9), (0.7, 1.0)])
def test_equal_factors_are_token_gae_bit_for_bit(gamma, lam):
    plain = gae(REWARDS, VALUES, MASK, gamma, lam)
    by_turn = gae(REWARDS, VALUES, MASK, factors(gamma, gamma), factors(lam, lam))
    assert all(x.equal(y) for x, y in zip(plain, by_turn, strict=True))


def test_turn_level_gae_worked_by_hand():
    """γ = λ = 1 within turns: δ of a turn is R + γ·V(next start) − V(start), and A decays from turn to turn."""
    advantages, returns = gae(REWARDS, VALUES, MASK, factors(1.0, 0.9), factors(1.0, 0.5))
    deltas = [1.0 + 0.9 * 0.2 - 0.5, -0.5 + 0.9 * 1.5 - 0.2, 2.0 - 1.5]
    third = deltas[2]
    second = deltas[1] + 0.45 * third
    first = deltas[0] + 0.45 * second
    assert_close(advantages[0, [0, 4, 8]], torch.tensor([first, second, third]))
    assert_close(advantages[0, 1], torch.tensor(first + 0.5 - 0.7))  # inside a turn: A of its start + V(start) − V
    assert_close(returns[0, [0, 4]], torch.tensor([first + 0.5, second + 0.2]))


def test_bi_level_gae_by_definition():
    within, between = (0.97, 0.8), (0.9, 0.5)
    advantages, _ = gae(REWARDS, VALUES, MASK, factors(within[0], between[0]), factors(within[1], between[1]))
    expected, running, following = torch.zeros_like(VALUES), 0.0, 0.0
    for t in (8, 5, 4, 1, 0):
        gamma, lam = between if t in (1, 5) else within
        running = float(REWARDS[0, t]) + gamma * following - float(VALUES[0, t]) + gamma * lam * running
        expected[0, t], following = running, float(VALUES[0, t])
    assert_close(advantages, expected)


def test_length_adaptive_lam_holds_within_turns_alone():
    found = factors(torch.tensor([0.3]), 0.9)
    assert_close(found, torch.tensor([[0.3, 0.9, 0.3, 0.3, 0.3, 0.9, 0.3, 0.3, 0.3, 0.3]]).double())


def test_a_final_value_is_worth_a_turn_after_trailing_context():
    mask, context = bits("1100"), bits("0011")
    rewards, values = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 5.0, 5.0]])
    cut, _ = gae(rewards, values, mask, factors(1.0, 0.5, mask, context), 1.0, final_value=torch.tensor([2.0]))
    assert_close(cut, torch.tensor([[1.0, 1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_factors_of_another_shape_are_refused(name):
    with pytest.raises(ValueError, match=rf"'{name}': \(1, 9\)"):
        gae(REWARDS, VALUES, MASK, **{name: torch.ones(1, 9)})
