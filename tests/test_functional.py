"""The mathematics of hfppo.functional, against numbers worked out by hand, definitions and properties."""

import math
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from helpers.formulas import CALLS, INPUTS, bits
from hfppo import functional as F
from hfppo.functional.kl import last_real_index

NAN = float("nan")
GROUP_ESTIMATORS = {f.__name__: f for f in (F.grpo, F.rloo, F.opo, F.reinforce_plus_plus_baseline)}
quick = settings(max_examples=50, deadline=None, database=None, derandomize=True)
unit = st.floats(0, 1)
number = st.floats(-3, 3)


def double(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def batches(draw, num_numbers: int, min_rows: int = 1, empty_rows: bool = True):
    """A random mask with holes, and `num_numbers` random float64 tensors of its shape, from −3 to 3."""
    rows, columns = draw(st.integers(min_rows, 4)), draw(st.integers(1, 6))
    row = st.lists(st.booleans(), min_size=columns, max_size=columns).filter(lambda x: empty_rows or any(x))
    mask = torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    numbers = torch.rand(num_numbers, rows, columns, generator=generator, dtype=torch.float64) * 6 - 3
    return mask, *numbers


def grad_of(function, x: Tensor) -> Tensor:
    """Gradient of the sum of function(x)."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


# GAE


# Rewards, values, mask, γ, λ, the value after the end, and advantages.
GAE = {
    "masked columns": ([[0, 0, 0, 1]], [[0.2, 0.3, 0.4, 0.5]], ["0011"], 0.99, 0.95, None, [[0, 0, 0.56525, 0.5]]),
    "one completion": (
        [[-0.01] * 5 + [0.99]],
        [[0.85, 0.88, 0.90, 0.93, 0.96, 0.99]],
        ["111111"],
        0.99,
        0.95,
        None,
        [[0.0381593015, 0.0286648607, 0.0294150565, 0.01989905, 0.0101, 0]],
    ),
    "λ = 0 gives the TD error": ([[1, 0, 2]], [[0.5, 1, -1]], ["111"], 0.5, 0.0, None, [[1, -1.5, 3]]),
    "over a hole to the next real value": ([[1, 0, 0]], [[0.5, 100, 2]], ["101"], 0.5, 0.0, None, [[1.5, 0, -2]]),
    # With λ = 1 the returns, 2.75, 3.5 and 3, are discounted sums that start at the token's own reward.
    "the first value predicts the first reward too": (
        [[1, 2, 3]], [[9, -4, 7]], ["111"], 0.5, 1.0, None, [[2.75 - 9, 3.5 + 4, 3 - 7]]
    ),
    "bootstrapped after the last real token": (
        [[1, 0, 0], [0, 2, 0]],
        [[0.5, 7, 7], [7, 0.5, 7]],
        ["100", "010"],
        0.9,
        0.5,
        [2, -1],
        [[2.3, 0, 0], [0, 0.6, 0]],
    ),
    "0 after the end by default": ([[1, 0]], [[0.5, 7]], ["10"], 0.9, 0.5, None, [[0.5, 0]]),
    "no real token": ([[0, 0]], [[3, 4]], ["00"], 1.0, 0.95, [5], [[0, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("case", GAE)
def test_gae_by_hand(case):
    rewards, values, mask, gamma, lam, final, expected = GAE[case]
    final = None if final is None else double(*final)
    advantages, returns = F.gae(double(*rewards), double(*values), bits(*mask), gamma, lam, final)
    assert_close(advantages, double(*expected))
    assert_close(returns, torch.where(bits(*mask), double(*expected) + double(*values), 0.0))


def gae_by_definition(rewards, values, mask, gamma, lams, final):
    """A_t = Σ_l (γλ)^l δ_{t+l}, the sums over real tokens only."""
    advantages = torch.zeros_like(rewards)
    for row in range(len(mask)):
        real = mask[row].nonzero().flatten().tolist()
        r, v = [rewards[row, t].item() for t in real], [values[row, t].item() for t in real] + [final[row].item()]
        for i, t in enumerate(real):
            advantages[row, t] = sum(
                (gamma * lams[row].item()) ** (k - i) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(i, len(real))
            )
    return advantages


@quick
@given(batches(3), unit, st.one_of(unit, st.none()))
def test_gae_is_its_double_sum_over_real_tokens(batch, gamma, lam):
    """With one λ for all, or one for each completion."""
    mask, rewards, values, extra = batch
    rewards, final = rewards * mask, extra[:, 0]
    lams = extra[:, -1].abs() / 3 if lam is None else torch.full((len(mask),), lam, dtype=torch.float64)
    advantages, returns = F.gae(rewards, values, mask, gamma, lams if lam is None else lam, final_value=final)
    expected = gae_by_definition(rewards, values, mask, gamma, lams, final)
    assert_close(advantages, expected)
    assert_close(returns, torch.where(mask, expected + values, 0.0))


# Lengths, whitening, explained variance


def test_length_adaptive_lam_by_hand():
    lengths = [100, 40, 20, 10, 0]
    mask = bits(*[("10" * n).ljust(200, "0") for n in lengths])
    assert_close(F.length_adaptive_lam(mask, alpha=0.05), torch.tensor([0.8, 0.5, 0, 0, 0]))


def test_whiten_by_hand():
    x, mask = double([1, 100, 3], [-50, 5, 7]), bits("101", "011")
    expected = double([-3, 0, -1], [0, 1, 3]) / math.sqrt(5)
    assert_close(F.whiten(x, mask), expected)


def test_whiten_of_one_or_no_real_token_is_finite():
    assert_close(F.whiten(double([9, 3, 9]), bits("010")), double([0, 0, 0]))
    assert_close(F.whiten(double([1, 2]), bits("00")), double([0, 0]))


@pytest.mark.parametrize("number", [0.1, 0.7, 1e-3, 123.4])
def test_whiten_of_equal_numbers_is_exactly_zero(number):
    """In float32 the mean of nine is not always the number, and the difference would be scaled up."""
    x = torch.full((3, 3), number, dtype=torch.float32)
    assert F.whiten(x, torch.ones(3, 3, dtype=torch.bool)).tolist() == torch.zeros(3, 3).tolist()


def test_whiten_can_take_the_unbiased_variance_and_eps_stands_under_the_root():
    assert_close(F.whiten(double([-1, 1, 9]), bits("110"), correction=1), double([-1, 1, 0]) / 2**0.5)
    assert F.whiten(double([3.0]), bits("1"), correction=1).tolist() == [[0.0]]
    assert_close(F.whiten(double([-1, 1]), bits("11"), eps=3.0), double([-0.5, 0.5]))


@pytest.mark.parametrize("function", [F.whiten, F.explained_variance, F.effective_sample_size])
def test_rows_of_several_processes_are_measured_together_by_their_sums(function):
    x, mask = (
        torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),
        bits("110110", "100000", "000000", "111111"),
    )
    given = [x, x.square(), mask] if function is F.explained_variance else [x, mask]
    sums: list[torch.Tensor] = []
    whole = function(*given, total=lambda some: sums.append(some.sum()) or sums[-1])
    assert_close(whole, function(*given))
    part = function(*(some[:1] for some in given), total=lambda some: sums.pop(0))
    assert_close(part, whole[:1] if function is F.whiten else whole)
    assert sums == []


def test_explained_variance_by_hand():
    mask = bits("0110")
    assert F.explained_variance(double([8, 1, 0, 8]), double([-8, 0, 1, 50]), mask) == pytest.approx(-3.0)
    assert F.explained_variance(double([8, 0, 0.5, 8]), double([-8, 0, 1, 50]), mask) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("constant", "length"),
    [(0.0, 4), (2.0, 4), (2.0, 1), (0.1, 7), (0.3, 6)],  # the float32 mean of seven 0.1 is not 0.1
)
def test_explained_variance_is_nan_when_the_returns_do_not_vary(constant, length):
    values, returns = torch.linspace(0, 1, length)[None], torch.full((1, length), constant)
    assert math.isnan(F.explained_variance(values, returns, torch.ones(1, length, dtype=torch.bool)))


# Estimators that need no critic

GROUPS = torch.tensor([7, 3, 7, 3, 7])
GROUP_MASK = bits("0100", "1110", "1010", "0001", "1101")
GROUP_REWARDS = double([0, 1, 0, 0], [0.5, -1, 0.5, 0], [0.5, 0, 1.5, 0], [0, 0, 0, 4], [1, 2, 0, 3])  # 1, 0, 2, 4, 6


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"scale": False}, [-2, -2, -1, 2, 3]),
        ("grpo", {}, [x / (math.sqrt(v) + 1e-6) for x, v in [(-2, 7), (-2, 8), (-1, 7), (2, 8), (3, 7)]]),
        ("rloo", {}, [-3, -4, -1.5, 4, 4.5]),
        ("opo", {}, [-17 / 6, -1, -11 / 6, 3, 13 / 6]),
        ("reinforce_plus_plus_baseline", {}, [-2, -2, -1, 2, 3]),
    ],
)
def test_group_estimators_by_hand(name, options, expected):
    advantages = F.ADVANTAGE_ESTIMATORS[name](GROUP_REWARDS, GROUP_MASK, GROUPS, **options)
    assert_close(advantages, double(*expected)[:, None] * GROUP_MASK)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS.values(), ids=GROUP_ESTIMATORS)
@pytest.mark.parametrize("score", [0.5, 0.7, 10.1])  # in float32 their mean over six is not always the score
def test_group_estimators_of_equal_scores_are_zero_and_not_noise(estimator, score):
    for size in range(2, 33):
        lengths = torch.arange(size) % 5
        mask = torch.arange(5) <= lengths[:, None]
        rewards = torch.zeros(size, 5).scatter(1, lengths[:, None], score)
        advantages = estimator(rewards, mask, torch.zeros(size, dtype=torch.int64))
        assert_close(advantages, torch.zeros(size, 5), rtol=0, atol=0)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS.values(), ids=GROUP_ESTIMATORS)
@pytest.mark.parametrize("groups", [[0], [0, 0, 1], [4, 5, 4]])
def test_a_group_of_one_is_an_error_that_names_num_generations(estimator, groups):
    rewards = torch.ones(len(groups), 2)
    with pytest.raises(ValueError, match="num_generations"):
        estimator(rewards, rewards.bool(), torch.tensor(groups))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS.values(), ids=GROUP_ESTIMATORS)
def test_group_estimators_look_at_no_other_group_and_take_a_shift_of_all_scores_away(estimator):
    whole, alone = estimator(GROUP_REWARDS, GROUP_MASK, GROUPS), GROUPS == 3
    assert_close(whole[alone], estimator(GROUP_REWARDS[alone], GROUP_MASK[alone], GROUPS[alone]))
    shift = torch.zeros_like(GROUP_REWARDS).scatter(1, last_real_index(GROUP_MASK)[:, None], 10.0)
    assert_close(estimator(GROUP_REWARDS + shift, GROUP_MASK, GROUPS), whole)


def test_reinforce_plus_plus_is_the_discounted_sum_over_real_tokens():
    expected = double([0, 1, 0, 0], [0.125, -0.75, 0.5, 0], [1.25, 0, 1.5, 0], [0, 0, 0, 4], [2.75, 3.5, 0, 3])
    assert_close(F.reinforce_plus_plus(GROUP_REWARDS, GROUP_MASK, gamma=0.5), expected)


# KL

PLUS = [name for name in F.KL_ESTIMATORS if name.endswith("+")]


def plus(name: str) -> str:
    """The estimator of the same value with the gradient of k2; k2 is its own."""
    return name if name == "k2" else f"{name}+"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.5, -0.5, math.log(2), -math.log(2), 0]),
        ("abs", [0.5, 0.5, math.log(2), math.log(2), 0]),
        ("k2", [0.125, 0.125, 0.2402265070, 0.2402265070, 0]),
        ("k3", [0.1065306597, 0.1487212707, math.log(2) - 0.5, 1 - math.log(2), 0]),
    ],
)
def test_kl_estimators_by_hand(name, expected):
    ref_logprobs = double([-1.5, -2.0, -2.0, -1.0, -0.7])
    logprobs = ref_logprobs + double([0.5, -0.5, math.log(2), -math.log(2), 0])
    assert_close(F.token_kl(logprobs, ref_logprobs, name), double(expected))
    assert_close(F.token_kl(logprobs, ref_logprobs, plus(name)), double(expected))


@pytest.mark.parametrize("name", ["abs", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_estimators_other_than_k1_are_never_negative(name, dtype):
    """Near 0 too, where the difference of an exponential and a line loses its digits."""
    x = torch.cat([torch.logspace(-20, 1.8, 20_000, dtype=dtype), torch.zeros(1, dtype=dtype)])
    x = torch.cat([x, -x])[None]
    assert (F.token_kl(x, torch.zeros_like(x), name) >= 0).all()


def test_k3_keeps_its_digits_near_zero():
    x = torch.tensor([[1e-3, -1e-3]])
    assert_close(
        F.token_kl(x, torch.zeros_like(x), "k3"), torch.tensor([[4.998334e-7, 5.001667e-7]]), rtol=2e-4, atol=0
    )


def expected_kl(logits: Tensor, ref_logits: Tensor, estimator) -> Tensor:
    """Expectation over tokens sampled from π, the sampling itself without a gradient, as in training."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logprobs.exp().detach() * estimator(logprobs, ref_logprobs)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_expectations_and_gradients_under_exact_enumeration(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = torch.randn(2, 1, 5, generator=generator, dtype=torch.float64)

    def true_kl(x):
        categorical = torch.distributions.Categorical
        return torch.distributions.kl_divergence(categorical(logits=x), categorical(logits=ref_logits))

    def grad_of_expected(name):
        return grad_of(lambda x: expected_kl(x, ref_logits, lambda p, q: F.token_kl(p, q, name)), logits)

    for name in ("k1", "k3"):
        estimate = expected_kl(logits, ref_logits, lambda p, q, name=name: F.token_kl(p, q, name))
        assert_close(estimate, true_kl(logits)[0])
    true_grad = grad_of(true_kl, logits)
    assert true_grad.abs().max() > 1e-2
    assert_close(grad_of_expected("k1"), torch.zeros_like(logits))
    assert_close(grad_of_expected("k2"), true_grad)
    for name in PLUS:
        assert_close(grad_of_expected(name), true_grad)


@pytest.mark.parametrize("name", ["k2", *PLUS])
def test_estimators_with_a_plus_have_the_gradient_of_k2(name):
    x = double([0.5, -0.5, 3, -3])
    assert_close(grad_of(lambda p: F.token_kl(p, torch.zeros_like(x), name), x), x)


@pytest.mark.parametrize("name", F.KL_ESTIMATORS)
def test_kl_of_a_policy_that_drifted_far_is_finite_and_still_pulls(name):
    x = torch.tensor([[50.0, -50.0, 200.0, -200.0]])  # exp(200) is no float32
    grad = grad_of(lambda p: F.token_kl(p, torch.zeros_like(x), name), x)
    assert F.token_kl(x, torch.zeros_like(x), name).isfinite().all()
    assert grad.isfinite().all()
    assert (grad.abs() > 0.5).all()
    if name != "k1":  # descent leads back to the reference
        assert_close(grad.sign(), x.sign())


def test_k3_beyond_the_bound_has_the_value_and_the_slope_it_has_at_the_bound():
    x, e = double([50, -50]), math.exp(20)
    assert_close(F.token_kl(x, torch.zeros_like(x), "k3"), double([1 / e + 19, e - 21]))
    assert_close(grad_of(lambda p: F.token_kl(p, torch.zeros_like(x), "k3"), x), double([1 - 1 / e, 1 - e]))


# Rewards


# Scores, KL, mask, β and rewards.
REWARDS = {
    "scores land on the last real token": (
        (10, 20, 30, 40),
        [[2.0] * 4] * 4,
        ("1100", "1011", "0110", "0100"),
        0.5,
        [[-1, 9, 0, 0], [-1, 0, -1, 19], [0, -1, 29, 0], [0, 39, 0, 0]],
    ),
    "scores per token stay": ([[1, 0, 3, 0]], [[1, 1, 2, 1]], ("1011",), 0.1, [[0.9, 0, 2.8, -0.1]]),
    "KL on masked columns is left out": ((1,), [[0.5, NAN, NAN]], ("100",), 1.0, [[0.5, 0, 0]]),
    "a score of zero needs no real token": ((0,), [[1, 1]], ("00",), 1.0, [[0, 0]]),
}


@pytest.mark.parametrize("case", REWARDS)
def test_token_rewards_by_hand(case):
    scores, kl, mask, beta, expected = REWARDS[case]
    assert_close(F.token_rewards(double(*scores), double(*kl), bits(*mask), beta), double(*expected))


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        *[(0.11, 0.101), (0.09, 0.099), (0.10, 0.1), (0.5, 0.102), (0.0, 0.098), (-1.0, 0.098)],
        *[(NAN, 0.1), (math.inf, 0.1), (-math.inf, 0.1)],  # β stays
    ],
)
def test_adaptive_kl_coef_by_hand(kl, expected):
    beta = F.adaptive_kl_coef(0.1, kl, target=0.1, horizon=1000, num_completions=100)
    assert beta == pytest.approx(expected, rel=1e-12)


