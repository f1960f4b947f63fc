"""Importance weights between the policy that sampled and the policy that is trained."""

import torch
from torch import Tensor

from hfppo.functional.advantages import Total
from hfppo.functional.kl import clamp_log_ratio
from hfppo.functional.shape_checks import require_same_shape

__all__ = ["MAX_ALIGNED_RATIO", "MISMATCH_MODES", "align_returns", "effective_sample_size", "importance_weights"]

MISMATCH_MODES = tuple(
    f"{level}_{bound}" for level in ("token", "sequence") for bound in ("truncate", "mask", "reject")
)


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, mode: str = "token_truncate", clip_max: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Weights that turn an average over π_rollout's tokens into one over π_old's, with a bound on their variance.

        token: w_t = π_old(y_t) / π_rollout(y_t),   sequence: w_t = Π_k w_k, the same for all tokens of a completion
        truncate: min(w, c),   mask: w where 1/c ≤ w ≤ c, else 0,   reject: mask, and no loss counts the token

    Truncation: F. Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy RL training"; the
    band: "IcePop", arXiv:2510.18855.

    Args:
        old_logprobs, rollout_logprobs: (B, T), nats.
        mask: (B, T) bool, True on real tokens.
        mode: one of `MISMATCH_MODES`, level and bound.
        clip_max: c, at least 1.
    Returns:
        weights: (B, T), without gradient, 0 where mask is False.
        kept: (B, T) bool, the tokens of mask that losses count.
    Raises:
        ValueError: unknown mode, or shapes that differ.
    """
    require_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    if mode not in MISMATCH_MODES:
        raise ValueError(f"unknown mode={mode!r}; choose from {', '.join(MISMATCH_MODES)}")
    level, bound = mode.split("_")
    log_ratio = (old_logprobs - rollout_logprobs).detach().where(mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    weights = clamp_log_ratio(log_ratio).exp().where(mask, 0.0)
    if bound == "truncate":
        return weights.clamp(max=clip_max), mask.clone()
    inside = mask & (weights >= 1 / clip_max) & (weights <= clip_max)
    return weights.where(inside, 0.0), inside if bound == "reject" else mask.clone()


MAX_ALIGNED_RATIO = 6.0  # arXiv:2609.26355


def align_returns(returns: Tensor, ratio: Tensor, low: float = 0.0) -> tuple[Tensor, Tensor]:
    """Targets of a critic that learns after the actor: returns weighted by the token's ratio. arXiv:2609.26355.

        ρ_t = π_new(y_t)/π_rollout(y_t),   target_t = low + ρ_t·(R_t − low),   the token counts if ρ_t ≤ 6

    Their mean over samples is the value of a policy that takes this token by π_new and all later ones by π_rollout.

    Args:
        returns: (B, T), λ = 1 returns.
        ratio: (B, T), ρ of π_new, the policy after the actor's steps, and of the policy that sampled.
        low: the lower end of the range of the return.
    Returns:
        targets: (B, T).
        kept: (B, T) bool, True where the value loss counts the token.
    Raises:
        ValueError: shapes that differ.
    """
    require_same_shape(returns=returns, ratio=ratio)
    return low + ratio * (returns - low), ratio <= MAX_ALIGNED_RATIO


def effective_sample_size(weights: Tensor, mask: Tensor, total: Total = torch.sum) -> float:
    """Share of the tokens that would give the same variance with equal weights; 1 if all weights are equal.

        (Σ w)² / (N·Σ w²)

    Args:
        weights: (B, T).
        mask: (B, T) bool.
        total: returns the sum of a (B, T) tensor; over the rows of all processes, if they are one sample.
    Returns:
        In [0, 1]; NaN without a token or with all weights 0.
    """
    require_same_shape(weights=weights, mask=mask)
    w = weights.double().where(mask, 0.0)
    return float(total(w).square() / (total(mask) * total(w.square())))
