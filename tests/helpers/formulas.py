"""One call of each function of hfppo.functional."""

import torch

from hfppo import functional as F


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
    "gae": lambda x: F.gae(x.a, x.b, x.mask, 0.9, x.scores / 4, x.scores),
    "turn_ends": lambda x: F.turn_ends(x.mask, x.b > 0),
    "turn_starts": lambda x: F.turn_starts(x.mask),
    "turn_factors": lambda x: F.turn_factors(x.scores / 4, 0.5, x.mask),
    "length_adaptive_lam": lambda x: F.length_adaptive_lam(x.mask, 0.8),
    "whiten": lambda x: F.whiten(x.b, x.mask),
    "explained_variance": lambda x: F.explained_variance(x.a, x.b, x.mask),
    "grpo": lambda x: F.grpo(x.a, x.mask, x.groups),
    "rloo": lambda x: F.rloo(x.a, x.mask, x.groups),
    "opo": lambda x: F.opo(x.a, x.mask, x.groups),
    "reinforce_plus_plus_baseline": lambda x: F.reinforce_plus_plus_baseline(x.a, x.mask, x.groups),
    "reinforce_plus_plus": lambda x: F.reinforce_plus_plus(x.a, x.mask, 0.9),
    "token_kl": lambda x: tuple(F.token_kl(x.a, x.b, name) for name in F.KL_ESTIMATORS),
    "token_rewards": lambda x: tuple(F.token_rewards(scores, x.b, x.mask, 0.1) for scores in (x.scores, x.c)),
    "policy_loss": lambda x: F.policy_loss(x.a, x.b, x.c, F.Clip(dual=3.0)),
    "gspo_loss": lambda x: F.gspo_loss(x.a, x.b, x.c, x.mask, F.Clip()),
    "cispo_loss": lambda x: F.cispo_loss(x.a, x.b, x.c, F.Clip()),
    "sapo_loss": lambda x: F.sapo_loss(x.a, x.b, x.c),
    "dppo_loss": lambda x: F.dppo_loss(x.a, x.b, x.c, F.Clip()),
    "dppo_clip_fractions": lambda x: F.dppo_clip_fractions(x.a, x.b, x.c, F.Clip()),
    "clip_fractions": lambda x: F.clip_fractions(x.a, x.b, x.c, F.Clip(dual=3.0)),
    "dis_loss": lambda x: F.dis_loss(x.a, x.b, x.c, F.Clip()),
    "dis_clip_fractions": lambda x: F.dis_clip_fractions(x.a, x.b, x.c, F.Clip()),
    "value_loss": lambda x: F.value_loss(x.a, x.b),
    "bce_value_loss": lambda x: F.bce_value_loss(x.a, x.b, F.ValueRange(-1.0, 2.0)),
    "align_returns": lambda x: F.align_returns(x.a, x.b.abs(), 0.5),
    "importance_weights": lambda x: F.importance_weights(x.a, x.b, x.mask, "token_mask"),
    "effective_sample_size": lambda x: F.effective_sample_size(x.a, x.mask),
    "reduce": lambda x: tuple(F.reduce(x.b, x.mask, mode, max_length=3) for mode in F.REDUCTIONS),
}
