"""The loss of one micro-batch, and the metrics of the update."""

from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from hfppo import functional as F
from hfppo.config import PPOConfig
from hfppo.functional.kl import clamp_log_ratio
from hfppo.learn.micro_batches import MiniBatchSize
from hfppo.metrics import METRICS, Measures, parts
from hfppo.models.actor_critic import TokenOutputs
from hfppo.rollout import Rollout


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss; its mean per token is logged under its name, or `loss/<name>` if that is not a metric."""

    name: str
    coef: float  # its factor in the loss
    per_token: Tensor  # (B, T)
    of_critic: bool = False
    reduction: str | None = None  # one of `REDUCTIONS`; None: `loss_reduction`


def ppo_terms(outputs: TokenOutputs, batch: Rollout, args: PPOConfig, clip: F.Clip) -> list[LossTerm]:
    """Return the terms of the PPO loss: policy, value, KL and entropy, as far as the step computes them.

    Args:
        outputs: the outputs of π_θ, the policy being optimized.
        batch: the rollout's data about the same tokens.
        clip: the clip of the policy loss.
    """
    terms = []
    if outputs.logprobs is not None:
        terms.append(LossTerm("policy/loss", 1.0, surrogate(outputs.logprobs, batch, args.policy_loss, clip)))
    if outputs.router_loss is not None:
        per_token = outputs.router_loss.expand(batch.loss_mask.shape)  # adds up to a mean weighted by tokens
        terms.append(LossTerm("aux", 1.0, per_token, reduction="token-mean"))
    if outputs.values is not None and batch.returns is not None:
        terms.append(LossTerm("value/loss", args.vf_coef, fit(outputs, batch, args), of_critic=True))
    if outputs.logprobs is not None and args.kl_loss_coef and batch.ref_logprobs is not None:
        kl = F.token_kl(outputs.logprobs, batch.ref_logprobs, args.kl_estimator or "k3")
        terms.append(LossTerm("policy/kl_loss", args.kl_loss_coef, kl))
    if outputs.entropy is not None:
        # A token mean with every `loss_reduction`, so that one coefficient always means the same (TRL).
        terms.append(LossTerm("policy/entropy", -args.entropy_coef, outputs.entropy, reduction="token-mean"))
    return terms


def surrogate(logprobs: Tensor, batch: Rollout, name: str, clip: F.Clip) -> Tensor:
    """Return the policy loss per token, (B, T). It is called with exactly the parameters that its signature names."""
    available = {
        "logprobs": logprobs,
        "old_logprobs": batch.old_logprobs,
        "advantages": batch.advantages,
        "mask": batch.loss_mask,
        "clip": clip,
    }
    policy_loss = F.POLICY_LOSSES[name]
    loss = policy_loss(**{name: x for name, x in available.items() if name in signature(policy_loss).parameters})
    return loss if batch.weights is None else loss * batch.weights


def fit(outputs: TokenOutputs, batch: Rollout, args: PPOConfig) -> Tensor:
    """Return the value loss per token, (B, T), 0 on tokens that `align_returns` leaves out."""
    targets, kept, bounds = batch.returns, None, args.bounds
    assert targets is not None
    assert outputs.values is not None
    if batch.value_ratio is not None:
        targets, kept = F.align_returns(targets, batch.value_ratio, 0.0 if bounds is None else bounds.low)
    if bounds is not None and outputs.value_logits is not None:
        per_token = F.bce_value_loss(outputs.value_logits, targets, bounds)
    else:
        per_token = F.value_loss(outputs.values, targets)
    return per_token if kept is None else per_token.where(kept, 0.0)


def ppo_loss(terms: list[LossTerm], batch: Rollout, size: MiniBatchSize, args: PPOConfig, critic_only: bool) -> Tensor:
    """Return the scalar to minimize; the scalars of a mini-batch's micro-batches add up to its loss.

    Args:
        terms: from `PPOTrainer.loss_terms`.
        critic_only: during `critic_warmup`; the actor's terms get weight 0, so that DDP sees every parameter used.
    Raises:
        TypeError: `terms` is None, as a method without `return` gives.
        ValueError: a term does not have one number per completion token.
    """
    if terms is None:
        raise TypeError("loss_terms returned None; return the list of LossTerm")
    total, expected = batch.advantages.new_zeros(()), tuple(batch.loss_mask.shape)
    for term in terms:
        if (shape := tuple(torch.as_tensor(term.per_token).shape)) != expected:
            raise ValueError(
                f"the loss term {term.name!r} has per_token of shape {shape}; give a number per completion token, "
                f"{expected}, and leave the mean to the trainer"
            )
        if term.coef:
            mode, counts = term.reduction or args.loss_reduction, size.critic if term.of_critic else size.actor
            mask = batch.fitted if term.of_critic else batch.loss_mask
            per_token = term.per_token
            if batch.share is not None and mode == "seq-mean-token-mean":  # of an episode, not of a conversation
                per_token = per_token * batch.share[:, None]
            reduced = F.reduce(per_token, mask, mode, *counts, args.max_completion_length)
            total = total + (term.coef if term.of_critic or not critic_only else 0.0) * reduced
    return total


def measure_update(
    terms: list[LossTerm], outputs: TokenOutputs, batch: Rollout, args: PPOConfig, clip: F.Clip, first: bool
) -> Measures:
    """Measure one micro-batch.

    Args:
        terms: from `PPOTrainer.loss_terms`.
        clip: the clip of the policy loss.
        first: whether no optimizer step was made since the rollout, so that the ratio must be 1.
    """
    mask = batch.loss_mask
    measures = {}
    for term in terms:
        name = term.name if term.name in METRICS else f"loss/{term.name}"
        measures[name] = parts(term.per_token, batch.fitted if term.of_critic else mask)
    if outputs.logprobs is None:
        return measures
    logprobs = outputs.logprobs.detach()
    ratio = clamp_log_ratio(logprobs - batch.old_logprobs).exp()
    measures["policy/ratio"] = measures["policy/ratio_max"] = parts(ratio, mask)
    measures["policy/approx_kl"] = parts(F.token_kl(batch.old_logprobs, logprobs, "k3"), mask)
    if first:
        deviation = parts((ratio - 1).abs(), mask)
        measures["policy/first_ratio_deviation"] = measures["policy/first_ratio_deviation_mean"] = deviation
    return measures | measure_clip(logprobs, batch, args.policy_loss, clip)


def measure_clip(logprobs: Tensor, batch: Rollout, name: str, clip: F.Clip) -> Measures:
    """Measure the shares of tokens that a policy loss clips; {} if its clip is not measured."""
    if name not in F.CLIP_FRACTIONS:
        return {}
    found = F.CLIP_FRACTIONS[name](logprobs, batch.old_logprobs, batch.advantages, clip)
    shares = {"clip_frac": found.low | found.high, "clip_frac_low": found.low, "clip_frac_high": found.high}
    if clip.dual is not None:
        shares["dual_clip_frac"] = found.dual
    return {f"policy/{name}": parts(clipped, batch.loss_mask) for name, clipped in shares.items()}
