"""From scores to advantages: the credit of each token."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from hfppo import functional as F
from hfppo.collect.forward import Passes
from hfppo.config import PPOConfig
from hfppo.generation.sampler import Completions
from hfppo.rewards.functions import Scored
from hfppo.state import RunningMoments


@dataclass(frozen=True)
class GreedyScores:
    """The score of the greedy completion of each row's prompt."""

    scores: Tensor  # (B,)
    scorable: Tensor  # (B,) bool, False where it has no score


@dataclass(frozen=True)
class Credit:
    """The credit of a rollout's completions; names and shapes are those of `Rollout`."""

    old_logprobs: Tensor
    loss_mask: Tensor
    scorable_tokens: Tensor  # (B, T) bool, True on the tokens of completions that have a score
    scores: Tensor
    rewards: Tensor
    raw_advantages: Tensor  # (B, T) before whitening
    advantages: Tensor
    returns: Tensor | None
    weights: Tensor | None


def assign_credit(
    scored: Scored,
    completions: Completions,
    passes: Passes,
    groups: Tensor,
    greedy: GreedyScores | None,
    moments: RunningMoments | None,
    kl_coef: float,
    args: PPOConfig,
    whiten: Callable[..., Tensor] | None,
) -> Credit:
    """Turn scores into advantages, in the order of docs/algorithm.md.

    Args:
        groups: (B,) prompt number.
        greedy: for the estimator that needs it.
        moments: normalize the scores; None leaves them.
        kl_coef: β.
        whiten: `functional.whiten` over the rows of all processes; None leaves rewards and advantages as they are.
    """
    mask = completions.mask
    old_logprobs = completions.logprobs if passes.old_logprobs is None else passes.old_logprobs
    weights, kept = mismatch_weights(old_logprobs, completions, args)
    scores = final_scores(scored, completions, args, moments)
    placed = place_scores(scored, scores, mask, moments)
    kl = kl_to_reference(old_logprobs, passes.ref_logprobs, args)
    rewards = F.token_rewards(placed, kl, mask, kl_coef)
    scorable_tokens = mask & scored.scorable[:, None]
    if whiten is not None and args.whiten_rewards:
        rewards = whiten(rewards, scorable_tokens, shift_mean=False)
    raw, returns = advantages_and_returns(rewards, completions, passes, args, scored.scorable, groups, greedy)
    return Credit(
        old_logprobs=old_logprobs,
        loss_mask=counted_tokens(scored, completions, args) & kept,
        scorable_tokens=scorable_tokens,
        scores=scores,
        rewards=rewards,
        raw_advantages=raw,
        advantages=raw if whiten is None or not args.whitens_advantages else whiten(raw, scorable_tokens),
        returns=returns,
        weights=weights,
    )


def final_scores(
    scored: Scored, completions: Completions, args: PPOConfig, moments: RunningMoments | None = None
) -> Tensor:
    """Return the scores, (B,), after clip and penalty.

    Without `moments` they are plain, as metrics and evaluations report them; a clip meant for normalized scores is
    then left out.
    """
    scores = scored.combined if moments is None else moments.normalize(scored.combined)
    if args.reward_clip is not None and args.normalize_scores == (moments is not None):
        scores = scores.clamp(-args.reward_clip, args.reward_clip)
    if args.missing_eos_penalty is not None:
        cut = completions.truncated if completions.cut is None else completions.cut
        scores = scores - args.missing_eos_penalty * cut.to(scores.dtype)
    return scores


def place_scores(scored: Scored, scores: Tensor, mask: Tensor, moments: RunningMoments | None) -> Tensor:
    """Return final scores for the last token, (B,), or token rewards, (B, T), where a function gives them.

    The change that normalization, clip and penalty make to a completion's score stands on its last token.
    """
    if scored.per_token is None:
        return scores
    scale = 1.0 if moments is None else 1.0 / moments.std
    change = scores - scale * scored.combined
    return scale * scored.per_token + F.token_rewards(change, torch.zeros(mask.shape, dtype=torch.float32), mask, 0.0)


def counted_tokens(scored: Scored, completions: Completions, args: PPOConfig) -> Tensor:
    """Return a mask, (B, T), of the tokens that the losses count."""
    counted = scored.scorable
    if args.mask_truncated_completions:
        counted = counted & ~completions.truncated
    return completions.mask & counted[:, None]


