"""From scores to advantages: what each token of a completion is credited with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hfppo import functional as F
from hfppo.collect.forward import Passes
from hfppo.config import PPOConfig
from hfppo.generation import Completions
from hfppo.rewards.functions import Scored
from hfppo.run_state import RunningMoments


@dataclass(frozen=True)
class Baseline:
    """What the greedy completion of each row's prompt scored, for the estimator that compares with it."""

    scores: Tensor  # (B,)
    scorable: Tensor  # (B,) bool, False where it has no score


@dataclass(frozen=True)
class Credit:
    """What a rollout's completions are credited with; names and shapes are those of `Rollout`."""

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
    baseline: Baseline | None,
    moments: RunningMoments | None,
    kl_coef: float,
    args: PPOConfig,
    whiten: Callable[..., Tensor] | None,
) -> Credit:
    """From scores to advantages, in the order of docs/algorithm.md.

    Args:
        groups: (B,) prompt number.
        baseline: for the estimator that needs one.
        moments: that normalise the scores; None: nothing does.
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
    raw, returns = advantages_and_returns(rewards, completions, passes, args, scored.scorable, groups, baseline)
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
    """(B,) scores with clip and penalty.

    Without `moments` they are plain, as metrics and evaluations report them; a clip that is meant for normalised
    ones is left out then.
    """
    scores = scored.combined if moments is None else moments.normalize(scored.combined)
    if args.reward_clip is not None and args.normalize_scores == (moments is not None):
        scores = scores.clamp(-args.reward_clip, args.reward_clip)
    if args.missing_eos_penalty is not None:
        scores = scores - args.missing_eos_penalty * completions.truncated
    return scores


def place_scores(scored: Scored, scores: Tensor, mask: Tensor, moments: RunningMoments | None) -> Tensor:
    """(B,) final scores for the last token, or (B, T) where functions reward tokens.

    What normalisation, clip and penalty add to the score of a completion stands on its last token.
    """
    if scored.per_token is None:
        return scores
    scale = 1.0 if moments is None else 1.0 / moments.std
    change = scores - scale * scored.combined
    return scale * scored.per_token + F.token_rewards(change, torch.zeros(mask.shape), mask, 0.0)


def counted_tokens(scored: Scored, completions: Completions, args: PPOConfig) -> Tensor:
    """(B, T) bool, True on the tokens that the losses count."""
    counted = scored.scorable
    if args.mask_truncated_completions:
        counted = counted & ~completions.truncated
    return completions.mask & counted[:, None]


def mismatch_weights(old_logprobs: Tensor, completions: Completions, args: PPOConfig) -> tuple[Tensor | None, Tensor]:
    """(B, T) weights of the policy loss where it is corrected, and the (B, T) mask of the tokens not rejected."""
    if args.policy_mode != "corrected":
        return None, completions.mask
    return F.importance_weights(
        old_logprobs,
        completions.logprobs,
        completions.mask,
        args.mismatch_level,
        args.mismatch_correction,
        args.mismatch_floor,
        args.mismatch_cap,
    )


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor | None, args: PPOConfig) -> Tensor:
    """(B, T) KL per token for the reward; 0 where nothing asks for a reference."""
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
    baseline: Baseline | None,
) -> tuple[Tensor, Tensor | None]:
    """(B, T) advantages before whitening, and (B, T) returns where there is a critic.

    Args:
        rewards: (B, T).
        scorable: (B,) bool, True where a completion has a score.
        groups: (B,) prompt number.
        baseline: for the estimator that needs one.
    """
    mask = completions.mask
    name = args.advantage_estimator
    estimator = F.ADVANTAGE_ESTIMATORS[name]
    if F.estimator_needs(name, "groups"):
        options = {"scale": args.scale_rewards} if F.estimator_needs(name, "scale") else {}
        return group_advantages(estimator, rewards, mask, scorable, groups, options), None
    if baseline is not None:
        return estimator(rewards, mask, baseline.scores).where(baseline.scorable[:, None], 0.0), None
    if not args.needs_critic:
        return estimator(rewards, mask, args.gamma), None
    lam = args.lam if args.lam_alpha is None else F.length_adaptive_lam(mask, args.lam_alpha)
    final = passes.final_value * completions.truncated if args.bootstrap_truncated else None
    advantages, returns = estimator(rewards, passes.values, mask, args.gamma, lam, final)
    if args.lam_critic is not None:
        returns = estimator(rewards, passes.values, mask, args.gamma, args.lam_critic, final)[1]
    return advantages, returns


def group_advantages(
    estimator: Callable[..., Tensor],
    rewards: Tensor,
    mask: Tensor,
    scorable: Tensor,
    groups: Tensor,
    options: dict[str, bool],
) -> Tensor:
    """(B, T) advantages against the others of a prompt that have a score; 0 where there is none to compare."""
    _, index = groups.unique(return_inverse=True)
    comparable = scorable & (torch.bincount(index[scorable], minlength=len(groups))[index] > 1)
    advantages = torch.zeros_like(rewards)
    if comparable.any():
        advantages[comparable] = estimator(rewards[comparable], mask[comparable], groups[comparable], **options)
    return advantages
