"""The metrics of a rollout and of its scores."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hfppo import functional as F
from hfppo.collect.credit import Credited
from hfppo.config import PPOConfig
from hfppo.environments.tool_calls import RAISED, TIMEOUT, UNKNOWN
from hfppo.functional.advantages import Total
from hfppo.metrics import Measures, parts, parts_of
from hfppo.rewards.functions import score_table
from hfppo.rewards.reward_func import Numbers
from hfppo.rollout import Rollout
from hfppo.sample import Ended, Sample

ROUNDING = 1e-4  # of a return at an end of its range, as a share of the range

LIMITS = [ended for ended in Ended if ended is not Ended.STOPPED]
THIRDS = ("first", "middle", "last")  # of a completion's sampled tokens


def measure_scores(samples: Sequence[Sample], numbers: Numbers) -> Measures:
    """Measure the scores of a rollout or an evaluation.

    Args:
        numbers: of log_metric, by name.
    """
    scored = torch.tensor([sample.scored for sample in samples])
    of_scored = parts(torch.tensor([sample.score for sample in samples], dtype=torch.float32)[scored])
    measures = {"reward": of_scored, "reward_std": of_scored, "unscorable_frac": parts(~scored)}
    for name, given in zip(samples[0].scores, score_table(samples).T, strict=True):
        measures |= dict.fromkeys((f"rewards/{name}/mean", f"rewards/{name}/std"), parts(given, ~given.isnan()))
    for name in samples[0].fallbacks:
        measures[f"rewards/{name}/failed"] = parts(torch.tensor([sample.fallbacks[name] for sample in samples]))
    for name, values in numbers.items():  # weighted by the number of their completions
        everywhere = torch.tensor(values, dtype=torch.float64).mean().expand(len(samples))
        measures[f"custom/{name}"] = parts(everywhere)
    return measures


def measure_rollout(credited: Credited, kl_coef: float, args: PPOConfig, total: Total) -> Measures:
    """Measure a rollout; docs/metrics.md has the meaning of each name.

    Args:
        kl_coef: β of the rollout.
        total: returns the sum of a (B, T) tensor over all processes, for metrics that are not a mean.
    """
    rollout, mask, scored = credited.rollout, credited.rollout.mask, credited.scored_tokens
    lengths, advantages = parts(mask.sum(dim=1)), parts(credited.raw_advantages, scored)
    measures = {
        "completions/mean_length": lengths,
        "completions/max_length": lengths,
        "completions/truncated_frac": parts(rollout.truncated),
        "rlhf_reward": parts(rollout.rewards.sum(dim=1), scored.any(dim=1)),
        "advantage_mean": advantages,
        "advantage_std": advantages,
    }
    if args.num_generations > 1:
        measures["frac_reward_zero_std"] = parts(prompts_without_signal(rollout, scored, args.num_generations))
    if rollout.ref_logprobs is not None:
        measures["kl_coef"] = parts_of(kl_coef)
        for name, estimator in (("kl", args.reward_kl_estimator), ("kl_k3", "k3")):
            measures[name] = parts(F.token_kl(rollout.old_logprobs, rollout.ref_logprobs, estimator), mask)
    if args.policy_mode != "bypass":
        measures |= measure_mismatch(rollout, args, total)
    return measures | measure_values(credited, args.bounds, total)


def measure_values(credited: Credited, bounds: F.ValueRange | None, total: Total) -> Measures:
    """Measure the critic's values, their targets, and how well they explain outcomes; {} without a critic.

    Targets with λ < 1 contain the values themselves: at 240 tokens and λ = 0.95, values without any relation to the
    outcome explain 0.9 of such targets.
    """
    rollout, outcomes = credited.rollout, credited.outcomes
    if rollout.values is None or rollout.returns is None or outcomes is None:
        return {}
    fitted = rollout.fitted
    values, returns = parts(rollout.values, fitted), parts(rollout.returns, fitted)
    measures = {"value/mean": values, "value/std": values, "value/return": returns, "value/return_std": returns}
    if bounds is not None:
        share = bounds.share(rollout.returns)
        measures["value/outside_frac"] = parts((share < -ROUNDING) | (share > 1 + ROUNDING), fitted)
    position = 3 * (rollout.mask.cumsum(dim=1) - 1) // rollout.mask.sum(dim=1, keepdim=True).clamp(min=1)
    thirds = {f"value/explained_variance_{name}": fitted & (position == n) for n, name in enumerate(THIRDS)}
    tokens = {"value/explained_variance": fitted, **thirds}
    if rollout.context is not None:
        tokens["value/turn_explained_variance"] = fitted & F.turn_starts(rollout.mask)
    for name, some in tokens.items():
        measures |= finite(name, F.explained_variance(rollout.values, outcomes, some, total), some)
    return measures


def finite(name: str, number: float, mask: Tensor) -> Measures:
    """Return a finite number of all processes as a measure, with the weight of this process's tokens; otherwise {}."""
    return {name: parts(torch.full_like(mask, number, dtype=torch.float32), mask)} if math.isfinite(number) else {}


