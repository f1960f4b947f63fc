"""One call of each function of hfppo.functional."""

import torch

from hfppo.functional import (
    KL_ESTIMATORS,
    REDUCTIONS,
    Clip,
    ValueRange,
    align_returns,
    bce_value_loss,
    cispo_loss,
    clip_fractions,
    dis_clip_fractions,
    dis_loss,
    dppo_clip_fractions,
    dppo_loss,
    effective_sample_size,
    explained_variance,
    gae,
    grpo,
    gspo_loss,
    importance_weights,
    length_adaptive_lam,
    opo,
    policy_loss,
    reduce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    sapo_loss,
    token_kl,
    token_rewards,
    turn_ends,
    turn_factors,
    turn_starts,
    value_loss,
    whiten,
)


def bits(*rows: str) -> torch.Tensor:
    """A mask from one string per row: bits("0110") is one row whose two middle tokens are real."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


INPUTS = {
    "a": torch.tensor([[-0.5, -1.0, 0.0], [-2.0, 0.0, -0.3]]),
    "b": torch.tensor([[-0.9, -0.2, 0.7], [-1.0, 0.8, -0.4]]),  # on masked columns too
    "c": torch.tensor([[1.0, -1.0, 0.0], [0.5, 0.0, -2.0]]),
    "mask": bits("110", "101"),
    "groups": torch.tensor([1, 1]),
    "scores": torch.tensor([1.0, 2.0]),
}


CALLS = {
    "gae": lambda x: gae(x.a, x.b, x.mask, 0.9, x.scores / 4, x.scores),
    "turn_ends": lambda x: turn_ends(x.mask, x.b > 0),
    "turn_starts": lambda x: turn_starts(x.mask),
    "turn_factors": lambda x: turn_factors(x.scores / 4, 0.5, x.mask),
    "length_adaptive_lam": lambda x: length_adaptive_lam(x.mask, 0.8),
    "whiten": lambda x: whiten(x.b, x.mask),
    "explained_variance": lambda x: explained_variance(x.a, x.b, x.mask),
    "grpo": lambda x: grpo(x.a, x.mask, x.groups),
    "rloo": lambda x: rloo(x.a, x.mask, x.groups),
    "opo": lambda x: opo(x.a, x.mask, x.groups),
    "reinforce_plus_plus_baseline": lambda x: reinforce_plus_plus_baseline(x.a, x.mask, x.groups),
    "reinforce_plus_plus": lambda x: reinforce_plus_plus(x.a, x.mask, 0.9),
    "token_kl": lambda x: tuple(token_kl(x.a, x.b, name) for name in KL_ESTIMATORS),
    "token_rewards": lambda x: tuple(token_rewards(scores, x.b, x.mask, 0.1) for scores in (x.scores, x.c)),
    "policy_loss": lambda x: policy_loss(x.a, x.b, x.c, Clip(dual=3.0)),
    "gspo_loss": lambda x: gspo_loss(x.a, x.b, x.c, x.mask, Clip()),
    "cispo_loss": lambda x: cispo_loss(x.a, x.b, x.c, Clip()),
    "sapo_loss": lambda x: sapo_loss(x.a, x.b, x.c),
    "dppo_loss": lambda x: dppo_loss(x.a, x.b, x.c, Clip()),
    "dppo_clip_fractions": lambda x: dppo_clip_fractions(x.a, x.b, x.c, Clip()),
    "clip_fractions": lambda x: clip_fractions(x.a, x.b, x.c, Clip(dual=3.0)),
    "dis_loss": lambda x: dis_loss(x.a, x.b, x.c, Clip()),
    "dis_clip_fractions": lambda x: dis_clip_fractions(x.a, x.b, x.c, Clip()),
    "value_loss": lambda x: value_loss(x.a, x.b),
    "bce_value_loss": lambda x: bce_value_loss(x.a, x.b, ValueRange(-1.0, 2.0)),
    "align_returns": lambda x: align_returns(x.a, x.b.abs(), 0.5),
    "importance_weights": lambda x: importance_weights(x.a, x.b, x.mask, "token_mask"),
    "effective_sample_size": lambda x: effective_sample_size(x.a, x.mask),
    "reduce": lambda x: tuple(reduce(x.b, x.mask, mode, max_length=3) for mode in REDUCTIONS),
}