# Policy losses


def call_loss(name: str, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **given) -> Tensor:
    """The loss of that name, called with the parameters that its signature names."""
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "clip": F.Clip(), **given}
    given["mask"] = torch.ones_like(logprobs, dtype=torch.bool)
    return F.POLICY_LOSSES[name](**{n: given[n] for n in signature(F.POLICY_LOSSES[name]).parameters})


def at_ratio(*ratios: float) -> tuple[Tensor, Tensor]:
    """Log-probs and old log-probs, one row, with these ratios."""
    old_logprobs = torch.linspace(-2.0, -0.5, len(ratios), dtype=torch.float64)[None]
    return old_logprobs + double(ratios).log(), old_logprobs


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "grad"),
    [
        (1.5, 1, {}, -1.2, 0),
        (1.5, -1, {}, 1.5, 1.5),
        (0.5, 1, {}, -0.5, -0.5),
        (0.5, -1, {}, 0.8, 0),
        (1.4, 1, {"low": 0.1, "high": 0.5}, -1.4, -1.4),
        (1.6, 1, {"low": 0.1, "high": 0.5}, -1.5, 0),
        (0.85, -1, {"low": 0.1, "high": 0.5}, 0.9, 0),
        (0.95, -1, {"low": 0.1, "high": 0.5}, 0.95, 0.95),
        (5.0, -1, {"dual": 3.0}, 3, 0),
        (2.5, -1, {"dual": 3.0}, 2.5, 2.5),
        (0.5, -1, {"dual": 3.0}, 0.8, 0),
        (5.0, 1, {"dual": 3.0}, -1.2, 0),
        (1.1, 1, {"dual": 3.0}, -1.1, -1.1),
    ],
)
def test_policy_loss_and_its_gradient_by_hand(ratio, advantage, options, loss, grad):
    logprobs, old_logprobs = at_ratio(ratio)
    advantages = double([advantage])
    assert_close(
        F.policy_loss(logprobs, old_logprobs, advantages, F.Clip(**options)), double([loss]), rtol=1e-6, atol=0
    )
    found = grad_of(lambda x: F.policy_loss(x, old_logprobs, advantages, F.Clip(**options)), logprobs)
    assert_close(found, double([grad]), rtol=1e-6, atol=0)


