"""Find NaN and infinity: in a rollout, and in each optimizer step before it changes the weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from hfppo.rollout import Rollout

# Rollout tensors in the order in which they are computed: the first non-finite one is the cause.
CAUSES = (
    "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "scores", "weights", "rewards", "advantages",
    "returns",
)  # fmt: skip

Place = tuple[int, str]  # a non-finite number: its distance from the cause, and its name


class NonFiniteError(FloatingPointError):
    """A number is NaN or infinite; the message names it and its place."""


def find_earliest(place: Place | None) -> tuple[int, int, str] | None:
    """Return the non-finite number of any process that is closest to the cause: distance, process and name.

    A collective call.
    """
    each = enumerate(gather_object([place]))
    return min(((one[0], process, one[1]) for process, one in each if one is not None), default=None)


def check_rollout(rollout: Rollout, name: str) -> None:
    """Raise if a rollout is not finite on some process. A collective call.

    Args:
        name: the rollout's name in the error.
    Raises:
        NonFiniteError: a number is not finite on some process; raised on every process.
    """
    tensors, place = rollout.tensors(), None
    for depth, cause in enumerate(CAUSES):
        if cause in tensors and not (finite := tensors[cause].isfinite()).all():
            place = depth, f"{cause} is not finite in row {int((~finite).nonzero()[0, 0])} of {name}"
            break
    if (found := find_earliest(place)) is not None:
        raise NonFiniteError(f"{found[2]} on process {found[1]}")


@dataclass(frozen=True)
class MicroBatch:
    """The loss of a micro-batch, or its critic's loss, before the optimizer step."""

    number: int  # of the micro-batch in its step, from 0
    loss: Tensor
    bad_rows: dict[str, Tensor]  # (B,) bool by term of the loss


@dataclass
class NonFiniteGuard:
    """Records micro-batch losses, then checks losses and gradients before the optimizer step."""

    accelerator: Accelerator
    micro_batches: list[MicroBatch] = field(default_factory=list)

    def record(self, batch: Rollout, loss: Tensor, terms: dict[str, Tensor]) -> None:
        """Record a micro-batch, without making the device wait.

        Args:
            loss: the micro-batch's share of the mini-batch's loss.
            terms: (B, T) losses per token, by name.
        """
        bad = {name: (~x.detach().isfinite() & batch.fitted).any(dim=1) for name, x in terms.items()}
        number = sum(before.bad_rows.keys() == bad.keys() for before in self.micro_batches)  # actor and critic apart
        self.micro_batches.append(MicroBatch(number, loss.detach(), bad))

    def check(self, norms: dict[str, Tensor], model: nn.Module, step: int) -> None:
        """Raise if a loss or gradient is not finite on some process. A collective call, before the optimizer's step.

        float16 overflows now and then: its scaler then drops the step, so only the losses count. DeepSpeed has made
        its step before this call, and shows no gradients.

        Args:
            norms: gradient norms by owner, equal on every process.
            step: number of the step, for errors; 0 in critic pretraining.
        Raises:
            NonFiniteError: a loss or gradient is not finite on some process; raised on every process.
        """
        recorded, self.micro_batches = self.micro_batches, []
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        numbers = [micro.loss for micro in recorded]
        if self.accelerator.scaler is None and not (deepspeed and self.accelerator.mixed_precision == "fp16"):
            numbers += norms.values()
        bad = torch.stack([~x.isfinite() for x in numbers]).any().float()
        finite = float(self.accelerator.reduce(bad, "sum")) == 0
        if not finite:
            found = find_earliest(next(find_places(recorded, model, norms), None))
            assert found is not None, "the processes disagree"
            made = "DeepSpeed has made the step" if deepspeed else "the step was not made"
            raise NonFiniteError(
                f"in step {step}, on process {found[1]}, {found[2]} is not finite; {made}. Lower learning_rate "
                "or critic_learning_rate, scale the scores, or raise the precision"
            )


def find_places(recorded: list[MicroBatch], model: nn.Module, norms: dict[str, Tensor]) -> Iterator[Place]:
    """Yield what is not finite: losses, then gradients, then norms."""
    for micro in recorded:
        if not micro.loss.isfinite():
            rows = {name: int(bad.nonzero()[0]) for name, bad in micro.bad_rows.items() if bad.any()}
            term = next((f"{name} in row {row}" for name, row in rows.items()), "the loss")
            yield 0, f"{term} of micro-batch {micro.number}"
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        yield 1, f"the gradient of {bad[0]}{more}"
    for name, norm in norms.items():
        if not norm.isfinite():  # also over finite gradients: in float32 the square of 1e20 overflows
            yield 2, f"the norm of the {name}'s gradient"