def measure_episodes(samples: Sequence[Sample]) -> Measures:
    """Measure turns and tools."""
    turns = torch.tensor([sample.turns for sample in samples])
    counts = sum((sample.counts for sample in samples), Counter())
    shares = {
        "failure_frequency": counts[UNKNOWN] + counts[RAISED] + counts[TIMEOUT],
        "unknown_frac": counts[UNKNOWN],
        "timeout_frac": counts[TIMEOUT],
    }
    limits = {limit: torch.tensor([sample.ended is limit for sample in samples]) for limit in LIMITS}
    rewards = [reward for sample in samples for reward in sample.turn_rewards.values()]
    failed = [sample.counts["failed_agents"] for sample in samples if "failed_agents" in sample.counts]
    conversations = [1 + max(sample.conversation) for sample in samples if sample.conversation]
    of_agents = {
        "agent/failed_frac": parts(torch.tensor(failed)),
        "agent/conversations": parts(torch.tensor(conversations)),
    }
    return {
        **(of_agents if failed else {}),
        "turns/mean": parts(turns),
        "turns/max": parts(turns),
        **{f"turns/{limit}_frac": parts(reached) for limit, reached in limits.items()},
        "turns/reward": parts(torch.tensor(rewards, dtype=torch.float32)),
        "completions/mean_context_length": parts(torch.tensor([s.sampled.count(False) for s in samples])),
        "tools/malformed_frac": parts(share(counts["malformed"], int(turns.sum()))),
        # An agent runs its calls itself.
        "tools/call_frequency": parts(torch.tensor([s.counts["calls"] + s.counts["served_calls"] for s in samples])),
        **{f"tools/{name}": parts(share(number, counts["calls"])) for name, number in shares.items()},
    }


def share(part: int, whole: int) -> Tensor:
    """Return a bool vector whose mean is part/whole."""
    return torch.arange(whole) < part


def prompts_without_signal(rollout: Rollout, scored_tokens: Tensor, num_generations: int) -> Tensor:
    """Return a mask, (groups,), of the prompts whose scored completions have equal scores, or count in no loss."""
    counts = rollout.loss_mask.any(dim=1)
    return scores_alike(rollout.scores, scored_tokens.any(dim=1), counts, num_generations)


def scores_alike(scores: Tensor, scored: Tensor, counts: Tensor, num_generations: int) -> Tensor:
    """Return the same mask from scores, a mask of those that exist, and one of completions in the loss, (B,) each."""
    scores, scored, counts = (x.view(-1, num_generations) for x in (scores, scored, counts))
    alike = scores.where(scored, -math.inf).amax(dim=1) <= scores.where(scored, math.inf).amin(dim=1)
    return alike | ~counts.any(dim=1)


def measure_mismatch(rollout: Rollout, args: PPOConfig, total: Total) -> Measures:
    """Measure the distance between the log-probs of sampler and training model, and the weights that correct it."""
    mask = rollout.mask
    difference = parts((rollout.old_logprobs - rollout.rollout_logprobs).abs(), mask)
    kl = F.token_kl(rollout.rollout_logprobs, rollout.old_logprobs, "k3")
    measures = {"mismatch/mean": difference, "mismatch/max": difference, "mismatch/kl": parts(kl, mask)}
    if rollout.weights is None:
        return measures
    weights = parts(rollout.weights, mask)
    cut = (rollout.weights == 0) | (rollout.weights == args.vllm_importance_sampling_clip_max)
    return {
        **measures,
        "mismatch/weight_mean": weights,
        "mismatch/weight_max": weights,
        "mismatch/cut_frac": parts(cut, mask),
        **finite("mismatch/ess", F.effective_sample_size(rollout.weights, mask, total), mask),
    }