def test_clip_fractions_by_hand():
    ratios = (1.5, 1.5, 0.5, 0.5, 1.1, 5.0, 5.0, 5.0, 0.5)
    logprobs, old_logprobs = at_ratio(*ratios)
    advantages = double([1, -1, 1, -1, 1, -1, 1, 0, 0])
    low, high, dual = F.clip_fractions(logprobs, old_logprobs, advantages, F.Clip(dual=3.0))
    assert low.equal(bits("000100000"))
    assert high.equal(bits("100000100"))
    assert dual.equal(bits("000001000"))
    assert not F.clip_fractions(logprobs, old_logprobs, advantages, F.Clip()).dual.any()
    low, high, _ = F.clip_fractions(*at_ratio(1.4, 1.6, 0.85, 0.95), double([1, 1, -1, -1]), F.Clip(0.1, 0.5))
    assert high.equal(bits("0100"))
    assert low.equal(bits("0010"))


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize(("delta", "advantage"), [(50.0, -1.0), (-50.0, 1.0)])
def test_gradient_lives_where_the_policy_drifted_most_against_the_advantage(name, delta, advantage):
    """The side on which the clip does not hold: exp(±20) times the advantage, as at the bound of the clamp."""
    old_logprobs = double([-60.0])
    grad = grad_of(lambda x: call_loss(name, x, old_logprobs, double([advantage])), old_logprobs + delta)
    assert_close(grad, double([-advantage * math.exp(math.copysign(20, delta))]))


