"""Guard each optimizer step: a loss or gradient that is not finite ends the run before the weights change."""

from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hfppo.collect.check_finite import NonFinite, NonFiniteError, find_earliest
from hfppo.rollout import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """The loss of a micro-batch whose step is not made yet."""

    loss: Tensor
    bad_rows: dict[str, Tensor]  # by term of the loss: (B,) bool


@dataclass
class NonFiniteGuard:
    """Lets only finite steps through."""

    accelerator: Accelerator
    remedy: str = "Lower learning_rate or raise the precision."  # ends the error
    micro_batches: list[MicroBatch] = field(default_factory=list)

    def record(self, batch: Rollout, loss: Tensor, terms: dict[str, Tensor]) -> None:
        """Record a micro-batch, without making the device wait.

        Args:
            loss: the micro-batch's share of the mini-batch's loss.
            terms: (B, T) losses per token, by name.
        """
        bad = {name: (~x.detach().isfinite() & batch.loss_mask).any(dim=1) for name, x in terms.items()}
        self.micro_batches.append(MicroBatch(loss.detach(), bad))

    def check(self, norms: dict[str, Tensor], model: nn.Module, step: int) -> None:
        """Raise if a loss or gradient is not finite on some process. A collective call, before the optimizer's step.

        float16 overflows now and then: its scaler then drops the step, so only the losses count. DeepSpeed has made
        its step before this call, and shows no gradients.

        Args:
            norms: gradient norms by owner, equal on every process.
            step: number of the step, for errors.
        Raises:
            NonFiniteError: on every process; names the first term, row or parameter.
        """
        recorded, self.micro_batches = self.micro_batches, []
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        numbers = [micro.loss for micro in recorded]
        if self.accelerator.scaler is None and not (deepspeed and self.accelerator.mixed_precision == "fp16"):
            numbers += norms.values()
        bad = torch.stack([~x.isfinite() for x in numbers]).any().float()
        if not float(self.accelerator.reduce(bad, "sum")):
            return
        process = self.accelerator.process_index
        found = find_earliest(
            find_in_losses(recorded, process, step)
            or find_in_gradients(model, process, step)
            or find_in_norms(norms, process, step, seen=not deepspeed)
        )
        assert found is not None, "the processes disagree"
        made = "DeepSpeed has made the step" if deepspeed else "the step was not made"
        raise NonFiniteError(f"{found.text}; {made}. {self.remedy}")


def measure_grad_norms(accelerator: Accelerator, parameters: dict[str, list[nn.Parameter]]) -> dict[str, Tensor]:
    """Return the gradient norm per owner (actor, critic) with gradients; DeepSpeed reports the joint norm only."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        norms = {
            "whole model": torch.tensor(float(accelerator.clip_grad_norm_([], 0.0)), dtype=torch.float32)
        }  # it clips nothing here
    else:
        some = {name: owned for name, owned in parameters.items() if owned}
        moved = {name: owned for name, owned in some.items() if any(p.grad is not None for p in owned)}
        norms = {name: measure_grad_norm(owned) for name, owned in (moved or some).items()}
    return {name: norm.to(accelerator.device) for name, norm in norms.items()}  # without gradients it is on the CPU


def measure_grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the joint norm of all their gradients."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # over all shards


def find_in_losses(recorded: list[MicroBatch], process: int, step: int) -> NonFinite | None:
    """Return this process's first loss that is not finite."""
    for i, micro in enumerate(recorded):
        if not micro.loss.isfinite():
            rows = {name: int(bad.nonzero()[0]) for name, bad in micro.bad_rows.items() if bad.any()}
            term = next((f"{name} in row {row}" for name, row in rows.items()), "the loss")
            return NonFinite(
                0, process, f"{term} of micro-batch {i} of step {step} on process {process} is not finite"
            )
    return None


def find_in_gradients(model: nn.Module, process: int, step: int) -> NonFinite | None:
    """Return the first gradient that is not finite, and count the others."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not bad:
        return None
    which = f"the gradient of {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
    return NonFinite(1, process, f"{which} in step {step} is not finite")


def find_in_norms(norms: dict[str, Tensor], process: int, step: int, seen: bool) -> NonFinite | None:
    """Return the first norm that is not finite.

    Args:
        seen: whether the gradients were seen to be finite, so that only their squares can have overflowed.
    """
    reason = ": numbers above 1e19 have no square in float32" if seen else ""
    for name, norm in norms.items():
        if not norm.isfinite():
            text = f"the norm of the {name}'s gradient in step {step} is not finite{reason}"
            return NonFinite(2, process, text)
    return None
