"""Refuse a rollout in which a number is NaN or infinite."""

from dataclasses import dataclass

from accelerate.utils import gather_object
from torch import Tensor

from hfppo.rollout import Rollout

# The numbers of a rollout, each after those that it is made of, so that the first is where it began.
CAUSES = (
    *("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "scores"),
    *("weights", "rewards", "advantages", "returns"),
)


class NonFiniteError(FloatingPointError):
    """Something is NaN or infinite; the message says what, and where it lies.

    Args:
        rollout: this process's rows of it, where it is one.
    """

    def __init__(self, message: str, rollout: Rollout | None = None):
        super().__init__(message)
        self.rollout = rollout


@dataclass(frozen=True, order=True)
class Found:
    """What was found on a process; the smaller of two, in the order of the fields, is closer to the cause."""

    depth: int
    process: int
    text: str


def earliest(found: Found | None) -> Found | None:
    """The one closest to the cause, of all processes. A collective call."""
    return min((other for other in gather_object([found]) if other is not None), default=None)


def bad_row(x: Tensor) -> int | None:
    """The first row, of (B,) or (B, …), that is not finite."""
    bad = ~x.isfinite()
    rows = bad if bad.dim() == 1 else bad.flatten(1).any(dim=1)
    return int(rows.nonzero()[0]) if rows.any() else None


def check_rollout(rollout: Rollout, name: str, process: int) -> None:
    """Let a rollout through only if it is finite on every process. A collective call.

    Args:
        name: what errors call it.
    Raises:
        NonFiniteError: on every process, with the first tensor and row.
    """
    tensors = rollout.tensors()
    mine = None
    for depth, cause in enumerate(CAUSES):
        if cause in tensors and (row := bad_row(tensors[cause])) is not None:
            mine = Found(depth, process, f"{cause} is not finite in row {row} of {name} on process {process}")
            break
    if (found := earliest(mine)) is not None:
        raise NonFiniteError(found.text, rollout)