@pytest.mark.parametrize("name", F.POLICY_LOSSES)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_on_policy_every_loss_is_the_plain_policy_gradient(name, dual_clip):
    logprobs, advantages = double([-0.3, -2.0, -1.0, -0.1]), double([0.5, 2.0, -1.5, 0.0])
    clip = F.Clip(high=1.0, dual=dual_clip)  # the smallest cap of cispo
    grad = grad_of(lambda x: call_loss(name, x, logprobs, advantages, clip=clip), logprobs)
    assert_close(grad, double([-0.5, -2.0, 1.5, 0.0]))


def test_gspo_gives_every_token_the_geometric_mean_ratio_of_its_completion():
    old_logprobs = double([-1, -2, -3, -4], [-1, -1, -1, -1])
    logprobs = old_logprobs + double([0.1, 0.3, 9, -0.1], [0.6, 0, 0.3, -9])
    advantages, mask = double([2, 2, 2, 2], [1, 1, 1, 1]), bits("1101", "1110")
    ratio = math.exp(0.1)
    loss = F.gspo_loss(logprobs, old_logprobs, advantages, mask, F.Clip())
    expected = double([-2 * ratio, -2 * ratio, 0, -2 * ratio], [-1.2, -1.2, -1.2, 0])
    assert_close(loss * mask, expected)
    grad = grad_of(lambda x: F.gspo_loss(x, old_logprobs, advantages, mask, F.Clip()) * mask, logprobs)
    assert_close(grad, double([-2 * ratio, -2 * ratio, 0, -2 * ratio], [0, 0, 0, 0]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "grad"), [(0.5, 1, -0.5), (1, -2, 2), (10, 1, -5), (10, -1, 5), (0.001, 2, -0.002)]
)
def test_cispo_weights_the_policy_gradient_by_the_ratio_up_to_the_cap(ratio, advantage, grad):
    """As TRL's weights at epsilon_high=5: 0.5, 1 and 5 for ratios 0.5, 1 and 10, with no lower bound."""
    logprobs, old_logprobs = at_ratio(ratio)
    advantages, clip = double([advantage]), F.Clip(0.2, 5.0)
    assert_close(grad_of(lambda x: F.cispo_loss(x, old_logprobs, advantages, clip), logprobs), double([grad]))
    assert_close(F.cispo_loss(logprobs, old_logprobs, advantages, clip), grad * logprobs)


