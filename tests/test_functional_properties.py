"""What holds for every function of hfppo.functional, whatever numbers and masks it is given."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from helpers.formulas import CALLS

NAN = float("nan")
quick = settings(max_examples=15, deadline=None, database=None, derandomize=True)
# Weights are not negative, and the variance of two numbers that are nearly equal has no digits left.
NOT_ANY_NUMBER = ("effective_sample_size", "explained_variance")
# At a threshold, where a rounding decides.
DECIDE = ("clip_fractions", "dppo_loss", "dppo_clip_fractions", "dis_loss", "dis_clip_fractions")
DECIDE += ("importance_weights", "align_returns")


@st.composite
def inputs(draw, low: float = -3, high: float = 3) -> dict[str, Tensor]:
    """Arguments for `CALLS`: `a` and `c` stand on real tokens only, `b` everywhere; rows are in groups of two."""
    rows, columns = 2 * draw(st.integers(1, 3)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    a, b, c = torch.rand(3, rows, columns, generator=generator, dtype=torch.float64) * (high - low) + low
    mask = torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    mask[:, draw(st.integers(0, columns - 1))] = True
    scores = torch.rand(rows, generator=generator, dtype=torch.float64) * 2
    groups = torch.arange(rows)[torch.randperm(rows, generator=generator)] // 2
    return {"a": a * mask, "b": b, "c": c * mask, "mask": mask, "scores": scores, "groups": groups}


def call(name: str, arguments: dict[str, Tensor]) -> list[Tensor]:
    """What a function returns, as tensors."""
    result = CALLS[name](SimpleNamespace(**arguments))
    return [torch.as_tensor(x, dtype=None) for x in (result if isinstance(result, tuple) else (result,))]


def single(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.float() if x.is_floating_point() else x for name, x in arguments.items()}


@pytest.mark.parametrize("name", CALLS)
@quick
@given(inputs(), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_is_the_order_of_the_results(name, arguments, random):
    order = list(range(len(arguments["a"])))
    random.shuffle(order)
    shuffled = call(name, {key: x[order] for key, x in arguments.items()})
    for straight, got in zip(call(name, arguments), shuffled, strict=True):
        assert_close(got, straight[order] if straight.dim() else straight, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "turn_ends"])  # its context ends with the row
@quick
@given(inputs(), st.integers(1, 4))
def test_padding_changes_no_real_token(name, arguments, columns):
    """`b` is NaN on the new columns, on both sides."""

    def padded(key: str, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (1, columns), value=NAN if key == "b" else 0) if x.dim() == 2 else x

    wide, real = {key: padded(key, x) for key, x in arguments.items()}, slice(1, 1 + arguments["a"].shape[1])
    for straight, got in zip(call(name, arguments), call(name, wide), strict=True):
        assert_close(got[:, real] if straight.dim() == 2 else got, straight, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in DECIDE])
@quick
@given(inputs())
def test_float32_is_close_to_float64(name, arguments):
    for exact, got in zip(call(name, arguments), call(name, single(arguments)), strict=True):
        assert_close(got.double(), exact.double(), rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_ANY_NUMBER])
@quick
@given(inputs(low=-1e4, high=1e4))
def test_large_numbers_stay_finite_with_their_gradients(name, arguments):
    """Log-probs of −10⁴ and ratios of e^10⁴ do come from a policy that has gone wrong."""
    leaves = single(arguments)
    for key in "abc":
        leaves[key] = leaves[key].requires_grad_()
    for result in call(name, leaves):
        assert result.isfinite().all()
        if result.requires_grad:
            grads = torch.autograd.grad(result.sum(), [leaves[k] for k in "abc"], allow_unused=True, retain_graph=True)
            assert all(grad.isfinite().all() for grad in grads if grad is not None)
