"""Choose the prompts that a rollout can learn from.

With a critic, V(s₀) gives each candidate's expected score before anything is sampled, and the candidates nearest the
middle are taken (PCL, arXiv:2510.01135). Departures from the paper: the critic is the one of the advantages. A quarter
of the prompts is drawn uniformly, and the critic chooses only while it explains the scores of those.

Without a critic, more groups are sampled than a rollout has, and those with spread are kept (DAPO, arXiv:2503.14476).
Departure from the paper: one batch instead of several, as large as the last rollout's share of such groups asks for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfppo.config import PPOConfig
from hfppo.metrics import Measures, parts, parts_of
from hfppo.rollout import Rollout
from hfppo.state import PPOState, stream_seed

UNIFORM = 4  # one prompt in so many is drawn uniformly
MEMORY = 128  # completions by which the critic is judged: the last ones whose prompts were drawn uniformly
EXPLAINED = 0.04  # share of the variance of their scores; values without knowledge explain it in one case in eighty
SIGNAL = 0.1  # of the scores' range: a score this far from the expected one teaches


@dataclass(frozen=True)
class ScoreLine:
    """Expected scores as a line over V(s₀) − its mean: a critic's level and scale are a return's, not a score's."""

    slope: float = 0.0
    mean: float = 0.0  # of the scores
    explained: float = 0.0  # share of the scores' variance
    low: float = 0.0  # lowest score
    high: float = 0.0

    @classmethod
    def fit(cls, rows: Sequence[Sequence[float]]) -> "ScoreLine":
        """Fit the line to some completions by least squares, given V(s₀) − its mean and the score of each."""
        x, y = torch.tensor(rows or [[0.0, 0.0]], dtype=torch.float64).T
        dx, dy = x - x.mean(), y - y.mean()
        slope = float(dx @ dy / (dx @ dx)) if dx.any() else 0.0
        explained = slope * float(dx @ dy / (dy @ dy)) if dy.any() else 0.0
        return cls(slope, float(y.mean()), explained, float(y.min()), float(y.max()))

    @property
    def may_choose(self) -> bool:
        """Whether the line is good enough to choose prompts by it."""
        return self.slope > 0 and self.explained >= EXPLAINED

    def expected(self, values: Tensor, mean: Tensor) -> Tensor:
        """Return the expected scores of prompts, (N,) float64.

        Args:
            values: (N,) V(s₀).
            mean: its mean over prompts drawn uniformly.
        """
        return self.mean + self.slope * (values - mean).double()

    def distances(self, expected: Tensor) -> Tensor:
        """Return how far expected scores are from the middle of their range; p(1 − p) falls with it."""
        return (expected - (self.low + self.high) / 2).abs()


@dataclass(frozen=True)
class Choice:
    """One process's prompts of a rollout, and how they were chosen."""

    positions: range  # of the prompts that it was chosen from, in the order of prompts
    taken: list[int]  # indices of `positions`
    uniform: list[bool]  # by prompt, whether it was drawn uniformly
    passed_over: int = 0  # prompts of all processes
    measures: dict[str, list[float]] = field(default_factory=dict)  # as plain values, for a checkpoint


def num_candidates(line: ScoreLine, spread: float, args: PPOConfig) -> int:
    """Return the number of a process's candidates for its part of a rollout.

    Args:
        spread: share of groups whose scores differ.
    """
    own, most = args.prompts_per_process, args.prompt_candidates * args.prompts_per_process
    if args.needs_critic:
        return most if line.may_choose else own
    return min(most, math.ceil(own / spread)) if spread else most


def choose(distances: Tensor, count: int, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the candidates to take, (count,) in their order, and a mask of those of them that were drawn uniformly.

    Args:
        distances: (candidates,) from the middle of the expected score.
        seed: of the uniform draw.
    """
    generator = torch.Generator().manual_seed(stream_seed(*seed))
    drawn = torch.randperm(len(distances), generator=generator)[: -(-count // UNIFORM)]
    uniform = torch.zeros(len(distances), dtype=torch.bool)
    uniform[drawn] = True
    nearest = distances.masked_fill(uniform, torch.inf).argsort(stable=True)[: count - len(drawn)]
    taken = torch.cat([drawn, nearest]).sort().values
    return taken, uniform[taken]


def measure_choice(expected: Tensor, taken: Tensor, uniform: Tensor, part: slice) -> Measures:
    """Measure the expected scores, (candidates,), of prompts that the critic has chosen and passed over.

    Args:
        taken, uniform: see `choose`.
        part: this process's candidates, the only ones that it counts.
    """
    chosen, own = taken[~uniform], torch.zeros(len(expected), dtype=torch.bool)
    own[part] = True
    passed = own.clone()
    passed[taken] = False
    return {
        "candidates/chosen": parts(expected[chosen], own[chosen]),
        "candidates/passed_over": parts(expected, passed),
    }


def judge(
    state: PPOState, choice: Choice, rollout: Rollout, gather: Callable[[Tensor], Tensor]
) -> tuple[list[list[float]], Measures]:
    """Return the updated pairs of V(s₀) and score for `ScoreLine.fit`, and metrics of the choice.

    Args:
        gather: returns the rows of all processes.
    """
    if rollout.values is None:
        return [], {}
    line, values, scores = ScoreLine.fit(state.uniform_scores), rollout.values[:, 0], rollout.scores
    counts = rollout.loss_mask.any(dim=1)
    drawn = counts & torch.tensor(choice.uniform).repeat_interleave(len(rollout) // len(choice.uniform))
    rows = gather(torch.stack([values, scores, drawn.float()], dim=1))
    judging = rows[rows[:, 2] == 1][:, :2].double()
    mean = judging[:, 0].mean()
    judging[:, 0] -= mean
    kept = [*state.uniform_scores, *judging.tolist()][-MEMORY:]
    measures = {name: torch.tensor(x, dtype=torch.float64) for name, x in choice.measures.items()}
    measures["candidates/explained"] = parts_of(ScoreLine.fit(kept).explained)
    if len(judging) and line.high > line.low:
        expected, span = line.expected(values, mean), line.high - line.low
        teaches = (scores - expected).abs() > SIGNAL * span
        measures["candidates/signal_chosen"] = parts(teaches, counts & ~drawn)
        measures["candidates/signal_uniform"] = parts(teaches, drawn)
    return kept, measures
