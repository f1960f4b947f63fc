"""Values inside the return's range, their losses, and the other numbers of the critic recipes of 2026, by hand."""

import pytest
import torch
from torch import Tensor, tensor

from hfppo import functional as F
from hfppo.functional import Clip, ValueRange


def row(*numbers: float, grad: bool = False) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64, requires_grad=grad)


def close(found: Tensor, *expected: float, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, row(*expected), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("z", "arctan", "sigmoid"),
    [
        (-5, 0.062833, 0.006693),
        (-1, 0.25, 0.268941),
        (0, 0.5, 0.5),
        (1, 0.75, 0.731059),
        (5, 0.937167, 0.993307),
        (20, 0.984098, 1.0),
    ],
)
def test_links_map_an_output_to_its_place_in_the_range(z, arctan, sigmoid):
    close(F.VALUE_LINKS["arctan"](row(z)), arctan)
    close(F.VALUE_LINKS["sigmoid"](row(z)), sigmoid)


@pytest.mark.parametrize(
    ("bounds", "target", "z", "loss", "slope"),
    [
        ((0, 1), 1.0, 0.0, 0.693147, -0.5),
        ((0, 1), 0.0, 1.0, 1.313262, 0.731059),
        ((0, 1), 0.25, -1.0, 0.563262, 0.018941),
        ((-1, 3), 2.0, 0.5, 0.599077, -0.127541),
    ],
)
def test_binary_cross_entropy_takes_any_target_inside_the_range(bounds, target, z, loss, slope):
    output = row(z, grad=True)
    found = F.bce_value_loss(output, row(target), ValueRange(*bounds))
    found.sum().backward()
    close(found.detach(), loss)
    close(output.grad, slope)


def test_binary_cross_entropy_is_finite_where_the_sigmoid_is_one_in_float32():
    output = torch.tensor([[18.0]], requires_grad=True)
    F.bce_value_loss(output, torch.zeros(1, 1), ValueRange(0, 1)).sum().backward()
    assert output.grad is not None
    assert output.grad.item() == pytest.approx(1.0)


def test_dis_counts_the_tokens_of_a_band_whatever_the_sign_of_the_advantage():
    ratio, advantages = row(0.69, 0.71, 1, 2, 5.99, 6.01), row(1, -1, 2, -0.5, 1, 1)
    old = torch.full_like(ratio, -2.0)
    logprobs = (old + ratio.log()).requires_grad_()
    loss = F.dis_loss(logprobs, old, advantages, Clip(0.3, 5.0))
    expected = (0.0, 0.71, -2.0, 1.0, -5.99, 0.0)
    close(loss.detach(), *expected)
    loss.sum().backward()
    close(logprobs.grad, *expected)
    assert loss.mean().item() == pytest.approx(-1.046667, abs=1e-6)
    outside = F.dis_clip_fractions(logprobs.detach(), old, advantages, Clip(0.3, 5.0))
    assert outside.low.tolist() == [[True, False, False, False, False, False]]
    assert outside.high.tolist() == [[False, False, False, False, False, True]]


def test_the_edges_of_the_band_are_outside():
    old = row(0.0, 0.0)
    outside = F.dis_clip_fractions(row(0.5, 2.0).log(), old, row(1, 1), Clip(0.5, 1.0))
    assert (outside.low | outside.high).all()


def test_aligned_targets_weight_the_return_by_the_ratio_of_the_token():
    targets, kept = F.align_returns(row(1, 1, 1, 1), row(1.2, 0.5, 7, 1))
    close(targets, 1.2, 0.5, 7, 1)
    assert kept.tolist() == [[True, True, False, True]]
    z = row(1, 1, 1, 1, grad=True)
    loss = F.bce_value_loss(z, targets, ValueRange(0, 1))
    close(loss.detach(), 0.113262, 0.813262, -5.686738, 0.313262)
    (loss * kept).sum().backward()
    close(z.grad, -0.468941, 0.231059, 0, -0.268941)
    # Another range: −1 + 1.5·(3 + 1), and the lower end stays where it is.
    close(F.align_returns(row(3, -1), row(1.5, 1.5), -1.0)[0], 5, -1)


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0.4, (0.35556, 0.33333, 0.2)), (1.5, (0.65432, 0.45556, 0.2)), (1e9, (0.8, 0.5, 0.2))]
)
def test_gae_with_a_lambda_by_length(alpha, expected):
    values, mask = row(0.2, 0.5, 0.8), torch.ones(1, 3, dtype=torch.bool)
    lam = F.length_adaptive_lam(mask, alpha)
    close(F.gae(row(0, 0, 1), values, mask, lam=lam)[0], *expected, atol=1e-5)
    with_context = tensor([[True, False, True, True]])
    found = F.gae(row(0, 0, 0, 1), row(0.2, 0.9, 0.5, 0.8), with_context, lam=lam)[0]
    close(found, expected[0], 0, *expected[1:], atol=1e-5)
