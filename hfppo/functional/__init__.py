"""The mathematics of PPO for language models as pure tensor functions.

Index `t` of every `(B, T)` tensor is about completion token `t`: `values[:, t]` is the value of the state before that
token and `rewards[:, t]` is what the token earns. Log-probabilities, KL and entropy are in nats.
"""

from hfppo.functional import advantages, kl, losses, mismatch_weights, values
from hfppo.functional.advantages import *
from hfppo.functional.kl import *
from hfppo.functional.losses import *
from hfppo.functional.mismatch_weights import *
from hfppo.functional.values import *

__all__ = [*advantages.__all__, *kl.__all__, *losses.__all__, *mismatch_weights.__all__, *values.__all__]
