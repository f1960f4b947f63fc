"""What each phase of a run needs: memory, seconds, and how busy it keeps the GPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hfppo import PPOTrainer
from hfppo.collect import collector

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class PhaseMeter:
    """Measures the second call of each phase: the first loads kernels, and finds memory that nothing has used yet."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def measured(self, name: str, function: Callable[..., Any], tokens: Callable[..., int]) -> Callable[..., Any]:
        """Return the function, measured under this name.

        Args:
            tokens: counts the tokens of a call, padding included, from its arguments.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.calls[name] != 2:
                return function(*args, **kwargs)
            on_gpu = torch.cuda.is_available()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            with profile(activities=[ProfilerActivity.CUDA]) if on_gpu else ExitStack() as profiler:
                result = function(*args, **kwargs)
                if on_gpu:
                    torch.cuda.synchronize()
            self.found[name] = {"seconds": time.perf_counter() - start, "tokens": tokens(*args, **kwargs)}
            if on_gpu:
                peak = torch.cuda.max_memory_allocated()
                self.found[name] |= {
                    "peak, GB": peak / 1e9,
                    "kB per token": (peak - before) / 1e3 / self.found[name]["tokens"],
                    **activity(profiler, self.found[name]["seconds"]),
                }
            return result

        return call


def activity(profiler: profile, seconds: float) -> dict[str, float]:
    """Return the kernels of a profile, the share of the seconds in which one runs, and the waits for the GPU."""
    events = profiler.events()
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    busy = sum(event.device_time_total for event in kernels) / 1e6
    return {
        "kernels": len(kernels),
        "busy share": busy / seconds,
        "waits": sum(event.name in WAITS for event in events),
    }


@contextmanager
def by_phase() -> Iterator[dict[str, dict[str, Any]]]:
    """Measure sampling, passes and update of the trainers in the block; yield the figures by phase."""
    meter = PhaseMeter()

    def sampled(collects, prompts, *args):
        return len(prompts) * (max(map(len, prompts)) + collects.args.max_completion_length)

    def passed(model, sequences, *args):
        return sequences.prompt_ids.numel() + sequences.completion_ids.numel()

    def trained(trainer, model, inputs, *args):
        return max(len(piece) * int(piece.lengths.max()) for piece in inputs["pieces"])

    with ExitStack() as stack:
        for owner, name, phase, tokens in (
            (collector.Collector, "ask_sampler", "sampling", sampled),
            (collector, "forward_passes", "passes", passed),
            (PPOTrainer, "training_step", "update", trained),
        ):
            stack.enter_context(patch.object(owner, name, meter.measured(phase, getattr(owner, name), tokens)))
        yield meter.found
