"""Guard each optimizer step: a loss or gradient that is not finite ends the run before the weights change."""

from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hfppo.collect.check_finite import NonFinite, NonFiniteError, find_earliest
from hfppo.rollout import Rollout


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
        bad = {name: (~x.detach().isfinite() & batch.loss_mask).any(dim=1) for name, x in terms.items()}
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
            place = find_in_losses(recorded) or find_in_gradients(model) or find_in_norms(norms)
            process = self.accelerator.process_index
            found = find_earliest(None if place is None else NonFinite(place[0], process, place[1]))
            assert found is not None, "the processes disagree"
            made = "DeepSpeed has made the step" if deepspeed else "the step was not made"
            raise NonFiniteError(
                f"in step {step}, on process {found.process}, {found.text} is not finite; {made}. Lower learning_rate "
                "or critic_learning_rate, scale the scores, or raise the precision"
            )


def find_in_losses(recorded: list[MicroBatch]) -> tuple[int, str] | None:
    """Return the first loss that is not finite, with its distance from the cause."""
    for micro in recorded:
        if not micro.loss.isfinite():
            rows = {name: int(bad.nonzero()[0]) for name, bad in micro.bad_rows.items() if bad.any()}
            term = next((f"{name} in row {row}" for name, row in rows.items()), "the loss")
            return 0, f"{term} of micro-batch {micro.number}"
    return None


def find_in_gradients(model: nn.Module) -> tuple[int, str] | None:
    """Return the first gradient that is not finite, and count the others."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return (1, f"the gradient of {bad[0]}{more}") if bad else None


def find_in_norms(norms: dict[str, Tensor]) -> tuple[int, str] | None:
    """Return the first norm that is not finite. Gradients may be finite: in float32 the square of 1e20 overflows."""
    names = (name for name, norm in norms.items() if not norm.isfinite())
    return next(((2, f"the norm of the {name}'s gradient") for name in names), None)
