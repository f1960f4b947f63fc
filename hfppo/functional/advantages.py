"""From token rewards to advantages: GAE, whitening, and the estimators that need no critic.

Departures from the papers: advantages are 0 on masked columns, and credit passes undiscounted through masked columns
between sampled ones, which are the context of a completion of several turns.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TypeVar

import torch
from torch import Tensor

from hfppo.functional.shape_checks import require_rows, require_same_shape

__all__ = [
    "ADVANTAGE_ESTIMATORS", "estimator_needs", "estimator_whitens", "gae", "grpo",
    "length_adaptive_lam", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "turn_ends",
    "turn_factors", "turn_starts", "whiten", "whitened",
]  # fmt: skip

Estimator = TypeVar("Estimator", bound=Callable)
Total = Callable[[Tensor], Tensor]  # the sum of a (B, T) tensor, here or over the rows of all processes


def whitened(estimator: Estimator) -> Estimator:
    """Mark an estimator whose advantages are whitened over the rollout unless `whiten_advantages` is set."""
    estimator.__dict__["whiten_advantages"] = True
    return estimator


@whitened
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,
    final_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates over completion tokens. arXiv:1506.02438, eq. 16.

        δ_t = r_t + γ_t·V(s_{t+1}) − V(s_t),   A_t = δ_t + γ_t·λ_t·A_{t+1},   R_t = A_t + V(s_t)

    t + 1 is the next sampled token. With factors from `turn_factors` this contains turn-level GAE, where γ = λ = 1
    within a turn, and bi-level GAE.

    Args:
        rewards, values: (B, T); index t belongs to completion token t.
        mask: (B, T) bool, True on sampled tokens.
        gamma: γ, one for all or (B, T).
        lam: λ, one for all, (B,), one per completion, or (B, T).
        final_value: (B,), V of the state after the last token; None means 0, the completion has ended.
    Returns:
        advantages, returns: (B, T), 0 where mask is False.
    Raises:
        ValueError: shapes that do not fit, or a reward other than 0 on a masked column, where it would be lost.
    """
    require_same_shape(rewards=rewards, values=values, mask=mask)
    factors = {"gamma": gamma, "lam": lam, "final_value": final_value}
    per_row = {name: x for name, x in factors.items() if isinstance(x, Tensor) and x.dim() == 1}
    per_token = {name: x for name, x in factors.items() if isinstance(x, Tensor) and x.dim() > 1}
    require_rows(rewards, **per_row)
    require_same_shape(rewards=rewards, **per_token)
    _require_rewards_on_real_tokens(rewards, mask)
    discounts = _columns(gamma, values)
    decays = _columns(_product(gamma, lam), values)
    next_value = torch.zeros_like(values[:, 0]) if final_value is None else final_value
    running = torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + discounts[t] * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + decays[t] * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    advantages = advantages.where(mask, 0.0)
    return advantages, (advantages + values).where(mask, 0.0)


def turn_ends(mask: Tensor, context: Tensor) -> Tensor:
    """(B, T) bool: the last sampled token of each turn that context follows.

    Args:
        mask: (B, T) bool, True on sampled tokens.
        context: (B, T) bool, True on the tokens of tools and environments.
    """
    require_same_shape(mask=mask, context=context)
    return mask & torch.nn.functional.pad(context[:, 1:], (0, 1))


def turn_starts(mask: Tensor) -> Tensor:
    """(B, T) bool: the first sampled token of each turn.

    Args:
        mask: (B, T) bool, True on sampled tokens.
    """
    return mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))


def turn_factors(within: float | Tensor, between: float, turn_ends: Tensor) -> Tensor:
    """(B, T) float64 factors of `gae`: `between` at the last token of each turn but the last, `within` elsewhere.

    Args:
        within: one for all, or (B,), one per completion.
        turn_ends: (B, T) bool, from `turn_ends`.
    """
    if isinstance(within, Tensor):
        require_rows(turn_ends, within=within)
        within = within.double()[:, None]
    inside = torch.ones(turn_ends.shape, dtype=torch.float64, device=turn_ends.device) * within
    return inside.where(~turn_ends, between)


def _product(gamma: float | Tensor, lam: float | Tensor) -> float | Tensor:
    """γλ, in the shape of `gae`'s λ or γ."""
    if isinstance(gamma, Tensor) and isinstance(lam, Tensor) and lam.dim() == 1:
        return gamma * lam[:, None]
    return gamma * lam


def _columns(factor: float | Tensor, like: Tensor) -> Sequence[float | Tensor]:
    """The factor of each column: a number or (B,), in the dtype of `like`."""
    if isinstance(factor, Tensor) and factor.dim() == 2:
        return factor.to(like.dtype).unbind(dim=1)
    return [factor] * like.shape[1]


def _require_rewards_on_real_tokens(rewards: Tensor, mask: Tensor) -> None:
    if (rewards.ne(0) & ~mask).any():
        raise ValueError("a masked column has a reward other than 0, which would be lost")


def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """λ = 1 − 1/(α·length), one per completion, (B,) in [0, 1]. VAPO, arXiv:2504.05118, eq. 7.

    Args:
        mask: (B, T) bool, True on real tokens.
        alpha: α; the paper uses 0.05.
    """
    return (1.0 - 1.0 / (alpha * mask.sum(dim=1).clamp(min=1))).clamp(min=0.0)


