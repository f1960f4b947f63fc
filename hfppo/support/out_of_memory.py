"""Explain an out-of-memory error: the phase of training, the peak, and the settings that help."""

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALLER_BATCHES = ("local_rollout_forward_batch_size", "max_completion_length", "max_prompt_length")

# The settings that help most, by phase.
SETTINGS = {
    "sampling": SMALLER_BATCHES,
    "sampling with vLLM": ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "max_completion_length"),
    "the reward functions": ("max_completion_length", "max_prompt_length"),
    "the passes without gradient": SMALLER_BATCHES,
    "the update": (
        "max_tokens_per_micro_batch",
        "activation_checkpointing",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    ),
    "an evaluation": ("per_device_eval_batch_size", "max_completion_length", "max_prompt_length"),
}
# "lower it" for the others.
ADVICE = {
    "max_tokens_per_micro_batch": "set it, or lower it",
    "per_device_train_batch_size": "halve it",
    "gradient_accumulation_steps": "and double it, which changes no gradient, and the checkpoint still fits",
    "activation_checkpointing": "True computes activations again",
    "vllm_enable_sleep_mode": "True frees the engine's memory meanwhile",
}

# Allocators that raise a RuntimeError; those of CUDA and XPU raise torch.OutOfMemoryError.
ALLOCATOR = re.compile(r"(\[enforce fail at [^\]]*\].*)?DefaultCPUAllocator: |MPS backend out of memory")


class OutOfMemory(torch.OutOfMemoryError):
    """Memory ran out; the message gives the phase, the peak and the settings that help."""


@contextmanager
def explain_out_of_memory(phase: str, args: Any) -> Iterator[None]:
    """Raise `OutOfMemory` if memory runs out inside the block.

    Args:
        phase: a key of `SETTINGS`.
        args: the configuration; the message gives its values of the settings.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        values = {name: getattr(args, name) for name in SETTINGS[phase] if hasattr(args, name)}  # 5.19 lacks one
        advice = [
            f"{name}={value!r} ({ADVICE.get(name, 'lower it')})"
            for name, value in values.items()
            if value is not True  # a switch that saves memory already
        ]
        raise OutOfMemory(
            f"memory ran out during {phase}, at a peak of {peak(args)}. What helps: {', '.join(advice)}."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a memory allocator of this process raised the error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and ALLOCATOR.match(str(error)) is not None


def peak(args: Any) -> str:
    """Return the peak memory of tensors on the GPU as text, or of the process without a GPU."""
    if torch.cuda.is_available() and not args.use_cpu:
        total = torch.cuda.mem_get_info()[1]
        return f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of {total / 2**30:.2f} GiB"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB"