def mismatch_weights(old_logprobs: Tensor, completions: Completions, args: PPOConfig) -> tuple[Tensor | None, Tensor]:
    """Return weights of the policy loss, (B, T) or None without correction, and the (B, T) mask of kept tokens."""
    if args.policy_mode != "corrected":
        return None, completions.mask
    return F.importance_weights(
        old_logprobs,
        completions.logprobs,
        completions.mask,
        args.vllm_importance_sampling_mode,
        args.vllm_importance_sampling_clip_max,
    )


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor | None, args: PPOConfig) -> Tensor:
    """Return the KL per token for the reward, (B, T); 0 where nothing asks for a reference."""
    if ref_logprobs is None:
        return torch.zeros_like(logprobs)
    return F.token_kl(logprobs, ref_logprobs, args.kl_estimator)


def advantages_and_returns(
    rewards: Tensor,
    completions: Completions,
    passes: Passes,
    args: PPOConfig,
    scorable: Tensor,
    groups: Tensor,
    greedy: GreedyScores | None,
) -> tuple[Tensor, Tensor | None]:
    """Return advantages before whitening, (B, T), and returns, (B, T), where the estimator gives them.

    The estimator is called with exactly the parameters that its signature names, from one mapping. Rows without a
    score, or without another of their group to compare with, get advantage 0 where the estimator would compare them.

    Args:
        rewards: (B, T).
        scorable: (B,) bool, True where a completion has a score.
        groups: (B,) prompt number.
        greedy: for the estimator that needs it.
    """
    name = args.advantage_estimator
    open_ended = completions.truncated if completions.open_ended is None else completions.open_ended
    lam = args.lam if args.lam_alpha is None else F.length_adaptive_lam(completions.mask, args.lam_alpha)
    available: dict[str, Any] = {
        "rewards": rewards,
        "mask": completions.mask,
        "values": passes.values,
        "final_value": None if passes.final_value is None else passes.final_value * open_ended,
        "groups": groups,
        "greedy_scores": None if greedy is None else greedy.scores,
        "gamma": factor_by_turn(args.gamma, args.gamma_turn, completions),
        "lam": factor_by_turn(lam, args.lam_turn, completions),
        "scale": args.scale_rewards == "group",
    }
    rows = torch.ones_like(scorable)
    if F.estimator_needs(name, "groups"):
        rows = comparable_rows(scorable, groups)
    elif greedy is not None:
        rows = greedy.scorable
    advantages, returns = call_estimator(F.ADVANTAGE_ESTIMATORS[name], available, rows)
    if returns is not None and args.lam_critic is not None:
        returns = call_estimator(F.ADVANTAGE_ESTIMATORS[name], {**available, "lam": args.lam_critic}, rows)[1]
    return advantages, returns


def factor_by_turn(within: float | Tensor, between: float | None, completions: Completions) -> float | Tensor:
    """Return γ or λ of GAE: `within`, or (B, T) with `between` from one turn to the next where that is set."""
    if between is None or completions.context is None:
        return within
    return F.turn_factors(within, between, F.turn_ends(completions.mask, completions.context))


def call_estimator(
    estimator: Callable[..., Tensor | tuple[Tensor, Tensor]], available: dict[str, Any], rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Call an estimator on some rows with the parameters it names; the other rows are 0.

    Args:
        available: values by parameter name; tensors are per row.
        rows: (B,) bool.
    """
    names = [name for name in signature(estimator).parameters if name in available]
    arguments = {name: available[name] for name in names}
    if bool(rows.all()):
        result = estimator(**arguments)
        return result if isinstance(result, tuple) else (result, None)
    outputs = tuple(torch.zeros_like(available["rewards"]) for _ in range(2 if "values" in names else 1))
    if rows.any():
        some = {name: x[rows] if isinstance(x, Tensor) else x for name, x in arguments.items()}
        result = estimator(**some)
        for output, part in zip(outputs, result if isinstance(result, tuple) else (result,), strict=False):
            output[rows] = part
    return outputs[0], outputs[1] if len(outputs) > 1 else None


def comparable_rows(scorable: Tensor, groups: Tensor) -> Tensor:
    """Return a mask, (B,), of the rows that have a score and another scored row in their group."""
    _, index = groups.unique(return_inverse=True)
    return scorable & (torch.bincount(index[scorable], minlength=len(groups))[index] > 1)
