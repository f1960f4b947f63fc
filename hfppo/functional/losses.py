"""Policy losses per token, by name in `POLICY_LOSSES`, their clip metrics in `CLIP_FRACTIONS`, and the reduction."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hfppo.functional.kl import clamp_log_ratio
from hfppo.functional.shape_checks import require_same_shape

__all__ = [
    "CLIP_FRACTIONS", "POLICY_LOSSES", "REDUCTIONS", "Clip", "ClipFractions", "cispo_loss", "clip_fractions",
    "dis_clip_fractions", "dis_loss", "dppo_clip_fractions", "dppo_loss", "gspo_loss", "policy_loss", "reduce",
    "sapo_loss",
]  # fmt: skip


class Clip(NamedTuple):
    """The clip of a policy loss."""

    low: float = 0.2  # ε below 1
    high: float = 0.2  # ε above 1; a larger one is the clip-higher of arXiv:2503.14476
    dual: float | None = None  # c > 1, or None for none


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """The clipped surrogate of PPO, per token. arXiv:1707.06347, eq. 7; dual clip arXiv:1912.09729, eq. 5.

        ρ = exp(log π − log π_old),   L1 = −A·ρ,   L2 = −A·clip(ρ, 1 − ε_low, 1 + ε_high),   L = max(L1, L2)
        A < 0 with dual clip c:   L = min(L, −A·c)

    Args:
        logprobs, old_logprobs, advantages: (B, T).
        clip: the clip of the ratio.
    Returns:
        (B, T), not yet masked.
    Raises:
        ValueError: shapes that differ.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    return _clipped_surrogate(logprobs - old_logprobs, advantages, clip)


def _clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    ratio = clamp_log_ratio(log_ratio).exp()
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip.low, 1 + clip.high))
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -advantages * clip.dual), loss)
    return loss


def gspo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> Tensor:
    """The clipped surrogate with one ratio per completion. arXiv:2507.18071, eq. 17 (its token form).

        s = exp(mean over real tokens of (log π − log π_old)),   ρ_t = sg(s)·π_t/sg(π_t)

    Args:
        logprobs, old_logprobs, advantages: (B, T).
        mask: (B, T) bool, True on real tokens.
        clip: the clip of the ratio; the paper's ε are about 3e-4.
    Returns:
        (B, T), not yet masked.
    Raises:
        ValueError: shapes that differ.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    log_ratio = (logprobs - old_logprobs).where(mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return _clipped_surrogate(logprobs - logprobs.detach() + log_ratio.detach()[:, None], advantages, clip)


def cispo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """REINFORCE with a capped, detached importance weight: no token loses its gradient. arXiv:2506.13585, eq. 4.

        L = −sg(min(ρ, ε_max))·A·log π

    The paper sets no lower bound either. Its cap is written as 1 + ε_high.

    Args and returns as in `policy_loss`, but `clip.high` is ε_max itself, as in TRL and arXiv:2510.13786.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    return -ratio.clamp(max=clip.high).detach() * advantages * logprobs


def sapo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """A smooth gate in place of the clip, with the paper's temperatures. arXiv:2511.20347, eq. 6.

        L = −(4/τ)·sigmoid(τ·(ρ − 1))·A,   τ = 1 for A > 0 and 1.05 otherwise

    Args and returns as in `policy_loss`.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    tau = torch.ones_like(advantages).where(advantages > 0, 1.05)
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages


def dppo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """The surrogate without the tokens whose probability has moved too far. arXiv:2602.04879, DPPO-Binary-TV.

        L = −A·ρ, and 0 where A > 0 and π − π_old > δ_high, or A < 0 and π − π_old < −δ_low

    |π − π_old| = π_old·|ρ − 1| is the total variation of "this token or another": a rare token may change by a large
    ratio.

    Args:
        logprobs, old_logprobs, advantages: (B, T).
        clip: its ε are the δ, in probability; there is no dual clip.
    Returns:
        (B, T), not yet masked.
    Raises:
        ValueError: shapes that differ.
    """
    outside = dppo_clip_fractions(logprobs, old_logprobs, advantages, clip)
    surrogate = -advantages * clamp_log_ratio(logprobs - old_logprobs).exp()
    return surrogate.masked_fill(outside.low | outside.high, 0.0)


def dis_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """The surrogate of the tokens whose ratio lies in a band, whatever the sign of A. arXiv:2607.07508, eq. 1 to 3.

        L = −A·ρ where 1 − ε_low < ρ < 1 + ε_high, and 0 elsewhere

    The paper maximizes sg(f(ρ))·A·log π, which has the same gradient. Its ρ is π/π_rollout, so no pass computes π_old.

    Args:
        logprobs, old_logprobs, advantages: (B, T).
        clip: the band; the paper's ε are 0.3 and 5 for mathematics, 0.8 and 3 for code. There is no dual clip.
    Returns:
        (B, T), not yet masked. Tokens outside the band stay in the denominator of a mean.
    Raises:
        ValueError: shapes that differ.
    """
    outside = dis_clip_fractions(logprobs, old_logprobs, advantages, clip)
    surrogate = -advantages * clamp_log_ratio(logprobs - old_logprobs).exp()
    return surrogate.masked_fill(outside.low | outside.high, 0.0)


# A loss is called with exactly the parameters that its signature names, out of: logprobs, old_logprobs, advantages,
# mask, clip.
POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo": policy_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "dppo": dppo_loss,
    "dis": dis_loss,
}


class ClipFractions(NamedTuple):
    """(B, T) bool each: where the clip of a policy loss is active."""

    low: Tensor
    high: Tensor
    dual: Tensor


def clip_fractions(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> ClipFractions:
    """Where L2 > L1: below 1 − ε_low with A < 0, above 1 + ε_high with A > 0; ρ > c with A < 0.

    Args as in `policy_loss`.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    return ClipFractions(
        low=(advantages < 0) & (ratio < 1 - clip.low),
        high=(advantages > 0) & (ratio > 1 + clip.high),
        dual=(advantages < 0) & (ratio > (math.inf if clip.dual is None else clip.dual)),
    )


