"""Peak memory of a run by phase, from a model's configuration: no weights, no GPU.

    python -m hfppo.memory --model Qwen/Qwen2.5-1.5B --card 24

The package's own `ActorCritic` runs a pass and an update on tensors without data (torch's FakeTensorMode), and a
tracker adds up the bytes of all storages that live at once. Left out: CUDA's context, about 0.5 GB, and what the
allocator loses to fragments.
"""

import argparse
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hfppo.models import output_head
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import find_critic

NF4_BYTES = 0.5 + 1 / 64 + 4 / 64 / 256  # per weight: four bits, and doubly quantized constants of blocks of 64
USABLE = 0.9  # of a card; CUDA's context and fragments take the rest


class LiveStorages(TorchDispatchMode):
    """Adds up the bytes of the storages of fake tensors that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self.add(tensor)
        return out

    def peak_of(self, run: Callable[[], object]) -> int:
        """Return the most bytes that live during a call, on top of those before it."""
        before = self.peak = self.now
        with self:
            run()
        return self.peak - before


@dataclass(frozen=True)
class Workload:
    """Sizes of a run on one device."""

    prompt: int = 512  # tokens
    completion: int = 512  # tokens
    rows: int = 8  # of a micro-batch of the update
    passes: int = 64  # rows sampled, or passed without gradient, at once
    checkpointing: bool = False
    dtype: str = "bfloat16"  # of the base; "nf4" and "float32" too
    critic: str | None = "adapter"
    critic_layers: int | None = None
    rank: int = 16


@dataclass(frozen=True)
class Peaks:
    """Bytes by phase on top of `weights`, and tokens that each phase passes at once."""

    weights: int  # of the base and the adapters, and AdamW's moments
    phases: dict[str, int]
    tokens: dict[str, int]

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return self.weights + max(self.phases.values())

    def scaled(self, load: Workload) -> "Peaks":
        """Return the peaks with other numbers of rows."""
        width = load.prompt + load.completion
        tokens = {name: width * (load.rows if name == "update" else load.passes) for name in self.tokens}
        phases = {name: size * tokens[name] // self.tokens[name] for name, size in self.phases.items()}
        return Peaks(self.weights, phases, tokens)


def estimate(config: PreTrainedConfig, load: Workload) -> Peaks:
    """Return the peaks of sampling, of the passes without gradient and of an update.

    Args:
        config: of the base.
    """
    model = without_data(make_model(config, load))
    live = LiveStorages()
    for tensor in (*model.parameters(), *model.buffers()):
        live.add(tensor)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    extra, saved = four_bits(model) if load.dtype == "nf4" else (0, 0)
    weights = live.now - saved + 8 * trained
    width = load.prompt + load.completion
    phases = {}
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=load.dtype != "float32")
    with chunks_of_a_gpu(), autocast, torch.no_grad():
        phases["sampling"] = sampling(model, live, load)
        batch = inputs(load, load.passes)

        def reference() -> None:
            with model.reference():
                model(**batch, values=False)

        phases["reference"] = live.peak_of(reference)
        phases["old log-probs and values"] = live.peak_of(lambda: model(**batch))
        with torch.enable_grad():
            phases["update"] = update(model.train(), live, inputs(load, load.rows))
    tokens = {name: (load.rows if name == "update" else load.passes) * width for name in phases}
    return Peaks(weights, {name: size + extra for name, size in phases.items()}, tokens)


def make_model(config: PreTrainedConfig, load: Workload) -> ActorCritic:
    """Return actor, reference and critic on the "meta" device."""
    dtype = torch.float32 if load.dtype == "float32" else torch.bfloat16
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        adapter = LoraConfig(r=load.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        source = (
            None
            if load.critic is None
            else find_critic(load.critic).with_layers(load.critic_layers, load.critic, base)
        )
        model = ActorCritic(base, adapter, source)
    if load.checkpointing:
        model.activation_checkpointing_enable()
    return model.eval()


def without_data(model: ActorCritic) -> ActorCritic:
    """Put tensors of a CPU without data in the place of those of the "meta" device; shared ones stay shared.

    Numbers that decide what is computed, such as masks, stay real: operations on them alone are run.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    made[tensor] = nn.Parameter(fake, tensor.requires_grad) if name in module._parameters else fake
                tensors[name] = made[tensor]
    return model


