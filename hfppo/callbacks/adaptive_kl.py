"""The KL to the reference, steered by β."""

import math

from hfppo.callbacks.events import PPOCallback
from hfppo.functional import adaptive_kl_coef


class AdaptiveKLCallback(PPOCallback):
    """Steers the KL to the reference by changing β. arXiv:1909.08593, section 2.2.

    Its state is β itself, which is in the checkpoint.

    Args:
        target: KL per token to steer to, nats.
        horizon: completions over which β moves by at most 20 %.
    """

    def __init__(self, target: float = 0.1, horizon: float = 10_000):
        if not target > 0 or not horizon > 0:
            raise ValueError(f"target={target} and horizon={horizon} must be above 0")
        self.target, self.horizon = target, horizon

    def on_train_begin(self, args, state, control, **kwargs):
        if args.kl_coef == 0:
            raise ValueError("AdaptiveKLCallback multiplies kl_coef, and kl_coef=0 stays 0; start from 0.05, say")

    def on_rollout_end(self, args, state, control, *, rollout, metrics, **kwargs):
        completions = len(rollout) * args.world_size
        kl = metrics.get("kl", math.nan)
        control.kl_coef = adaptive_kl_coef(control.kl_coef, kl, self.target, self.horizon, completions)