def test_sapo_by_hand():
    """sigmoid(1) = 0.73105858, sigmoid(1.05) = 0.74077489."""
    logprobs, old_logprobs = at_ratio(2.0, 2.0, 1.0, 1.0)
    advantages = double([1, -1, 0.5, -0.5])
    expected = double([-4 * 0.7310585786, 4 / 1.05 * 0.7407748992, -1, 1 / 1.05])
    assert_close(F.sapo_loss(logprobs, old_logprobs, advantages), expected)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss", "grad"),
    [
        (0.5, 0.75, 2, 0, 0),  # up by 0.25
        (0.5, 0.6, 2, -2.4, -2.4),  # up by 0.1: ρ = 1.2
        (0.9, 0.6, -1, 0, 0),  # down by 0.3
        (0.9, 0.8, -1, 8 / 9, 8 / 9),
        (0.001, 0.1, 2, -200, -200),  # a ratio of 100, and hardly any probability
        (0.9, 0.6, 2, -4 / 3, -4 / 3),  # against the advantage: no clip
    ],
)
def test_dppo_by_hand(old, new, advantage, loss, grad):
    """−A·π/π_old, and nothing once the probability has moved by more than 0.2 in the wanted direction."""
    logprobs, old_logprobs, advantages = double([new]).log(), double([old]).log(), double([advantage])
    assert_close(F.dppo_loss(logprobs, old_logprobs, advantages, F.Clip()), double([loss]))
    assert_close(grad_of(lambda x: F.dppo_loss(x, old_logprobs, advantages, F.Clip()), logprobs), double([grad]))
    low, high, dual = F.dppo_clip_fractions(logprobs, old_logprobs, advantages, F.Clip(dual=3.0))
    assert [low.item(), high.item(), dual.item()] == [(old, new) == (0.9, 0.6) and loss == 0, grad == 0 < advantage, 0]


