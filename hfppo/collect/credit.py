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

    def __call__(
        self,
        prompts: tuple[Tensor, Tensor],
        completions: Completions,
        scored: Scored,
        passes: Passes,
        groups: Tensor,
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
        rewards = F.token_rewards(place_scores(scored, scores, mask), kl, mask, self.kl_coef)
        scorable_tokens = mask & scored.scorable[:, None]
        if self.whiten is not None and args.whiten_rewards:
            rewards = self.whiten(rewards, scorable_tokens, shift_mean=False)
        raw, returns = self.advantages_and_returns(rewards, scored.scorable, completions, passes, groups)
        advantages = raw if self.whiten is None or not args.whitens_advantages else self.whiten(raw, scorable_tokens)
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
            td_errors=self.td_errors(rewards, completions, passes),
            returns=returns,
            context=completions.context,
            base_states=passes.base_states,
        )
        return Credited(rollout, scorable_tokens, raw)

    def advantages_and_returns(
        self, rewards: Tensor, scorable: Tensor, completions: Completions, passes: Passes, groups: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return advantages before whitening, (B, T), and returns, (B, T), where the estimator gives them.

        The estimator is called with exactly the parameters that its signature names, from one mapping. An
        estimator that compares the completions of a prompt gets only scored rows whose group has another scored row;
        the advantages of other rows are 0.

        Args:
            rewards: (B, T).
            scorable: (B,) bool, True where a completion has a score.
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
            "scale": args.scale_rewards == "group",
        }
        compares = F.estimator_needs(args.advantage_estimator, "groups")
        rows = comparable_rows(scorable, groups) if compares else torch.ones_like(scorable)
        estimator = F.ADVANTAGE_ESTIMATORS[args.advantage_estimator]
        advantages, returns = call_estimator(estimator, available, rows)
        if returns is not None and args.lam_critic is not None:
            returns = call_estimator(estimator, {**available, "lam": args.lam_critic}, rows)[1]
        return advantages, returns

    def td_errors(self, rewards: Tensor, completions: Completions, passes: Passes) -> Tensor | None:
        """Return δ of each token, (B, T), which is its advantage at λ = 0; None without a critic."""
        if passes.values is None:
            return None
        gamma = factor_by_turn(self.args.gamma, self.args.gamma_turn, completions)
        final_value = value_after_end(completions, passes)
        return F.gae(rewards, passes.values, completions.mask, gamma, lam=0.0, final_value=final_value)[0]


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
    return F.importance_weights(
        old_logprobs,
        completions.logprobs,
        completions.mask,
        args.policy_mode,
        args.vllm_importance_sampling_clip_max,
    )


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
