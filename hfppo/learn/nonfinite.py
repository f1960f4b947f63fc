"""Numbers that are not finite: found where they arise, kept for inspection, and kept out of the weights."""

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

from hfppo.checkpoint import save_rollout
from hfppo.collect.finite import Found, NonFiniteError, earliest
from hfppo.config import PPOConfig
from hfppo.metrics import Meter
from hfppo.rollout import Rollout
from hfppo.saving.folders import way_back

logger = logging.getLogger(__name__)

FOLDER = "_nonfinite"  # Trainer leaves what begins with "_" out of what it pushes
LEFT_OUT = "it was left out"
MAX_IN_A_ROW = 5  # rollouts and steps that "skip" lets go before it takes the run for broken


@dataclass(frozen=True)
class MicroBatch:
    """What is known of a micro-batch until its step is decided."""

    batch: Rollout
    loss: Tensor
    bad_rows: dict[str, Tensor]  # by term of the loss: (B,) bool


@dataclass
class NonFiniteGuard:
    """Lets only finite rollouts and steps through; `on_nonfinite` says what becomes of the others."""

    args: PPOConfig
    accelerator: Accelerator
    in_a_row: int = 0
    micro_batches: list[MicroBatch] = field(default_factory=list)

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed makes the steps."""
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def note(self, batch: Rollout, loss: Tensor, terms: dict[str, Tensor]) -> None:
        """Remember a micro-batch; nothing here makes the device wait.

        Args:
            loss: its share of the mini-batch's.
            terms: (B, T) losses per token that it is made of, by name.
        """
        bad = {name: (~x.detach().isfinite() & batch.loss_mask).any(dim=1) for name, x in terms.items()}
        self.micro_batches.append(MicroBatch(batch, loss.detach(), bad))

    def allows_step(
        self, norms: dict[str, Tensor], model: nn.Module, optimizer: AcceleratedOptimizer, step: int, meter: Meter
    ) -> bool:
        """Whether losses and gradients are finite on every process. A collective call.

        If they are not, the optimiser finds no gradient, and Trainer does not move the schedule; unless float16's
        scaler, which goes by the gradients alone, has seen finite ones. DeepSpeed decides on its step before this, and
        shows no gradients: what it did can only be told.

        Args:
            norms: of the gradients, which are the same on every process, by whose they are.
            step: its number, for errors.
        Raises:
            NonFiniteError: they are not, and `on_nonfinite` is "raise", or too many steps in a row were left out.
        """
        noted, self.micro_batches = self.micro_batches, []
        numbers = [micro.loss for micro in noted]
        scaled = self.accelerator.scaler is not None or (self.deepspeed and self.accelerator.mixed_precision == "fp16")
        if not scaled:  # float16 overflows now and then, and then its scaler leaves the step out
            numbers += norms.values()
        bad = torch.stack([~x.isfinite() for x in numbers]).any().float()
        skipped = float(self.accelerator.reduce(bad, "sum")) > 0
        if self.args.on_nonfinite == "skip":
            meter.add_number("nonfinite/step_frac", skipped)
        if not scaled:
            optimizer._is_overflow = skipped  # private, but what Trainer asks before it moves the schedule
        if not skipped:
            self.in_a_row = 0
            return True
        process = self.accelerator.process_index
        found = earliest(
            self.in_losses(noted, step)
            or in_gradients(model, process, step)
            or in_norms(norms, process, step, seen=not self.deepspeed)
        )
        overflowed = scaled and not all(norm.isfinite() for norm in norms.values())
        if not overflowed:  # else the scaler wants to see the gradients, and leaves the step out itself
            model.zero_grad()
        facts = {"losses": [str(float(micro.loss)) for micro in noted], **{k: str(float(v)) for k, v in norms.items()}}
        batches = {f"micro_batch_{i}": micro.batch for i, micro in enumerate(noted)}
        made = self.deepspeed and not optimizer.step_was_skipped
        fate = "DeepSpeed has made the step" if made else LEFT_OUT
        self.give_up(found.text, f"step-{step}", batches, facts, fate)
        return False

    def drop(self, error: NonFiniteError, number: int, meter: Meter) -> None:
        """Have a rollout left out.

        Raises:
            NonFiniteError: as in `allows_step`.
        """
        meter.add_number("nonfinite/rollout_frac", 1.0)
        self.give_up(str(error), f"rollout-{number}", {"rollout": error.rollout}, {})

    def in_losses(self, noted: list[MicroBatch], step: int) -> Found | None:
        """The first loss of this process that is not finite."""
        for i, micro in enumerate(noted):
            if not micro.loss.isfinite():
                rows = {name: int(bad.nonzero()[0]) for name, bad in micro.bad_rows.items() if bad.any()}
                what = next((f"{name} in row {row}" for name, row in rows.items()), "the loss")
                where = f"micro-batch {i} of step {step} on process {self.accelerator.process_index}"
                return Found(0, self.accelerator.process_index, f"{what} of {where} is not finite")
        return None

    def give_up(
        self, found: str, name: str, batches: dict[str, Rollout], facts: dict[str, Any], fate: str = LEFT_OUT
    ) -> None:
        """Write down what was found, and end the run unless it may go on without."""
        self.in_a_row += 1
        folder = Path(self.args.output_dir) / FOLDER / name
        message = f"{found}; {fate}, and what it was made from lies in {folder}"
        try:
            dump(folder / f"process_{self.accelerator.process_index}", found, batches, facts)
        except OSError as error:
            message = f"{found}; {fate}, and what it was made from could not be written: {error}"
        if self.args.on_nonfinite == "skip" and self.in_a_row <= MAX_IN_A_ROW:
            logger.warning(message)
            return
        reason = f" {MAX_IN_A_ROW} in a row were left out before." if self.in_a_row > MAX_IN_A_ROW else ""
        skip = "" if self.deepspeed else "; on_nonfinite='skip' goes on without such batches"
        raise NonFiniteError(
            f"{message}.{reason} A lower learning_rate or a higher precision may help{skip}. "
            f"{way_back(self.args.output_dir)}"
        )


def grad_norms(accelerator: Accelerator, parameters: dict[str, list[nn.Parameter]]) -> dict[str, Tensor]:
    """The norms of gradients by whose they are; DeepSpeed, which keeps them to itself, tells that of all together."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        norms = {"whole model": torch.tensor(float(accelerator.clip_grad_norm_([], 0.0)))}  # it clips nothing here
    else:
        norms = {name: grad_norm(of_one) for name, of_one in parameters.items() if of_one}
    return {name: norm.to(accelerator.device) for name, norm in norms.items()}  # that of no gradient is on the CPU


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of all their gradients together."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of all shards, where there are any


def in_gradients(model: nn.Module, process: int, step: int) -> Found | None:
    """The first gradient that is not finite, and how many are."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not bad:
        return None
    which = f"the gradient of {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
    return Found(1, process, f"{which} in step {step} is not finite")


def in_norms(norms: dict[str, Tensor], process: int, step: int, seen: bool) -> Found | None:
    """The first norm that is not finite; over gradients seen to be finite it is where their squares overflow."""
    reason = ": numbers above 1e19 have no square in float32" if seen else ""
    for name, norm in norms.items():
        if not norm.isfinite():
            what = f"the norm of the {name}'s gradient in step {step}"
            return Found(2, process, f"{what} is not finite{reason}")
    return None


def dump(folder: Path, found: str, batches: dict[str, Rollout], facts: dict[str, Any]) -> None:
    """Write batches as safetensors, and what was found as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in batches.items():
        save_rollout(folder / f"{name}.safetensors", batch)
    (folder / "found.json").write_text(json.dumps({"found": found, **facts}, indent=1))
