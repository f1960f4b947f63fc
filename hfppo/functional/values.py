"""The critic's output inside the return's range, its losses per token, and how well it explains outcomes.

Bounded values: arXiv:2608.23566, eq. 9 (arctan). Binary cross-entropy on the sigmoid: arXiv:2609.26355.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hfppo.functional.advantages import Total
from hfppo.functional.shape_checks import require_same_shape

__all__ = ["VALUE_LINKS", "VALUE_LOSSES", "ValueRange", "bce_value_loss", "explained_variance", "value_loss"]


# From an output z of the value head, any real number, to its place in the range, in (0, 1). At z = 0, the middle, the
# slopes are 1/π and 1/4.
VALUE_LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "arctan": lambda z: 0.5 + torch.atan(z) / math.pi,
    "sigmoid": torch.sigmoid,
}

# The critic's losses, each with the link of values in a range.
VALUE_LOSSES = {"mse": "arctan", "bce": "sigmoid"}


class ValueRange(NamedTuple):
    """The range of the return, and how the values stay in it."""

    low: float
    high: float
    link: str = "arctan"  # one of `VALUE_LINKS`

    def values(self, logits: Tensor) -> Tensor:
        """Values of outputs z of the value head, in their shape: low + (high − low)·link(z)."""
        return self.low + (self.high - self.low) * VALUE_LINKS[self.link](logits)

    def share(self, x: Tensor) -> Tensor:
        """(x − low)/(high − low): 0 at the lower end, 1 at the upper one."""
        return (x - self.low) / (self.high - self.low)


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error of the critic, per token.

        L = ½·(V − R)²

    Args:
        values, returns: (B, T).
    Returns:
        (B, T), not yet masked.
    Raises:
        ValueError: shapes that differ.
    """
    require_same_shape(values=values, returns=returns)
    return (values - returns).square() / 2


def bce_value_loss(logits: Tensor, returns: Tensor, value_range: ValueRange) -> Tensor:
    """The binary cross-entropy of values by the sigmoid, with soft targets, per token. arXiv:2609.26355.

        u = (R − low)/(high − low),   L = −u·log σ(z) − (1 − u)·log(1 − σ(z)) = softplus(z) − u·z,   ∂L/∂z = σ(z) − u

    The gradient does not vanish far from the target. The loss is computed from z: 1 − σ(z) is 0 in float32 from z = 17
    on. Its minimum is the entropy of the outcome, not 0. A return outside the range leaves it without a lower bound.

    Args:
        logits: (B, T), z, the value before the link.
        returns: (B, T).
        value_range: the range of the return.
    Returns:
        (B, T), not yet masked.
    Raises:
        ValueError: shapes that differ.
    """
    require_same_shape(logits=logits, returns=returns)
    return softplus(logits) - value_range.share(returns) * logits


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, total: Total = torch.sum) -> float:
    """1 − Var(R − V)/Var(R) over real tokens: 1 is a perfect critic, 0 a constant one, below 0 a harmful one.

    Args:
        values, returns: (B, T).
        mask: (B, T) bool, True on real tokens.
        total: see `whiten`.
    Returns:
        A float; NaN when the returns do not vary.
    """
    require_same_shape(values=values, returns=returns, mask=mask)
    count = total(mask)

    def variance(x: Tensor) -> float:
        mean = total(x.double().where(mask, 0.0)) / count  # in float64, so that equal numbers have the variance 0
        return float(total((x.double() - mean).square().where(mask, 0.0)) / count)

    of_returns = variance(returns)
    return 1.0 - variance(returns - values) / of_returns if of_returns > 0 else math.nan