def test_dppo_takes_each_side_from_its_own_argument():
    old_logprobs, logprobs = double([0.5, 0.5]).log(), double([0.65, 0.35]).log()
    advantages = double([1, -1])
    assert_close(F.dppo_loss(logprobs, old_logprobs, advantages, F.Clip(0.1, 0.3)), double([-1.3, 0]))
    assert_close(F.dppo_loss(logprobs, old_logprobs, advantages, F.Clip(0.3, 0.1)), double([0, 0.7]))


# Value loss


@pytest.mark.parametrize(("value", "ret", "loss", "grad"), [(1.0, 2.0, 0.5, -1.0), (0.5, -1.0, 1.125, 1.5)])
def test_value_loss_and_its_gradient_by_hand(value, ret, loss, grad):
    assert_close(F.value_loss(double([value]), double([ret])), double([loss]))
    assert_close(grad_of(lambda x: F.value_loss(x, double([ret])), double([value])), double([grad]))


# Reduction


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 22 / 5),
        ("seq-mean-token-sum", 22 / 2),
        ("seq-mean-token-mean", (5 / 2 + 17 / 3) / 2),
        ("seq-mean-token-sum-norm", 22 / (2 * 8)),
    ],
)
def test_reduction_modes_by_hand(mode, expected):
    """Masked losses do not count, NaN or not, nor does the completion without real tokens."""
    loss = double([1, 4, NAN, 99], [3, math.inf, 5, 9], [NAN, 9, 9, 9])
    mask = bits("1100", "1011", "0000")
    assert_close(F.reduce(loss, mask, mode, max_length=8), double(expected)[0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 1.2), ("seq-mean-token-sum", 3), ("seq-mean-token-mean", 1.5), ("seq-mean-token-sum-norm", 0.75)],
)
def test_reduction_divides_by_the_counts_it_is_given(mode, expected):
    loss, mask = double([4, 8]), bits("11")
    assert_close(F.reduce(loss, mask, mode, num_tokens=10, num_completions=4, max_length=4), double(expected)[0])