def dppo_clip_fractions(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> ClipFractions:
    """Where `dppo_loss` is 0: below π_old − δ_low with A < 0, above π_old + δ_high with A > 0.

    Args as in `dppo_loss`.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    moved = logprobs.exp() - old_logprobs.exp()
    low, high = (advantages < 0) & (moved < -clip.low), (advantages > 0) & (moved > clip.high)
    return ClipFractions(low, high, dual=torch.zeros_like(low))


def dis_clip_fractions(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> ClipFractions:
    """Where `dis_loss` is 0: ρ at most 1 − ε_low, or at least 1 + ε_high.

    Args as in `dis_loss`.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    low = ratio <= 1 - clip.low
    return ClipFractions(low, ratio >= 1 + clip.high, dual=torch.zeros_like(low))


# Where the clip of a loss is active; the other losses have none that is measured.
CLIP_FRACTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Clip], ClipFractions]] = {
    "ppo": clip_fractions,
    "dppo": dppo_clip_fractions,
    "dis": dis_clip_fractions,
}


class Counts(NamedTuple):
    """The sizes that losses are divided by, of a whole mini-batch."""

    tokens: float
    completions: float
    max_length: int


# The weight of each token, (B, T), or one weight for all, from the mask and the counts.
REDUCTIONS: dict[str, Callable[[Tensor, Counts], Tensor | float]] = {
    "token-mean": lambda mask, n: 1 / n.tokens,
    "seq-mean-token-sum": lambda mask, n: 1 / n.completions,
    "seq-mean-token-mean": lambda mask, n: 1 / (mask.sum(dim=1, keepdim=True).clamp(min=1) * n.completions),
    "seq-mean-token-sum-norm": lambda mask, n: 1 / (n.completions * n.max_length),
}


def reduce(
    loss: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    num_tokens: float | None = None,
    num_completions: float | None = None,
    max_length: int | None = None,
) -> Tensor:
    """One scalar from losses per token. Counts of the whole mini-batch make it independent of the micro-batches.

        token-mean:                Σ_i Σ_t L / num_tokens
        seq-mean-token-sum:        Σ_i Σ_t L / num_completions
        seq-mean-token-mean:       Σ_i (Σ_t L / length_i) / num_completions
        seq-mean-token-sum-norm:   Σ_i Σ_t L / (num_completions·max_length)

    Args:
        loss: (B, T).
        mask: (B, T) bool; losses elsewhere do not count. Their inputs must be finite all the same: a NaN would reach
            the gradient.
        mode: one of `REDUCTIONS`.
        num_tokens: True entries of the mask over all micro-batches and ranks; None: of this mask.
        num_completions: rows with a True entry, counted likewise.
        max_length: tokens, for `seq-mean-token-sum-norm`.
    Returns:
        A scalar. The scalars of the micro-batches of a mini-batch add up to the loss of the mini-batch.
    Raises:
        ValueError: unknown mode, or a missing `max_length`.
    """
    require_same_shape(loss=loss, mask=mask)
    if mode not in REDUCTIONS:
        raise ValueError(f"unknown reduction {mode!r}; choose from {', '.join(REDUCTIONS)}")
    if mode == "seq-mean-token-sum-norm" and max_length is None:
        raise ValueError("seq-mean-token-sum-norm needs max_length")
    num_tokens = max(float(mask.sum()) if num_tokens is None else num_tokens, 1.0)
    num_completions = max(float(mask.any(dim=1).sum()) if num_completions is None else num_completions, 1.0)
    return (loss.where(mask, 0.0) * REDUCTIONS[mode](mask, Counts(num_tokens, num_completions, max_length or 0))).sum()
