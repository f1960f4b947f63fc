"""From rewards to advantages: the credit of each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from hfppo import functional as F
from hfppo.collect.forward import Passes
from hfppo.config import PPOConfig
from hfppo.rollout import Rollout, Sequences
from hfppo.sample import Sample
from hfppo.support.padding import pad_right


@dataclass(frozen=True)
class Credited:
    """A rollout, and the intermediate tensors of credit assignment that metrics use."""

    rollout: Rollout
    scored_tokens: Tensor  # (B, T) bool, True on the tokens of completions that have a score
    raw_advantages: Tensor  # (B, T) before whitening


@dataclass(frozen=True)
class CreditAssignment:
    """From rewards to advantages, in the order of docs/algorithm.md."""

    args: PPOConfig
    kl_coef: float  # β
    whiten: Callable[..., Tensor] | None  # `functional.whiten` over all processes; None: no whitening

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
        rewards = F.token_rewards(placed, kl, mask, self.kl_coef)
        scored = torch.tensor([sample.scored for sample in samples])
        counted = torch.tensor([counts_in_loss(sample, args) for sample in samples])
        scored_tokens = mask & scored[:, None]
        if self.whiten is not None and args.whiten_rewards:
            rewards = self.whiten(rewards, scored_tokens, shift_mean=False)
        final_value = value_after_end(samples, passes)
        raw, returns = self.advantages_and_returns(rewards, samples, sequences, passes, final_value)
        advantages = raw if self.whiten is None or not args.whitens_advantages else self.whiten(raw, scored_tokens)
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
            td_errors=self.td_errors(rewards, sequences, passes, final_value),
            returns=returns,
            base_states=passes.base_states,
        )
        return Credited(rollout, scored_tokens, raw)

    def advantages_and_returns(
        self,
        rewards: Tensor,
        samples: Sequence[Sample],
        sequences: Sequences,
        passes: Passes,
        final_value: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return advantages before whitening, (B, T), and returns, (B, T), where the estimator gives them.

        The estimator is called with exactly the parameters that its signature names, from one mapping. An
        estimator that compares the completions of a prompt gets only scored rows whose group has another scored row;
        the advantages of other rows are 0.

        Args:
            rewards: (B, T).
            final_value: (B,) V after the last token; None: 0.
        """
        args, groups = self.args, torch.tensor([sample.row.group for sample in samples])
        scored = torch.tensor([sample.scored for sample in samples])
        lam = args.lam if args.lam_alpha is None else F.length_adaptive_lam(sequences.mask, args.lam_alpha)
        available: dict[str, Any] = {
            "rewards": rewards,
            "mask": sequences.mask,
            "values": passes.values,
            "final_value": final_value,
            "groups": groups,
            "gamma": factor_by_turn(args.gamma, args.gamma_turn, sequences),
            "lam": factor_by_turn(lam, args.lam_turn, sequences),
            "scale": args.scale_rewards == "group",
        }
        compares = F.estimator_needs(args.advantage_estimator, "groups")
        rows = comparable_rows(scored, groups) if compares else torch.ones_like(scored)
        estimator = F.ADVANTAGE_ESTIMATORS[args.advantage_estimator]
        advantages, returns = call_estimator(estimator, available, rows)
        if returns is not None and args.lam_critic is not None:
            returns = call_estimator(estimator, {**available, "lam": args.lam_critic}, rows)[1]
        return advantages, returns

    def td_errors(
        self, rewards: Tensor, sequences: Sequences, passes: Passes, final_value: Tensor | None
    ) -> Tensor | None:
        """Return δ of each token, (B, T), which is its advantage at λ = 0; None without a critic."""
        if passes.values is None:
            return None
        gamma = factor_by_turn(self.args.gamma, self.args.gamma_turn, sequences)
        return F.gae(rewards, passes.values, sequences.mask, gamma, lam=0.0, final_value=final_value)[0]


def value_after_end(samples: Sequence[Sample], passes: Passes) -> Tensor | None:
    """Return V of the state after the last token, (B,), 0 where the completion has ended; None: 0 for all."""
    open_ended = torch.tensor([sample.open_ended for sample in samples])
    return None if passes.final_value is None else passes.final_value * open_ended


def counts_in_loss(sample: Sample, args: PPOConfig) -> bool:
    """Return whether the losses count the tokens of a sample."""
    return sample.scored and not (args.mask_truncated_completions and sample.truncated)


def mismatch_weights(old_logprobs: Tensor, sequences: Sequences, args: PPOConfig) -> tuple[Tensor | None, Tensor]:
    """Return weights of the policy loss, (B, T) or None without correction, and the (B, T) mask of kept tokens."""
    if args.policy_mode not in F.MISMATCH_MODES:
        return None, sequences.mask
    return F.importance_weights(
        old_logprobs,
        sequences.rollout_logprobs,
        sequences.mask,
        args.policy_mode,
        args.vllm_importance_sampling_clip_max,
    )


def factor_by_turn(within: float | Tensor, between: float | None, sequences: Sequences) -> float | Tensor:
    """Return γ or λ of GAE: `within`; if `between` is set, (B, T) factors that are `between` at the end of a turn."""
    if between is None or sequences.context is None:
        return within
    return F.turn_factors(within, between, F.turn_ends(sequences.mask, sequences.context))


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


def comparable_rows(scored: Tensor, groups: Tensor) -> Tensor:
    """Return a mask, (B,), of the rows that have a score and another scored row in their group."""
    _, index = groups.unique(return_inverse=True)
    return scored & (torch.bincount(index[scored], minlength=len(groups))[index] > 1)
