"""The mathematics of PPO for language models as pure tensor functions.

Index `t` of every `(B, T)` tensor is about completion token `t`: `values[:, t]` is the value of the state before that
token and `rewards[:, t]` is what the token earns. Log-probabilities, KL and entropy are in nats.
"""

from hfppo.functional.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimator_needs,
    estimator_whitens,
    explained_variance,
    gae,
    grpo,
    length_adaptive_lam,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    whiten,
    whitened,
)
from hfppo.functional.kl import (
    KL_ESTIMATORS,
    adaptive_kl_coef,
    straight_through_kl,
    token_kl,
    token_rewards,
)
from hfppo.functional.losses import (
    POLICY_LOSSES,
    REDUCTIONS,
    ClipFractions,
    cispo_loss,
    clip_fractions,
    gpg_loss,
    gspo_loss,
    policy_loss,
    reduce,
    sapo_loss,
    value_clipped,
    value_loss,
)
from hfppo.functional.mismatch_weights import (
    MISMATCH_CORRECTIONS,
    MISMATCH_LEVELS,
    effective_sample_size,
    importance_weights,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "MISMATCH_CORRECTIONS",
    "MISMATCH_LEVELS",
    "POLICY_LOSSES",
    "REDUCTIONS",
    "ClipFractions",
    "adaptive_kl_coef",
    "cispo_loss",
    "clip_fractions",
    "effective_sample_size",
    "estimator_needs",
    "estimator_whitens",
    "explained_variance",
    "gae",
    "gpg_loss",
    "grpo",
    "gspo_loss",
    "importance_weights",
    "length_adaptive_lam",
    "opo",
    "policy_loss",
    "reduce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sapo_loss",
    "straight_through_kl",
    "token_kl",
    "token_rewards",
    "value_clipped",
    "value_loss",
    "whiten",
    "whitened",
]
