"""Find NaN and infinity in a rollout."""

from dataclasses import dataclass

from accelerate.utils import gather_object
from torch import Tensor

from hfppo.rollout import Rollout

# Rollout tensors in the order in which they are computed: the first non-finite one is the cause.
CAUSES = (
    "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "scores", "weights", "rewards", "advantages",
    "returns",
)  # fmt: skip


class NonFiniteError(FloatingPointError):
    """A number is NaN or infinite; the message names it and its place."""


@dataclass(frozen=True, order=True)
class NonFinite:
    """A non-finite number on one process. Numbers are ordered by field: the smallest is closest to the cause."""

    depth: int
    process: int
    text: str


def find_earliest(found: NonFinite | None) -> NonFinite | None:
    """Return the non-finite number of any process that is closest to the cause. A collective call."""
    return min((other for other in gather_object([found]) if other is not None), default=None)


def find_bad_row(x: Tensor) -> int | None:
    """Return the first row of a (B,) or (B, …) tensor that is not finite; None if all are."""
    bad = ~x.isfinite()
    rows = bad if bad.dim() == 1 else bad.flatten(1).any(dim=1)
    return int(rows.nonzero()[0]) if rows.any() else None


def check_rollout(rollout: Rollout, name: str, process: int) -> None:
    """Raise if a rollout is not finite on some process. A collective call.

    Args:
        name: the rollout's name in the error.
    Raises:
        NonFiniteError: a number is not finite on some process; raised on every process.
    """
    tensors = rollout.tensors()
    mine = None
    for depth, cause in enumerate(CAUSES):
        if cause in tensors and (row := find_bad_row(tensors[cause])) is not None:
            mine = NonFinite(depth, process, f"{cause} is not finite in row {row} of {name} on process {process}")
            break
    if (found := find_earliest(mine)) is not None:
        raise NonFiniteError(found.text)
