"""Explain an out-of-memory error: the phase of training, and the settings that help."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALLER_BATCHES = "a smaller local_rollout_forward_batch_size, max_completion_length or max_prompt_length"

ADVICE = {
    "candidates": "a smaller local_rollout_forward_batch_size or max_prompt_length",
    "generation": SMALLER_BATCHES,
    "generation with vLLM": "a smaller max_completion_length; in vllm_engine_kwargs a smaller "
    "gpu_memory_utilization, or enable_sleep_mode, which frees the engine's memory between rollouts",
    "rewards": "a reward model in a smaller dtype, or a smaller max_completion_length or max_prompt_length",
    "passes": SMALLER_BATCHES,
    "update": "max_tokens_per_micro_batch; activation_checkpointing=True; or half of per_device_train_batch_size with "
    "twice gradient_accumulation_steps, which changes no gradient and fits the checkpoint",
    "evaluation": f"{SMALLER_BATCHES}; or, of reward models, a smaller per_device_eval_batch_size",
}

# Errors other than torch.OutOfMemoryError, from CUDA and its libraries (they allocate memory of their own), the CPU's
# allocator, and MPS.
ALLOCATOR = re.compile(
    r"(CUDA|HIP|cuDNN) error: (out of memory|\w+_STATUS_ALLOC_FAILED)"
    r"|(\[enforce fail at [^\]]*\].*)?DefaultCPUAllocator: |MPS backend out of memory"
)


class OutOfMemory(torch.OutOfMemoryError):
    """Memory ran out; the message gives the phase and the settings that help."""


@contextmanager
def explain_out_of_memory(phase: str) -> Iterator[None]:
    """Raise `OutOfMemory` if memory runs out inside the block.

    Args:
        phase: a key of `ADVICE`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"memory ran out during the phase {phase!r}. What helps: {ADVICE[phase]}.") from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a memory allocator of this process raised the error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) in (RuntimeError, torch.AcceleratorError) and ALLOCATOR.match(str(error)) is not None