def four_bits(model: ActorCritic) -> tuple[int, int]:
    """Return the bytes of the largest layer that NF4 unpacks, and what it saves of the weights in bfloat16."""
    head = model.get_output_embeddings()
    frozen = {m.weight: m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    packed = [size for weight, size in frozen.items() if not weight.requires_grad]
    return 2 * max(packed), int(sum(packed) * (2 - NF4_BYTES))


def inputs(load: Workload, rows: int) -> dict[str, Any]:
    """Return rows without padding."""
    width = load.prompt + load.completion
    return {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "attention_mask": torch.ones(rows, width, dtype=torch.int64),
        "completion_mask": torch.ones(rows, load.completion, dtype=torch.bool),
    }


def sampling(model: ActorCritic, live: LiveStorages, load: Workload) -> int:
    """Return the peak of reading the prompts, or that of all key-values with a second copy of one layer's.

    `DynamicCache` copies a layer's key-values to append those of a token.
    """
    ids = torch.zeros(load.passes, load.prompt, dtype=torch.int64)
    before, kept = live.now, []
    reading = live.peak_of(lambda: kept.append(model.causal_lm(ids, use_cache=True, logits_to_keep=1).past_key_values))
    whole = (live.now - before) * (load.prompt + load.completion) // load.prompt
    return max(reading, whole + whole // model.config.get_text_config().num_hidden_layers)


def update(model: ActorCritic, live: LiveStorages, batch: dict[str, Any]) -> int:
    """Return the peak of forward and backward, gradients included."""

    def step() -> None:
        out = model(**batch, entropy="constant")
        loss = out.logprobs.sum()
        (loss if out.values is None else loss + out.values.sum()).backward()

    return live.peak_of(step)


@contextmanager
def chunks_of_a_gpu() -> Iterator[None]:
    """Compute the output head in the chunks of a GPU inside the block, though the tensors are a CPU's."""
    before = output_head.tokens_at_once
    output_head.tokens_at_once = lambda vocab_size, device: before(vocab_size, torch.device("cuda"))
    try:
        yield
    finally:
        output_head.tokens_at_once = before


def fitting(config: PreTrainedConfig, load: Workload, card: float) -> tuple[Workload, Peaks] | None:
    """Return the first workload that fits a card, with the fewest settings changed; None if none does.

    The settings change in this order: activation checkpointing, rows at once without gradient, rows of a micro-batch,
    a base in four bits. A phase's peak is proportional to its rows.

    Args:
        card: GB.
    """
    for dtype in dict.fromkeys((load.dtype, "nf4")):
        for checkpointing in dict.fromkeys((load.checkpointing, True)):
            peaks = estimate(config, tried := replace(load, dtype=dtype, checkpointing=checkpointing))
            while True:
                if peaks.peak <= USABLE * card * 1e9:
                    return tried, peaks
                if max(peaks.phases, key=peaks.phases.__getitem__) != "update" and tried.passes > 1:
                    tried = replace(tried, passes=tried.passes // 2)
                elif (checkpointing or dtype == "nf4") and tried.rows > 1:
                    tried = replace(tried, rows=tried.rows // 2)
                else:
                    break
                peaks = peaks.scaled(tried)
    return None


def report(peaks: Peaks) -> str:
    """Return a Markdown table of the phases."""
    lines = ["| phase | tokens at once | GB | kB per token |", "|---|---|---|---|"]
    lines.append(f"| weights and AdamW's moments | | {peaks.weights / 1e9:.1f} | |")
    for name, size in peaks.phases.items():
        tokens = peaks.tokens[name]
        lines.append(f"| {name} | {tokens} | {size / 1e9:.1f} | {size / tokens / 1e3:.0f} |")
    return "\n".join([*lines, f"| **peak** | | {peaks.peak / 1e9:.1f} | |"])


def describe(load: Workload, asked: Workload) -> str:
    """Return the settings in which two workloads differ, as PPOConfig and `from_pretrained` call them."""
    width = load.prompt + load.completion
    settings = {
        "activation_checkpointing=True": load.checkpointing != asked.checkpointing,
        f"local_rollout_forward_batch_size={load.passes}": load.passes != asked.passes,
        f"max_tokens_per_micro_batch={load.rows * width}": load.rows != asked.rows,
        "a base in NF4 (quantization_config)": load.dtype != asked.dtype,
    }
    return ", ".join(name for name, changed in settings.items() if changed)


def main() -> None:
    """Print the peaks of a model, and what makes it fit a card."""
    parser = argparse.ArgumentParser(
        prog="python -m hfppo.memory", description="Estimate the memory of a run from a model's configuration."
    )
    parser.add_argument("--model", required=True, help="id or path; only its config.json is read")
    parser.add_argument("--card", type=float, help="memory of the GPU, GB: says what makes the run fit")
    defaults = Workload()
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "nf4"], default=defaults.dtype, help="of the base")
    parser.add_argument("--critic", choices=["adapter", "shared", "none"], default=defaults.critic)
    parser.add_argument("--critic_layers", type=int, help="layers that the adapter critic adapts")
    parser.add_argument("--rank", type=int, default=defaults.rank, help="of LoRA on all linear layers")
    parser.add_argument("--prompt", type=int, default=defaults.prompt, help="tokens")
    parser.add_argument("--completion", type=int, default=defaults.completion, help="tokens")
    parser.add_argument("--rows", type=int, default=defaults.rows, help="of a micro-batch of the update")
    parser.add_argument("--passes", type=int, default=defaults.passes, help="rows sampled or passed at once")
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    options = vars(parser.parse_args())
    config = AutoConfig.from_pretrained(options.pop("model"))
    card = options.pop("card")
    load = Workload(**{**options, "critic": None if options["critic"] == "none" else options["critic"]})
    print(report(estimate(config, load)))
    if card is None:
        return
    found = fitting(config, load, card)
    if found is None:
        print(f"\nDoes not fit {card:g} GB; take shorter completions, critic='shared' or a smaller base.")
    elif found[0] == load:
        print(f"\nFits {card:g} GB.")
    else:
        print(f"\nFits {card:g} GB with {describe(found[0], load)}:\n\n{report(found[1])}")


if __name__ == "__main__":
    main()