def whiten(x: Tensor, mask: Tensor, correction: int = 0, eps: float = 1e-8, total: Total = torch.sum) -> Tensor:
    """Shift to mean 0 and scale to unit variance over the real tokens of all rows.

        (x − mean) / √(var + eps),   var = Σ (x − mean)² / (count − correction)

    The mean is taken in float64, where the mean of equal numbers is that number. Otherwise whitening would scale up
    the rounding error, and Adam would make full-size steps of it.

    Args:
        x: (B, T).
        mask: (B, T) bool, True on real tokens.
        correction: 1 takes the unbiased variance.
        total: returns the sum of a (B, T) tensor; over the rows of all processes, if they are whitened together.
    Returns:
        (B, T), 0 where mask is False; finite also for one single real token.
    """
    require_same_shape(x=x, mask=mask)
    count = total(mask).clamp(min=1)
    mean = total(x.double().where(mask, 0.0)) / count
    var = total((x - mean).square().where(mask, 0.0)) / (count - correction).clamp(min=1)
    return ((x - mean) * torch.rsqrt(var + eps)).where(mask, 0.0)


def _grouped(rewards: Tensor, mask: Tensor, groups: Tensor, estimator: str) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) sum of each completion's token rewards, number of its group and size of it; a group of one is an error.

    The sums are float64: in float32, equal rewards would differ from their mean.
    """
    require_same_shape(rewards=rewards, mask=mask)
    require_rows(rewards, groups=groups)
    _require_rewards_on_real_tokens(rewards, mask)
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    if (counts < 2).any():
        raise ValueError(f"{estimator} compares completions of one prompt: raise num_generations to 2 or more, got 1")
    return rewards.double().sum(dim=1), index, counts[index]


def _group_sum(x: Tensor, index: Tensor) -> Tensor:
    """(B,) sum of x over the rows of each row's group."""
    return torch.zeros(int(index.max()) + 1, dtype=x.dtype, device=x.device).index_add(0, index, x)[index]


def _spread(per_completion: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) with each completion's number on its real tokens."""
    return per_completion.to(dtype)[:, None].expand(mask.shape).where(mask, 0.0)


def grpo(rewards: Tensor, mask: Tensor, groups: Tensor, scale: bool = True) -> Tensor:
    """(s − mean of its group)/(std of its group + 1e-6), s the sum of a completion's rewards. arXiv:2402.03300.

    Args:
        rewards: (B, T) token rewards.
        mask: (B, T) bool, True on real tokens.
        groups: (B,) prompt number; equal numbers are completions of one prompt.
        scale: False leaves the division out (arXiv:2503.20783).
    Returns:
        (B, T), the same number on each real token of a completion.
    """
    scores, index, size = _grouped(rewards, mask, groups, "grpo")
    centred = scores - _group_sum(scores, index) / size
    if scale:
        centred = centred / ((_group_sum(centred.square(), index) / (size - 1)).sqrt() + 1e-6)
    return _spread(centred, mask, rewards.dtype)


def rloo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """s − mean s of the other completions of its group. arXiv:2402.14740. Args and returns as in `grpo`."""
    scores, index, size = _grouped(rewards, mask, groups, "rloo")
    return _spread(scores - (_group_sum(scores, index) - scores) / (size - 1), mask, rewards.dtype)


def opo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """s − length-weighted mean s of its group. arXiv:2505.23585. Args and returns as in `grpo`."""
    scores, index, _ = _grouped(rewards, mask, groups, "opo")
    lengths = mask.sum(dim=1)
    return _spread(scores - _group_sum(scores * lengths, index) / _group_sum(lengths, index), mask, rewards.dtype)


@whitened
def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """s − mean s of its group, to be whitened over the rollout. arXiv:2501.03262. Args and returns as in `grpo`."""
    scores, index, size = _grouped(rewards, mask, groups, "reinforce_plus_plus_baseline")
    return _spread(scores - _group_sum(scores, index) / size, mask, rewards.dtype)


@whitened
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Discounted sum of the token rewards from each token on, to be whitened over the rollout. arXiv:2501.03262.

    Args:
        rewards: (B, T) token rewards.
        mask: (B, T) bool, True on real tokens.
        gamma: γ, one for all or (B, T), as in `gae`.
    Returns:
        (B, T), 0 where mask is False.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[1]


# An estimator is called with exactly the parameters that its signature names, out of: rewards, mask, values,
# final_value, gamma, lam, groups, scale. `values` asks for a critic, `groups` for several completions of a prompt.
# With `values` it returns (advantages, returns).
ADVANTAGE_ESTIMATORS: dict[str, Callable] = {
    "gae": gae,
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "reinforce_plus_plus": reinforce_plus_plus,
}


def estimator_needs(name: str, parameter: str) -> bool:
    """Return whether an estimator has a parameter of that name."""
    return parameter in signature(ADVANTAGE_ESTIMATORS[name]).parameters


def estimator_whitens(name: str) -> bool:
    """Return whether an estimator is marked by `whitened`."""
    return getattr(ADVANTAGE_ESTIMATORS[name], "whiten_advantages", False)
