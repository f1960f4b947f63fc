"""`PPOState`: where a run stands beyond Trainer's state; part of every checkpoint."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class RunningMoments:
    """Mean and variance of all scores seen so far, merged rollout by rollout.

    Chan, Golub, LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances", eq. 2.1.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared deviations from the mean

    @property
    def std(self) -> float:
        """Standard deviation (of the population); 1 while all scores are equal, so that it can divide."""
        return math.sqrt(self.squares / self.count) if self.squares > 0 else 1.0

    def add(self, scores: Tensor) -> None:
        """Add the scores of a rollout."""
        if not scores.numel():
            return
        x = scores.double()
        count = self.count + x.numel()
        shift = float(x.mean()) - self.mean
        self.squares += float((x - x.mean()).square().sum()) + shift**2 * self.count * x.numel() / count
        self.mean += shift * x.numel() / count
        self.count = count

    def normalize(self, scores: Tensor) -> Tensor:
        """(score − mean) / std, of any shape."""
        return (scores - self.mean) / self.std


@dataclass
class PretrainingProgress:
    """How far the critic's pretraining is."""

    rollouts: int = 0  # of the run's prompts, taken for it so far; those that were dropped included
    epoch: int = 0  # epochs finished
    step: int = 0  # optimizer steps made in the epoch that is running
    loss: float = 0.0  # the sum of their losses on this process
    work: int = 0  # optimizer steps, with `updates_per_rollout` for each rollout; `save_steps` counts it
    held_out: list[dict[str, float]] = field(default_factory=list)  # measured before the first epoch, and after each
    completions: int = 0  # collected on all processes
    done: bool = False

    @property
    def best_epoch(self) -> int:
        """The epoch after which the critic explained most of the held-out part; 0: before the first."""
        explained = [measured.get("r2", -math.inf) for measured in self.held_out]
        return explained.index(max(explained))

    def results(self) -> dict[str, float]:
        """Return the measures of the critic that was kept, by the names in `all_results.json`; empty without any."""
        if not self.held_out:
            return {}
        counts = {"critic_pretraining_completions": self.completions, "critic_pretraining_epochs": self.epoch}
        kept = self.held_out[self.best_epoch]
        return {**{f"critic_pretraining_{name}": value for name, value in kept.items()}, **counts}


@dataclass
class PPOState:
    """Where a run stands between two optimizer steps; part of every checkpoint.

    Callbacks may change `kl_coef`; the rest belongs to the trainer.
    """

    kl_coef: float  # β of the next rollout
    rollouts: int = 0  # collected so far, the one in use included
    dropped: int = 0  # rollouts among them that were dropped because a number was not finite
    first_step: int = 0  # global step at which the rollout in use was collected
    last_step: int = 0  # global step at which the next one is due; `target_kl` brings it forward
    skipped_steps: int = 0  # of this run, which `target_kl` left out and a count of completions does not make up for
    score_moments: RunningMoments = field(default_factory=RunningMoments)  # for `normalize_scores`
    critic_pretraining: PretrainingProgress = field(default_factory=PretrainingProgress)

    @property
    def next_rollout(self) -> int:
        """The number, from 0, of the next rollout's prompts and random draws; pretraining has taken the first ones."""
        return self.critic_pretraining.rollouts + self.rollouts

    def state_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "PPOState":
        """Make the state that `state_dict` described."""
        moments = RunningMoments(**state["score_moments"])
        progress = PretrainingProgress(**state.get("critic_pretraining", {}))  # earlier versions had none
        return cls(**{**state, "score_moments": moments, "critic_pretraining": progress})
