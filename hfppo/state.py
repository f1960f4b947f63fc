"""`PPOState`: the state that a checkpoint needs beyond Trainer's; the seeds of all random draws."""

import hashlib
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


@dataclass
class PPOState:
    """The state of a run between two optimizer steps; part of every checkpoint. Only the trainer writes it.

    Callbacks change the steered fields through `PPOControl`.
    """

    STEERED: ClassVar[tuple[str, ...]] = ("kl_coef", "cliprange", "cliprange_high", "learning_rate_factor")

    kl_coef: float  # β of the next rollout
    cliprange: float = 0.2  # ε of the policy clip below 1
    cliprange_high: float = 0.2  # ε above 1
    learning_rate_factor: float = 1.0  # multiplies the actor's scheduled learning rate
    rollouts: int = 0  # collected so far, the one in use included
    # Global step at which the rollout in use was collected, minus the actor's steps on it that were left out.
    first_step: int = 0
    last_step: int = 0  # global step at which the next one is due; a callback may bring it forward
    skipped_steps: int = 0  # steps left out at rollouts' ends in this run, if its length is in completions
    pretraining_rollouts: int = 0  # collected for the critic's pretraining
    passed_over: int = 0  # prompts that `prompt_candidates` has passed over
    # V(s₀) and score of the last completions whose prompts were drawn uniformly, by which the critic is judged.
    uniform_scores: list[list[float]] = field(default_factory=list)
    spread: float = 1.0  # share of the last rollout's groups whose scores differed
    pretraining_results: dict[str, float] = field(default_factory=dict)  # as in `all_results.json`; {} until done

    @property
    def next_rollout(self) -> int:
        """The number, from 0, of the next rollout's prompts and random draws; pretraining has taken the first ones."""
        return self.pretraining_rollouts + self.rollouts

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "PPOState":
        """Make the state from its fields as plain values."""
        return cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})  # earlier versions had others


# Purposes of random draws; two purposes never share numbers.
ORDER_STREAM, SAMPLING_STREAM, EVAL_STREAM, SHUFFLE_STREAM, ENVIRONMENT_STREAM = 1, 2, 3, 4, 5
PRETRAINING_STREAM, CHOICE_STREAM = 7, 8


def stream_seed(*numbers: int) -> int:
    """Return a 63-bit seed for a tuple of numbers; any other tuple gives an unrelated seed.

    Random draws are named by (seed, purpose, rollout, row) instead of coming from one global stream, so a resumed run
    draws the same numbers without saved state, and no draw disturbs another.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