@pytest.mark.parametrize("mode", F.REDUCTIONS)
def test_masked_losses_get_no_gradient_and_real_ones_do(mode):
    mask = bits("110", "000", "011")
    grad = grad_of(lambda x: F.reduce(x, mask, mode, max_length=4), torch.ones(3, 3))
    assert (grad > 0).equal(mask)
    assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("mode", F.REDUCTIONS)
def test_reduction_without_real_tokens_is_zero(mode):
    assert_close(F.reduce(double([NAN, 2]), bits("00"), mode, max_length=4), double(0.0)[0])


# Contracts that hold for every function

NUMBERS = ("explained_variance", "effective_sample_size")
CLIPS = ("clip_fractions", "dppo_clip_fractions", "dis_clip_fractions")
BOOLS = (*CLIPS, "importance_weights", "turn_ends", "turn_starts")
OTHER_DTYPES = {
    **dict.fromkeys(BOOLS, torch.bool),
    "turn_factors": torch.float64,
    "align_returns": torch.bool,
}  # products round once


def test_every_public_tensor_function_is_among_the_calls():
    public = {name for name in F.__all__ if callable(getattr(F, name)) and name.islower()}
    assert public - {"adaptive_kl_coef", "estimator_needs", "estimator_whitens", "whitened"} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_not_modified_and_share_no_memory_with_results(name):
    arguments = {key: x.clone() for key, x in INPUTS.items()}
    result = CALLS[name](SimpleNamespace(**arguments))
    assert [key for key, x in INPUTS.items() if not arguments[key].equal(x)] == []
    results = result if isinstance(result, tuple) else (result,)
    storages = {x.untyped_storage().data_ptr() for x in arguments.values()}
    assert not storages & {x.untyped_storage().data_ptr() for x in results if isinstance(x, Tensor)}


@pytest.mark.parametrize("name", CALLS)
def test_float32_stays_float32(name):
    result = CALLS[name](SimpleNamespace(**INPUTS))
    for x in result if isinstance(result, tuple) else (result,):
        assert isinstance(x, float) if name in NUMBERS else x.dtype in (torch.float32, OTHER_DTYPES.get(name))


class Watched(SimpleNamespace):
    """Remembers which of its tensors were asked for."""

    def __getattribute__(self, name):
        if name in INPUTS:
            vars(self).setdefault("used", set()).add(name)
        return super().__getattribute__(name)


def used_by(name: str) -> set[str]:
    watched = Watched(**INPUTS)
    CALLS[name](watched)
    return watched.used


# The only tensor, or one that is not used.
ANY_SHAPE = {("length_adaptive_lam", "mask"), ("turn_starts", "mask"), ("turn_factors", "mask")}
OTHER_SHAPES = sorted({(name, tensor) for name in CALLS for tensor in used_by(name)} - ANY_SHAPE)


