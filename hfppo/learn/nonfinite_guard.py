"""Guard each optimizer step: non-finite losses and gradients are reported, saved for inspection, and never applied."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hfppo.collect.check_finite import NonFinite, NonFiniteError, find_earliest
from hfppo.config import PPOConfig
from hfppo.metrics import Meter
from hfppo.ppo_checkpoint import save_rollout
from hfppo.rollout import Rollout

logger = logging.getLogger(__name__)

FOLDER = "_nonfinite"  # Trainer pushes no folder whose name begins with "_"
LEFT_OUT = "it was left out"
MAX_IN_A_ROW = 5  # rollouts and steps that "skip" drops in a row before the run ends all the same


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch whose step is not decided yet."""

    batch: Rollout
    loss: Tensor
    bad_rows: dict[str, Tensor]  # by term of the loss: (B,) bool


@dataclass
class NonFiniteGuard:
    """Lets only finite rollouts and steps through; `on_nonfinite` decides about the others."""

    args: PPOConfig
    accelerator: Accelerator
    in_a_row: int = 0
    micro_batches: list[MicroBatch] = field(default_factory=list)

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed makes the steps."""
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def record(self, batch: Rollout, loss: Tensor, terms: dict[str, Tensor]) -> None:
        """Record a micro-batch, without making the device wait.

        Args:
            loss: the micro-batch's share of the mini-batch's loss.
            terms: (B, T) losses per token, by name.
        """
        bad = {name: (~x.detach().isfinite() & batch.loss_mask).any(dim=1) for name, x in terms.items()}
        self.micro_batches.append(MicroBatch(batch, loss.detach(), bad))

    def allows_step(
        self, norms: dict[str, Tensor], model: nn.Module, optimizer: AcceleratedOptimizer, step: int, meter: Meter
    ) -> bool:
        """Return whether losses and gradients are finite on every process. A collective call.

        If not, the gradients are removed, so the optimizer changes nothing and Trainer does not move the schedule.
        float16's scaler decides by the gradients alone, and moves the schedule if only a loss was not finite.
        DeepSpeed decides before this call and shows no gradients: its decision can only be reported.

        Args:
            norms: gradient norms by owner, equal on every process.
            step: number of the step, for errors.
        Raises:
            NonFiniteError: something is not finite, and `on_nonfinite` is "raise" or too many steps in a row were
                dropped.
        """
        recorded, self.micro_batches = self.micro_batches, []
        numbers = [micro.loss for micro in recorded]
        scaled = self.accelerator.scaler is not None or (self.deepspeed and self.accelerator.mixed_precision == "fp16")
        if not scaled:  # float16 overflows now and then, and its scaler then drops the step
            numbers += norms.values()
        bad = torch.stack([~x.isfinite() for x in numbers]).any().float()
        skipped = float(self.accelerator.reduce(bad, "sum")) > 0
        if self.args.on_nonfinite == "skip":
            meter.add_number("nonfinite/step_frac", skipped)
        if not scaled:
            optimizer._is_overflow = skipped  # private; Trainer reads it before it moves the schedule
        if not skipped:
            self.in_a_row = 0
            return True
        process = self.accelerator.process_index
        found = find_earliest(
            self.find_in_losses(recorded, step)
            or find_in_gradients(model, process, step)
            or find_in_norms(norms, process, step, seen=not self.deepspeed)
        )
        assert found is not None, "the processes disagree"
        overflowed = scaled and not all(norm.isfinite() for norm in norms.values())
        if not overflowed:  # the scaler must see an overflow, and drops the step itself
            model.zero_grad()
        losses = [str(float(micro.loss)) for micro in recorded]
        facts = {"losses": losses, **{name: str(float(norm)) for name, norm in norms.items()}}
        batches = {f"micro_batch_{i}": micro.batch for i, micro in enumerate(recorded)}
        made = self.deepspeed and not optimizer.step_was_skipped
        self.report(found.text, f"step-{step}", batches, facts, "DeepSpeed has made the step" if made else LEFT_OUT)
        return False

    def drop(self, error: NonFiniteError, number: int, meter: Meter) -> None:
        """Drop a rollout.

        Raises:
            NonFiniteError: as in `allows_step`.
        """
        assert error.rollout is not None
        meter.add_number("nonfinite/rollout_frac", 1.0)
        self.report(str(error), f"rollout-{number}", {"rollout": error.rollout}, {})

    def find_in_losses(self, recorded: list[MicroBatch], step: int) -> NonFinite | None:
        """Return this process's first loss that is not finite."""
        for i, micro in enumerate(recorded):
            if not micro.loss.isfinite():
                rows = {name: int(bad.nonzero()[0]) for name, bad in micro.bad_rows.items() if bad.any()}
                term = next((f"{name} in row {row}" for name, row in rows.items()), "the loss")
                where = f"micro-batch {i} of step {step} on process {self.accelerator.process_index}"
                return NonFinite(0, self.accelerator.process_index, f"{term} of {where} is not finite")
        return None

    def report(
        self, found: str, name: str, batches: dict[str, Rollout], facts: dict[str, Any], fate: str = LEFT_OUT
    ) -> None:
        """Save the batches for inspection, and end the run unless `on_nonfinite` lets it continue."""
        self.in_a_row += 1
        folder = Path(str(self.args.output_dir)) / FOLDER / name
        message = f"{found}; {fate}, and its data were saved in {folder}"
        try:
            dump(folder / f"process_{self.accelerator.process_index}", found, batches, facts)
        except OSError as error:
            message = f"{found}; {fate}, and its data could not be saved: {error}"
        if self.args.on_nonfinite == "skip" and self.in_a_row <= MAX_IN_A_ROW:
            logger.warning(message)
            return
        reason = f" {MAX_IN_A_ROW} in a row were left out before." if self.in_a_row > MAX_IN_A_ROW else ""
        skip = "" if self.deepspeed else "; on_nonfinite='skip' continues without such batches"
        raise NonFiniteError(f"{message}.{reason} Lower learning_rate or raise the precision{skip}.")


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


def dump(folder: Path, found: str, batches: dict[str, Rollout], facts: dict[str, Any]) -> None:
    """Write batches as safetensors, and the finding as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in batches.items():
        save_rollout(folder / f"{name}.safetensors", batch)
    (folder / "found.json").write_text(json.dumps({"found": found, **facts}, indent=1))
