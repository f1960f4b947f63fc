"""Runs the cases of the kit's section `first_rollout`."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_memory
import torch
from cases import Case
from phases import by_phase
from ppo_hfppo import build, end_with
from ppo_workload import Workload, distinct_characters, load

from helpers.flash import flash_attention
from helpers.runs import digest, frozen_tensors
from hfppo import PPOCallback, PPOTrainer
from hfppo.config import CHECKPOINTING
from hfppo.models.layout import can_pack
from hfppo.support.out_of_memory import OutOfMemory

MISMATCH = 0.1  # nats in the mean, from where docs/metrics.md calls sampler and training model two policies


def run_case(case: Case, workload: Workload, folder: Path) -> dict[str, Any]:
    """Train, and return the first step's metrics and what the kind of case adds."""
    own = replace(workload, dtype="float32" if case.dtype == "float32" else "bfloat16")
    trainer = make_trainer(case, own, folder)
    if case.kind == "out of memory":
        return run_out(trainer)
    before, used = digest(frozen_tensors(trainer.model)), []
    if case.kind == "leaks":
        trainer.add_callback(MemoryCallback(used))
    with by_phase() if case.kind == "phases" else nullcontext({}) as phases:
        trainer.train()
    first = trainer.state.log_history[0]
    found = {
        "first ratio − 1, largest": first["policy/first_ratio_deviation"],
        "KL to the reference, nats": first["kl"],
        "old log-probs − sampler's, mean, nats": first["mismatch/mean"],
        "largest, nats": first["mismatch/max"],
        "packed": "yes" if can_pack(trainer.model.causal_lm) else "no",
        "base": "unchanged" if digest(frozen_tensors(trainer.model)) == before else "CHANGED",
        "mean length": first["completions/mean_length"],
    }
    if case.kind == "phases":
        for name, kilobytes in on_paper(trainer, own).items():
            phases[name]["estimate, kB per token"] = kilobytes
        found |= {"phases": phases, "bf16": trainer.args.bf16, **trainer.evaluate(trainer.train_dataset)}
    if case.kind == "leaks":
        found["growth after the second rollout, MB"] = (used[-1] - used[1]) / 1e6
    if first["mismatch/mean"] > MISMATCH:
        raise AssertionError(f"sampler and training model differ by {first['mismatch/mean']} nats in the mean")
    return found


def on_paper(trainer: PPOTrainer, workload: Workload) -> dict[str, float]:
    """Return the estimate of `docs/gpu_memory.py` for each phase, in kB per token."""
    setup = gpu_memory.Setup(
        max_prompt_length=workload.longest_prompt,
        max_completion_length=workload.new_tokens,
        per_device_train_batch_size=workload.micro_batch,
        local_rollout_forward_batch_size=workload.prompts,
        activation_checkpointing=any(getattr(trainer.args, name) for name in CHECKPOINTING),
        bf16=trainer.args.bf16,
        dtype=workload.dtype,
        lora_r=workload.rank,
    )
    found = gpu_memory.estimate(trainer.model.causal_lm.config, setup).phases
    found["passes"] = max(found.pop("reference"), found.pop("old log-probs and values"))
    rows = dict.fromkeys(found, workload.prompts) | {"update": setup.rows_of_update}
    return {name: size / (rows[name] * setup.width) / 1e3 for name, size in found.items()}


def make_trainer(case: Case, workload: Workload, folder: Path) -> PPOTrainer:
    """Return the trainer of a case."""
    attention = "sdpa" if case.attention == "sdpa" else flash_attention()
    options = {"attn_implementation": attention} | ({} if case.dtype == "nf4" else {"dtype": workload.dtype})
    model = load(workload, folder, "policy", case.dtype == "nf4", **options)
    fields = {"logging_steps": 1, "learning_rate": 1e-3, **case.fields}
    trainer = build(workload, folder, fields, model, distinct_characters, rollouts=case.rollouts)
    if case.kind == "ragged":
        end_with(trainer, list(range(1, workload.vocab_size, max(2, workload.new_tokens // 2))))
    return trainer


class MemoryCallback(PPOCallback):
    """Notes the bytes in use on the GPU after each rollout."""

    def __init__(self, used: list[int]):
        self.used = used

    def on_rollout_end(self, args, state, control, **kwargs):
        self.used.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)


def run_out(trainer: PPOTrainer) -> dict[str, Any]:
    """Train with too little memory, and return the error's text.

    Raises:
        AssertionError: the run did not end with advice.
    """
    place = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2e8) / place)
    try:
        trainer.train()
    except OutOfMemory as error:
        return {"message": str(error)}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    raise AssertionError("a run with 0.2 GB beside its weights did not run out of memory")
