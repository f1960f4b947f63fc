"""The metrics of a rollout and of its scores."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hfppo import functional as F
from hfppo.collect.credit import Credit
from hfppo.config import PPOConfig
from hfppo.environments.episodes import CUT, DROPPED, UNFINISHED, Episode
from hfppo.environments.tool_calls import RAISED, TIMEOUT, UNKNOWN
from hfppo.metrics import Meter
from hfppo.rewards.functions import Scored
from hfppo.rollout import Rollout


def measure_scores(meter: Meter, scores: Tensor, scored: Scored, names: list[str]) -> None:
    """Add the metrics of scores, for a rollout and for an evaluation alike."""
    meter.add("reward", scores)
    meter.add("reward_std", scores)
    meter.add("unscorable_frac", ~scored.scorable)
    for i, name in enumerate(names):
        given = scored.per_function[:, i]
        for what in ("mean", "std"):
            meter.add(f"rewards/{name}/{what}", given, ~given.isnan(), pattern=f"rewards/{{function}}/{what}")
    for name, failed in scored.failed.items():
        meter.add(f"rewards/{name}/failed", torch.tensor(failed), pattern="rewards/{function}/failed")
    for name, numbers in scored.metrics.items():  # weighted by the completions they are about
        everywhere = torch.tensor(numbers, dtype=torch.float64).mean().expand(len(scored.scorable))
        meter.add(f"custom/{name}", everywhere, pattern="custom/{name}")


def measure_rollout(
    meter: Meter,
    rollout: Rollout,
    credit: Credit,
    kl_coef: float,
    args: PPOConfig,
    gather: Callable[[Tensor], Tensor],
) -> None:
    """Add the metrics of a rollout.

    Args:
        credit: of its completions.
        kl_coef: β of the rollout.
        gather: returns the rows of all processes, for metrics that are no mean over rows.
    """
    mask = rollout.mask
    meter.add("completions/mean_length", mask.sum(dim=1))
    meter.add("completions/max_length", mask.sum(dim=1))
    meter.add("completions/truncated_frac", rollout.truncated)
    meter.add("rlhf_reward", rollout.rewards.sum(dim=1), credit.scorable_tokens.any(dim=1))
    meter.add("advantage_mean", credit.raw_advantages, credit.scorable_tokens)
    meter.add("advantage_std", credit.raw_advantages, credit.scorable_tokens)
    if args.num_generations > 1:
        meter.add(
            "frac_reward_zero_std", prompts_without_signal(rollout, credit.scorable_tokens, args.num_generations)
        )
    if rollout.ref_logprobs is not None:
        meter.add_number("kl_coef", kl_coef)
        meter.add("kl", F.token_kl(rollout.old_logprobs, rollout.ref_logprobs, args.kl_estimator), mask)
        meter.add("kl_k3", F.token_kl(rollout.old_logprobs, rollout.ref_logprobs, "k3"), mask)
    if args.policy_mode != "bypass":
        measure_mismatch(meter, rollout, gather)
    if rollout.values is not None and rollout.returns is not None:
        fitted = rollout.loss_mask
        meter.add("value/mean", rollout.values, fitted)
        meter.add("value/std", rollout.values, fitted)
        meter.add("value/return", rollout.returns, fitted)
        meter.add("value/return_std", rollout.returns, fitted)
        explained = F.explained_variance(gather(rollout.values), gather(rollout.returns), gather(fitted))
        if math.isfinite(explained):
            meter.add_number("value/explained_variance", explained)
        if rollout.context is not None:
            starts = fitted & F.turn_starts(rollout.mask)
            explained = F.explained_variance(gather(rollout.values), gather(rollout.returns), gather(starts))
            if math.isfinite(explained):
                meter.add_number("value/turn_explained_variance", explained)


def measure_episodes(meter: Meter, episodes: Sequence[Episode]) -> None:
    """Add the metrics of turns and tools; none without episodes."""
    if not episodes:
        return
    turns = torch.tensor([episode.turns for episode in episodes])
    meter.add("turns/mean", turns)
    meter.add("turns/max", turns)
    for limit in (UNFINISHED, CUT, DROPPED):
        meter.add(f"turns/{limit}_frac", torch.tensor([episode.limit == limit for episode in episodes]))
    rewards = [e.rewards.values() for e in episodes]
    meter.add("turns/reward", torch.tensor([reward for some in rewards for reward in some], dtype=torch.float32))
    meter.add("completions/mean_context_length", torch.tensor([e.sampled.count(False) for e in episodes]))
    counts = sum((episode.counts for episode in episodes), Counter())
    meter.add("tools/malformed_frac", share(counts["malformed"], int(turns.sum())))
    meter.add("tools/call_frequency", torch.tensor([episode.counts["calls"] for episode in episodes]))
    failures = {"failure_frequency": counts[UNKNOWN] + counts[RAISED] + counts[TIMEOUT]}
    failures |= {"unknown_frac": counts[UNKNOWN], "timeout_frac": counts[TIMEOUT]}
    for name, number in failures.items():
        meter.add(f"tools/{name}", share(number, counts["calls"]))


def share(part: int, whole: int) -> Tensor:
    """Return a vector of ones and zeros whose mean is part of the whole."""
    return torch.arange(whole) < part


def prompts_without_signal(rollout: Rollout, scorable_tokens: Tensor, num_generations: int) -> Tensor:
    """Return a mask, (groups,), of the prompts whose scored completions all score alike, or count in no loss."""
    scorable, counts = (tokens.any(dim=1).view(-1, num_generations) for tokens in (scorable_tokens, rollout.loss_mask))
    scores = rollout.scores.view(-1, num_generations)
    alike = scores.where(scorable, -math.inf).amax(dim=1) <= scores.where(scorable, math.inf).amin(dim=1)
    return alike | ~counts.any(dim=1)


def measure_mismatch(meter: Meter, rollout: Rollout, gather: Callable[[Tensor], Tensor]) -> None:
    """Add the distance between the log-probs of sampler and training model, and the weights that correct it."""
    mask = rollout.mask
    difference = (rollout.old_logprobs - rollout.rollout_logprobs).abs()
    meter.add("mismatch/mean", difference, mask)
    meter.add("mismatch/max", difference, mask)
    meter.add("mismatch/kl", F.token_kl(rollout.rollout_logprobs, rollout.old_logprobs, "k3"), mask)
    if rollout.weights is not None:
        meter.add("mismatch/weight_mean", rollout.weights, mask)
        meter.add("mismatch/weight_max", rollout.weights, mask)
        meter.add("mismatch/rejected_frac", rollout.weights == 0, mask)
        effective = F.effective_sample_size(gather(rollout.weights), gather(mask))
        if math.isfinite(effective):
            meter.add_number("mismatch/ess", effective)
