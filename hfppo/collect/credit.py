"""From rewards, which arrive on their tokens, to advantages: the credit of each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfppo import functional as F
from hfppo.collect.forward import Passes
from hfppo.config import PPOConfig
from hfppo.rewards.functions import score_table
from hfppo.rollout import Rollout, Sequences
from hfppo.sample import Ended, Sample
from hfppo.support.padding import pad_right


@dataclass(frozen=True)
class Credited:
    """A rollout, and the intermediate tensors of credit assignment that metrics use."""

    rollout: Rollout
    scored_tokens: Tensor  # (B, T) bool, True on the tokens of completions that have a score
    raw_advantages: Tensor  # (B, T) before whitening
    outcomes: Tensor | None  # (B, T) the sum of all rewards that follow; None without a critic


class Estimates(NamedTuple):
    """The results of an estimator, (B, T) each; only `advantages` without a critic."""

    advantages: Tensor  # before whitening
    returns: Tensor | None = None  # at λ = `lam_critic`
    td_errors: Tensor | None = None  # δ, the advantage of GAE at λ = 0
    outcomes: Tensor | None = None  # returns at λ = 1: no value is in them, but after an open end


@dataclass(frozen=True)
class CreditAssignment:
    """From rewards to advantages, in the order of docs/algorithm.md."""

    args: PPOConfig
    kl_coef: float  # β
    whiten: Callable[..., Tensor] | None  # `functional.whiten` over all processes; None: no whitening
    reward_weights: Sequence[float]  # of the reward functions

    def __call__(self, samples: Sequence[Sample], sequences: Sequences, passes: Passes) -> Credited:
        """Turn rewards into advantages.

        Args:
            sequences: the samples as tensors.
        """
        args, mask = self.args, sequences.mask
        old_logprobs = sequences.rollout_logprobs if passes.old_logprobs is None else passes.old_logprobs
        weights, kept = mismatch_weights(old_logprobs, sequences, args)
        kl = torch.zeros_like(old_logprobs)
        if passes.ref_logprobs is not None:
            kl = F.token_kl(old_logprobs, passes.ref_logprobs, args.reward_kl_estimator)
        placed, _ = pad_right([sample.token_rewards for sample in samples], torch.float32)
        scored = torch.tensor([sample.scored for sample in samples])
        counted = torch.tensor([counts_in_loss(sample, args) for sample in samples])
        groups = torch.tensor([sample.row.group for sample in samples])
        if args.multi_objective_aggregation == "normalize_then_sum":
            cut = torch.tensor([sample.ended is Ended.CUT for sample in samples])
            placed = normalized_sum(samples, self.reward_weights, groups) - (args.missing_eos_penalty or 0.0) * cut
        rewards = F.token_rewards(placed, kl, mask, self.kl_coef)
        scored_tokens = mask & scored[:, None]
        compares = F.estimator_needs(args.advantage_estimator, "groups")
        rows = comparable_rows(scored, groups) if compares else torch.ones_like(scored)
        open_ended = torch.tensor([sample.open_ended for sample in samples])
        lam = args.lam if args.lam_alpha is None else F.length_adaptive_lam(mask, args.lam_alpha)
        available = {
            "rewards": self.scale_by_batch(rewards, scored, mask),
            "mask": mask,
            "values": passes.values,
            "final_value": None if passes.final_value is None else passes.final_value * open_ended,
            "groups": groups,
            "gamma": factor_by_turn(args.gamma, args.gamma_turn, sequences),
            "lam": factor_by_turn(lam, args.lam_turn, sequences),
            "scale": args.reward_scale == "group",
        }
        estimates = self.estimate(available, rows)
        advantages = estimates.advantages
        if self.whiten is not None and args.whitens_advantages:
            advantages = self.whiten(advantages, scored_tokens & rows[:, None])
        rollout = Rollout(
            **vars(sequences),
            loss_mask=mask & counted[:, None] & kept,
            scores=torch.tensor([sample.score for sample in samples], dtype=torch.float32),
            old_logprobs=old_logprobs,
            rewards=rewards,
            advantages=advantages,
            ref_logprobs=passes.ref_logprobs,
            values=passes.values,
            weights=weights,
            td_errors=estimates.td_errors,
            returns=estimates.returns,
            value_mask=scored_tokens & kept if args.mask_truncated_completions else None,
            base_states=passes.base_states,
        )
        return Credited(rollout, scored_tokens, estimates.advantages, estimates.outcomes)

    def estimate(self, available: dict[str, Any], rows: Tensor) -> Estimates:
        """Return advantages before whitening, and with a critic returns, δ and outcomes.

        Args:
            available: arguments of estimators by name; each gets those that it declares.
            rows: (B,) bool, the completions that the estimator gets; the advantages of others are 0.
        """
        args = self.args
        estimator = F.ADVANTAGE_ESTIMATORS[args.advantage_estimator]
        advantages, returns = call_estimator(estimator, available, rows)
        if returns is None:
            return Estimates(advantages)
        if args.lam_critic is not None:
            returns = call_estimator(estimator, {**available, "lam": args.lam_critic}, rows)[1]
        deltas = call_estimator(estimator, {**available, "lam": 0.0}, rows)[0]
        outcomes = call_estimator(estimator, {**available, "lam": 1.0}, rows)[1]
        return Estimates(advantages, returns, deltas, outcomes)

    def scale_by_batch(self, rewards: Tensor, scored: Tensor, mask: Tensor) -> Tensor:
        """Return rewards, (B, T), whose sums per completion have deviation 1 over all processes, if that is set."""
        scales = F.estimator_needs(self.args.advantage_estimator, "scale") and self.args.reward_scale == "batch"
        if self.whiten is None or not scales:
            return rewards
        totals = self.whiten(rewards.double().sum(dim=1, keepdim=True), scored[:, None], correction=1)
        return F.token_rewards(totals[:, 0], torch.zeros_like(rewards), mask, 0.0)


def normalized_sum(samples: Sequence[Sample], weights: Sequence[float], groups: Tensor) -> Tensor:
    """Return the weighted sum of the functions' scores, (B,), each normalized within its group. arXiv:2601.05242.

    A score without another one of its function in the group counts as 0.
    """
    total, scored = torch.zeros(len(samples)), torch.tensor([sample.scored for sample in samples])
    for scores, weight in zip(score_table(samples).T, weights, strict=True):
        is_given = scored & ~scores.isnan()
        available = {"rewards": scores[:, None], "mask": is_given[:, None], "groups": groups}  # completions of a token
        total += weight * call_estimator(F.grpo, available, comparable_rows(is_given, groups))[0][:, 0]
    return total


def counts_in_loss(sample: Sample, args: PPOConfig) -> bool:
    """Return whether the losses count the tokens of a sample."""
    return sample.scored and not (args.mask_truncated_completions and sample.truncated)


def mismatch_weights(old_logprobs: Tensor, sequences: Sequences, args: PPOConfig) -> tuple[Tensor | None, Tensor]:
    """Return weights of the policy loss, (B, T) or None without correction, and the (B, T) mask of kept tokens."""
    if args.policy_mode not in F.MISMATCH_MODES:
        return None, sequences.mask
    mode, cap = args.policy_mode, args.vllm_importance_sampling_clip_max
    return F.importance_weights(old_logprobs, sequences.rollout_logprobs, sequences.mask, mode, cap)


def factor_by_turn(within: float | Tensor, between: float | None, sequences: Sequences) -> float | Tensor:
    """Return γ or λ of GAE: `within`; if `between` is set, (B, T) factors that are `between` at the end of a turn."""
    if between is None or sequences.context is None:
        return within
    return F.turn_factors(within, between, F.turn_ends(sequences.mask, sequences.context))


def call_estimator(
    estimator: Callable[..., Tensor | tuple[Tensor, Tensor]], available: dict[str, Any], rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Call an estimator on some rows with the parameters it names; its result is 0 on the other rows.

    It gets the sampled tokens only: an agent's tape may be much longer.

    Args:
        available: values by parameter name; tensors are per row.
        rows: (B,) bool.
    """
    names = signature(estimator).parameters.keys() & available.keys()
    outputs = [torch.zeros_like(available["rewards"]) for _ in range(2 if "values" in names else 1)]
    if rows.any():
        some = {name: x[rows] if isinstance(x := available[name], Tensor) else x for name in names}
        mask = available["mask"][rows]
        tokens = (~mask).byte().argsort(dim=1, stable=True)[:, : int(mask.sum(dim=1).max())]
        some = {name: x.gather(1, tokens) if isinstance(x, Tensor) and x.dim() == 2 else x for name, x in some.items()}
        result = estimator(**some)
        for output, part in zip(outputs, result if isinstance(result, tuple) else (result,), strict=False):
            output[rows] = torch.zeros_like(mask, dtype=part.dtype).scatter(1, tokens, part)
    return outputs[0], outputs[1] if len(outputs) > 1 else None


def comparable_rows(scored: Tensor, groups: Tensor) -> Tensor:
    """Return a mask, (B,), of the rows that have a score and another scored row in their group."""
    _, index = groups.unique(return_inverse=True)
    return scored & (torch.bincount(index[scored], minlength=len(groups))[index] > 1)
