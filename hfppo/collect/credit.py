"""From scores to advantages: the credit of each token."""

from collections.abc import Callable, Sequence
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
from hfppo.rollout import Rollout


@dataclass(frozen=True)
class Credited:
    """A rollout, and the intermediate tensors of credit assignment that metrics use."""

    rollout: Rollout
    scorable_tokens: Tensor  # (B, T) bool, True on the tokens of completions that have a score
    raw_advantages: Tensor  # (B, T) before whitening


@dataclass(frozen=True)
class CreditAssignment:
    """From scores to advantages, in the order of docs/algorithm.md."""

    args: PPOConfig
    kl_coef: float  # β
    whiten: Callable[..., Tensor] | None  # `functional.whiten` over all processes; None: no whitening
    reward_weights: Sequence[float]  # of the reward functions

    def __call__(
        self, prompts: tuple[Tensor, Tensor], completions: Completions, scored: Scored, passes: Passes, groups: Tensor
    ) -> Credited:
        """Turn scores into advantages.

        Args:
            prompts: (B, P) token ids and their mask, padded on the left.
            groups: (B,) prompt number.
        """
        args, mask = self.args, completions.mask
        old_logprobs = completions.logprobs if passes.old_logprobs is None else passes.old_logprobs
        weights, kept = mismatch_weights(old_logprobs, completions, args)
        scores = final_scores(scored, completions, args)
        kl = torch.zeros_like(old_logprobs)
        if passes.ref_logprobs is not None:
            kl = F.token_kl(old_logprobs, passes.ref_logprobs, args.reward_kl_estimator)
        placed = place_scores(scored, scores, mask)
        if args.multi_objective_aggregation == "normalize_then_sum":
            placed = scores - scored.combined + normalized_sum(scored, self.reward_weights, groups)
        rewards = F.token_rewards(placed, kl, mask, self.kl_coef)
        scorable_tokens = mask & scored.scorable[:, None]
        if self.whiten is not None and args.whiten_rewards:
            rewards = self.whiten(rewards, scorable_tokens, shift_mean=False)
        compares = F.estimator_needs(args.advantage_estimator, "groups")
        rows = comparable_rows(scored.scorable, groups) if compares else torch.ones_like(scored.scorable)
        scaled = self.scale_by_batch(rewards, scored.scorable, mask)
        raw, returns, td_errors = self.estimate(scaled, rows, completions, passes, groups)
        advantages = raw
        if self.whiten is not None and args.whitens_advantages:
            advantages = self.whiten(raw, scorable_tokens & rows[:, None])
        rollout = Rollout(
            prompt_ids=prompts[0],
            prompt_mask=prompts[1],
            completion_ids=completions.ids,
            mask=mask,
            loss_mask=counted_tokens(scored, completions, args) & kept,
            truncated=completions.truncated,
            scores=scores,
            rollout_logprobs=completions.logprobs,
            old_logprobs=old_logprobs,
            rewards=rewards,
            advantages=advantages,
            ref_logprobs=passes.ref_logprobs,
            values=passes.values,
            weights=weights,
            td_errors=td_errors,
            returns=returns,
            context=completions.context,
            base_states=passes.base_states,
        )
        return Credited(rollout, scorable_tokens, raw)

    def estimate(
        self, rewards: Tensor, rows: Tensor, completions: Completions, passes: Passes, groups: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return advantages before whitening, (B, T), returns where the estimator gives them, and δ with a critic.

        The estimator is called with exactly the parameters that its signature names, from one mapping. δ is the
        advantage of GAE at λ = 0.

        Args:
            rewards: (B, T).
            rows: (B,) bool, the completions that the estimator gets; the advantages of others are 0.
            groups: (B,) prompt number.
        """
        args = self.args
        lam = args.lam if args.lam_alpha is None else F.length_adaptive_lam(completions.mask, args.lam_alpha)
        available: dict[str, Any] = {
            "rewards": rewards,
            "mask": completions.mask,
            "values": passes.values,
            "final_value": value_after_end(completions, passes),
            "groups": groups,
            "gamma": factor_by_turn(args.gamma, args.gamma_turn, completions),
            "lam": factor_by_turn(lam, args.lam_turn, completions),
            "scale": args.reward_scale == "group",
        }
        estimator = F.ADVANTAGE_ESTIMATORS[args.advantage_estimator]
        advantages, returns = call_estimator(estimator, available, rows)
        if returns is not None and args.lam_critic is not None:
            returns = call_estimator(estimator, {**available, "lam": args.lam_critic}, rows)[1]
        deltas = None
        if passes.values is not None:
            deltas = call_estimator(F.gae, {**available, "lam": 0.0}, torch.ones_like(rows))[0]
        return advantages, returns, deltas

    def scale_by_batch(self, rewards: Tensor, scorable: Tensor, mask: Tensor) -> Tensor:
        """Return rewards, (B, T), whose sums per completion have deviation 1 over all processes, if that is set."""
        scales = F.estimator_needs(self.args.advantage_estimator, "scale") and self.args.reward_scale == "batch"
        if self.whiten is None or not scales:
            return rewards
        totals = self.whiten(rewards.double().sum(dim=1, keepdim=True), scorable[:, None], correction=1)
        return F.token_rewards(totals[:, 0], torch.zeros_like(rewards), mask, 0.0)


def value_after_end(completions: Completions, passes: Passes) -> Tensor | None:
    """Return V of the state after the last token, (B,), 0 where the completion has ended; None: 0 for all."""
    open_ended = completions.truncated if completions.open_ended is None else completions.open_ended
    return None if passes.final_value is None else passes.final_value * open_ended


def final_scores(scored: Scored, completions: Completions, args: PPOConfig) -> Tensor:
    """Return the scores after the penalty, (B,)."""
    if args.missing_eos_penalty is None:
        return scored.combined
    cut = completions.truncated if completions.cut is None else completions.cut
    return scored.combined - args.missing_eos_penalty * cut.to(scored.combined.dtype)


def place_scores(scored: Scored, scores: Tensor, mask: Tensor) -> Tensor:
    """Return final scores, (B,), which belong to the last token; (B, T) token rewards if a function gives some.

    The penalty of a completion is on its last token.
    """
    if scored.per_token is None:
        return scores
    penalty = F.token_rewards(scores - scored.combined, torch.zeros(mask.shape, dtype=torch.float32), mask, 0.0)
    return scored.per_token + penalty


def normalized_sum(scored: Scored, weights: Sequence[float], groups: Tensor) -> Tensor:
    """Return the weighted sum of the functions' scores, (B,), each normalized within its group. arXiv:2601.05242.

    A score without another one of its function in the group counts as 0.
    """
    total = torch.zeros_like(scored.combined)
    for scores, weight in zip(scored.per_function.T, weights, strict=True):
        is_given = scored.scorable & ~scores.isnan()
        available = {"rewards": scores[:, None], "mask": is_given[:, None], "groups": groups}  # completions of a token
        total += weight * call_estimator(F.grpo, available, comparable_rows(is_given, groups))[0][:, 0]
    return total


def counted_tokens(scored: Scored, completions: Completions, args: PPOConfig) -> Tensor:
    """Return a mask, (B, T), of the tokens that the losses count."""
    counted = scored.scorable
    if args.mask_truncated_completions:
        counted = counted & ~completions.truncated
    return completions.mask & counted[:, None]


def mismatch_weights(old_logprobs: Tensor, completions: Completions, args: PPOConfig) -> tuple[Tensor | None, Tensor]:
    """Return weights of the policy loss, (B, T) or None without correction, and the (B, T) mask of kept tokens."""
    if args.policy_mode not in F.MISMATCH_MODES:
        return None, completions.mask
    mode, cap = args.policy_mode, args.vllm_importance_sampling_clip_max
    return F.importance_weights(old_logprobs, completions.logprobs, completions.mask, mode, cap)


def factor_by_turn(within: float | Tensor, between: float | None, completions: Completions) -> float | Tensor:
    """Return γ or λ of GAE: `within`; if `between` is set, (B, T) factors that are `between` at the end of a turn."""
    if between is None or completions.context is None:
        return within
    return F.turn_factors(within, between, F.turn_ends(completions.mask, completions.context))


def call_estimator(
    estimator: Callable[..., Tensor | tuple[Tensor, Tensor]], available: dict[str, Any], rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Call an estimator on some rows with the parameters it names; its result is 0 on the other rows.

    Args:
        available: values by parameter name; tensors are per row.
        rows: (B,) bool.
    """
    names = signature(estimator).parameters.keys() & available.keys()
    outputs = [torch.zeros_like(available["rewards"]) for _ in range(2 if "values" in names else 1)]
    if rows.any():
        some = {name: x[rows] if isinstance(x := available[name], Tensor) else x for name in names}
        result = estimator(**some)
        for output, part in zip(outputs, result if isinstance(result, tuple) else (result,), strict=False):
            output[rows] = part
    return outputs[0], outputs[1] if len(outputs) > 1 else None


def comparable_rows(scorable: Tensor, groups: Tensor) -> Tensor:
    """Return a mask, (B,), of the rows that have a score and another scored row in their group."""
    _, index = groups.unique(return_inverse=True)
    return scorable & (torch.bincount(index[scorable], minlength=len(groups))[index] > 1)