@pytest.mark.parametrize("other", ["one row", "one column"])
@pytest.mark.parametrize(("name", "tensor"), OTHER_SHAPES)
def test_a_tensor_of_another_shape_is_refused(name, tensor, other):
    """Also one that would broadcast."""
    x = INPUTS[tensor]
    changed = x[:1] if other == "one row" else x.view(2, -1)[:, :1]
    with pytest.raises(ValueError, match=r"shapes must be equal|must have shape \(2,\), one per row"):
        CALLS[name](SimpleNamespace(**{**INPUTS, tensor: changed}))


# Log-ratios ln 4, ln 1/4, 0 and one column of padding; then ln 1.5 twice.
OLD = torch.tensor([[math.log(0.8), math.log(0.1), -1.0, 7.0], [math.log(0.6), math.log(0.3), 7.0, 7.0]])
ROLLOUT = torch.tensor([[math.log(0.2), math.log(0.4), -1.0, -9.0], [math.log(0.4), math.log(0.2), -9.0, -9.0]])
REAL = torch.tensor([[True, True, True, False], [True, True, False, False]])


@pytest.mark.parametrize(
    ("level", "correction", "weights", "dropped"),
    [
        ("token", "truncate", [[2.0, 0.25, 1.0, 0], [1.5, 1.5, 0, 0]], []),
        ("token", "mask", [[0, 0, 1.0, 0], [1.5, 1.5, 0, 0]], []),
        ("token", "reject", [[0, 0, 1.0, 0], [1.5, 1.5, 0, 0]], [(0, 0), (0, 1)]),
        ("sequence", "truncate", [[1.0, 1.0, 1.0, 0], [2.0, 2.0, 0, 0]], []),  # 4 · 1/4 · 1 = 1, 1.5² = 2.25
        ("sequence", "mask", [[1.0, 1.0, 1.0, 0], [0, 0, 0, 0]], []),
        ("sequence", "reject", [[1.0, 1.0, 1.0, 0], [0, 0, 0, 0]], [(1, 0), (1, 1)]),
    ],
)
def test_importance_weights_by_hand(level, correction, weights, dropped):
    got, kept = F.importance_weights(OLD.clone().requires_grad_(), ROLLOUT, REAL, f"{level}_{correction}", 2.0)
    assert_close(got, torch.tensor(weights))
    assert not got.requires_grad
    expected = REAL.clone()
    for row, column in dropped:
        expected[row, column] = False
    assert torch.equal(kept, expected)


def test_effective_sample_size_by_hand():
    mask = torch.tensor([[True, True, True, True, False]])
    assert F.effective_sample_size(torch.tensor([[1.0, 1.0, 1.0, 1.0, 9.0]]), mask) == 1.0
    assert F.effective_sample_size(torch.tensor([[2.0, 0.0, 0.0, 0.0, 9.0]]), mask) == 0.25
    assert_close(F.effective_sample_size(torch.tensor([[3.0, 1.0, 0.0, 0.0, 9.0]]), mask), 16 / (4 * 10))
    assert math.isnan(F.effective_sample_size(torch.ones(1, 5), torch.zeros_like(mask)))


# Bad input

ONE, NO = torch.ones(1, 1), torch.zeros(1, 3)
REFUSED = {
    **{
        f"a reward outside the mask {mask}": (
            lambda mask=mask: F.gae((~bits(mask)).double(), NO.double(), bits(mask)),
            "masked column",
        )
        for mask in ("011", "101", "110")
    },
    "an unknown KL": (lambda: F.token_kl(ONE, ONE, "k4"), r"k4.*k1, abs, k2, k3"),
    "a score without a token": (
        lambda: F.token_rewards(double(1, 2, 0), torch.zeros(3, 2), bits("10", "00", "00"), 0.0),
        r"\[1\].*no real token",
    ),
    "a score on a masked column": (lambda: F.token_rewards(double([0, 1, 0]), NO, bits("101"), 0.0), "masked column"),
    "an unknown reduction": (
        lambda: F.reduce(ONE, bits("1"), "mean-mean"),
        r"mean-mean.*token-mean, seq-mean-token-sum, seq-mean-token-mean",
    ),
    "no length to divide by": (lambda: F.reduce(ONE, bits("1"), "seq-mean-token-sum-norm"), "max_length"),
    **{
        f"an unknown correction {name}": (
            lambda name=name: F.importance_weights(OLD, ROLLOUT, REAL, name),
            f"unknown mode={name!r}",
        )
        for name in ("row_mask", "token_clip", "token")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
