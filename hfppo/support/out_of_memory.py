"""What to do when memory runs out."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hfppo.config import PPOConfig
from hfppo.saving.folders import way_back

SMALLER_BATCHES = ("local_rollout_forward_batch_size", "max_completion_length", "max_prompt_length")

# What helps most, by what was being done.
WAYS_OUT = {
    "sampling": SMALLER_BATCHES,
    "sampling with vLLM": ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "max_completion_length"),
    "the reward functions": ("reward_model_init_kwargs", "max_completion_length", "max_prompt_length"),
    "the passes without gradient": SMALLER_BATCHES,
    "the update": (
        "max_tokens_per_micro_batch",
        "activation_checkpointing",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    ),
    "an evaluation": ("per_device_eval_batch_size", "max_completion_length", "max_prompt_length"),
}
# Switches, with the value that saves memory: where they have it there is nothing to advise.
FRUGAL = {"activation_checkpointing": True, "vllm_enable_sleep_mode": True}
ADVICE = {
    "max_tokens_per_micro_batch": "set it, or lower it",
    "per_device_train_batch_size": "halve it",
    "gradient_accumulation_steps": "and double it, which changes no gradient, and the checkpoint still fits",
    "activation_checkpointing": "True computes activations again",
    "reward_model_init_kwargs": "give a smaller dtype",
    "vllm_enable_sleep_mode": "True frees the engine's memory meanwhile",
}


class OutOfMemory(torch.OutOfMemoryError):
    """Memory ran out; the message says during what, how much was in use, and which settings help."""


@contextmanager
def explained_memory(phase: str, args: PPOConfig) -> Iterator[None]:
    """Say what helps if memory runs out inside.

    Args:
        phase: a key of `WAYS_OUT`.
    Raises:
        OutOfMemory: it ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        known = {name: getattr(args, name) for name in WAYS_OUT[phase] if hasattr(args, name)}  # 5.19 lacks one
        settings = [
            f"{name}={value!r} ({ADVICE.get(name, 'lower it')})"
            for name, value in known.items()
            if name not in FRUGAL or value != FRUGAL[name]
        ]
        raise OutOfMemory(
            f"memory ran out during {phase}, at a peak of {peak(args)}. What helps: {', '.join(settings)}. "
            f"{way_back(args.output_dir)}"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator gave up; the CPU's and those of some devices have no type of error of their own."""
    said = ("DefaultCPUAllocator", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in said)


def peak(args: PPOConfig) -> str:
    """The most memory that tensors took on the GPU, or the process where it uses none."""
    if torch.cuda.is_available() and not args.use_cpu:
        total = torch.cuda.mem_get_info()[1]
        return f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of {total / 2**30:.2f} GiB"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB"
