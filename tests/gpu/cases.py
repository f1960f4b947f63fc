"""The cases of the kit's section `first_rollout`; `first_rollouts` runs them."""

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers.flash import flash_attention

# The user's defaults: what `common_config` and the workloads set otherwise.
DEFAULTS = {"bf16": None, "gradient_checkpointing": None, "local_rollout_forward_batch_size": None}


@dataclass(frozen=True)
class Case:
    """A run of one rollout or more.

    Args:
        kind: what is done besides training, see `run_case`.
        rollouts: to train on.
        needs: packages, "CUDA", or "flash attention".
    """

    dtype: str = "bfloat16"
    attention: str = "sdpa"
    fields: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    rollouts: int = 1
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return what is needed and not here, or None."""
        if self.attention != "sdpa" and flash_attention() is None:
            return "CUDA and flash attention"
        for name in self.needs:
            if not torch.cuda.is_available() if name == "CUDA" else importlib.util.find_spec(name) is None:
                return name
        return None


CASES = {
    "defaults": Case(fields=DEFAULTS, kind="phases", rollouts=2),
    "critic_layers": Case(fields={"critic_layers": 1}),
    "completions that end": Case(kind="ragged"),
    "8 rollouts": Case(kind="leaks", rollouts=8),
    "shared prompts": Case(fields={"advantage_estimator": "grpo", "num_generations": 2}),
    "fp16": Case("float32", fields={"fp16": True}, needs=("CUDA",)),
    "out of memory": Case(fields={"local_rollout_forward_batch_size": 32}, kind="out of memory", needs=("CUDA",)),
    "float32, sdpa": Case("float32"),
    "bfloat16, flash attention": Case(attention="flash"),
    "nf4, sdpa": Case("nf4", needs=("bitsandbytes",)),
    "nf4, flash attention": Case("nf4", attention="flash", needs=("bitsandbytes",)),
    "compiled": Case(fields={"torch_compile": True}, needs=("CUDA",)),
}
