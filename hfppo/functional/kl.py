"""KL estimators, the rewards they go into, and the adaptive coefficient.

The estimators come from J. Schulman's note "Approximating KL Divergence" (2020), for tokens that π sampled.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hfppo.functional.shape_checks import require_rows, require_same_shape

__all__ = ["KL_ESTIMATORS", "adaptive_kl_coef", "token_kl", "token_rewards"]

MAX_LOG_RATIO = 20.0


def clamp_log_ratio(x: Tensor) -> Tensor:
    """x clamped to ±20 so that its exponential stays finite, with the gradient of the identity.

    A plain clamp has gradient 0 beyond its bounds: the tokens on which a policy has drifted most would no longer pull
    it back. Here they still pull, with the estimator's slope at the bound.
    """
    return x + (x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - x).detach()


def _k3(x: Tensor) -> Tensor:
    x = clamp_log_ratio(x)
    return torch.expm1(-x) + x


def _with_gradient_of_k2(estimator: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def estimate(x: Tensor) -> Tensor:
        k2 = x.square() / 2
        return k2 - k2.detach() + estimator(x).detach()

    return estimate


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "abs": torch.abs,
    "k2": lambda x: x.square() / 2,
    "k3": _k3,
}
# A "+", as in verl, gives an estimator the gradient of k2.
KL_ESTIMATORS |= {f"{name}+": _with_gradient_of_k2(KL_ESTIMATORS[name]) for name in ("k1", "abs", "k3")}


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Estimate KL(π, π_ref) at each sampled token.

        x = log π − log π_ref;   k1: x,   abs: |x|,   k2: x²/2,   k3: e^(−x) − 1 + x
        k1+, abs+, k3+: k2 − sg(k2) + sg(k), the same value with the gradient of k2, which is unbiased on-policy

    Args:
        logprobs, ref_logprobs: (B, T), nats.
        estimator: one of `KL_ESTIMATORS`.
    Returns:
        (B, T), nats; k2, k3 and abs are never negative, k1 is unbiased and may be.
    Raises:
        ValueError: unknown estimator, or shapes that differ.
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; choose from {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](logprobs - ref_logprobs)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Place scores on tokens and subtract the KL penalty. arXiv:1909.08593, eq. 2.

        r_t = score·1[t = last real token] − β·KL_t

    A run has put scores on tokens before, by `RewardFunctions.place`; only sums of normalized scores are (B,).

    Args:
        scores: (B,), one per completion, or (B, T), one per token and 0 where `mask` is False.
        kl: (B, T), nats.
        mask: (B, T) bool, True on real tokens.
        kl_coef: β.
    Returns:
        (B, T), 0 where `mask` is False.
    Raises:
        ValueError: shapes that do not fit; a score other than 0 on a masked token, or of a row without a real token.
    """
    require_same_shape(kl=kl, mask=mask)
    if scores.dim() == 1:
        require_rows(kl, scores=scores)
        unplaced = scores.ne(0) & ~mask.any(dim=1)
        if unplaced.any():
            raise ValueError(f"rows {unplaced.nonzero().flatten().tolist()} have a score but no real token")
        last = last_real_index(mask)
        scores = torch.zeros_like(kl).scatter(1, last[:, None], scores[:, None].to(kl.dtype))
    else:
        require_same_shape(scores=scores, mask=mask)
        if (scores.ne(0) & ~mask).any():
            raise ValueError("a masked column has a score other than 0, which would be lost")
    return (scores - kl_coef * kl).where(mask, 0.0)


def last_real_index(mask: Tensor) -> Tensor:
    """(B,) index of the last True of each row of a (B, T) mask; T − 1 where there is none."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)


def adaptive_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, num_completions: int) -> float:
    """One step of the proportional controller of arXiv:1909.08593, section 2.2.

        β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·n/horizon)

    Args:
        kl_coef: β of the rollout.
        kl: masked mean of the KL per token over the rollout of all ranks, nats.
        target: KL per token to steer to, nats.
        horizon: completions over which β moves by at most 20 %; above n/5, or β may become 0 or negative.
        num_completions: n, completions in the rollout of all ranks.
    Returns:
        The next β; β itself when `kl` is not finite.
    """
    if not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_completions / horizon)
