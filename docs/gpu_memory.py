"""Peak memory of a run by phase, from a model's configuration: no weights, no GPU.

    python docs/gpu_memory.py --model Qwen/Qwen2.5-1.5B --card 24

The package's own `ActorCritic` samples a token, runs a pass and an update on tensors without data (torch's
FakeTensorMode), and a tracker adds up the bytes of all storages that live at once. Not counted: CUDA's context, about
0.5 GB, the workspaces of kernels, and what the allocator loses to fragments.
"""

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
import yaml
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedConfig

from hfppo.generation.generate import SeededChoice
from hfppo.generation.key_values import CACHE
from hfppo.models import batch_size, output_head
from hfppo.models.actor_critic import ActorCritic, Want
from hfppo.models.critic import find_critic
from hfppo.models.loading import NO_CODE
from hfppo.models.modes import attributes

GPU = torch.device("cuda")
NF4_BYTES = 0.5 + 4 / 64  # per weight: four bits, and a float32 scale for each block of 64
VALUES = "old log-probs and values"  # a phase
USABLE = 0.9  # share of a card; CUDA's context, workspaces and fragments take the rest


def setting(default: Any, help: str, **metadata: str) -> Any:
    """Return a dataclass field with its text for `--help`."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class Setup:
    """What decides the memory of a run on one device, by the names of PPOConfig, of `from_pretrained` and of TRL."""

    model_name_or_path: str | None = setting(None, "Id or path; only its config.json is read.", aliases="--model")
    card: float | None = setting(None, "Memory of the GPU, GB: says what makes the run fit.")
    max_prompt_length: int = setting(512, "Tokens of every prompt.")
    max_completion_length: int = setting(256, "Tokens of every completion.")
    per_device_train_batch_size: int = setting(8, "Completions in a micro-batch of the update.")
    max_tokens_per_micro_batch: int | None = setting(None, "Most tokens in one forward of the update.")
    local_rollout_forward_batch_size: int | None = setting(
        None, "Rows sampled, or passed without gradient, at once. By default as a run on the card; 64 without --card."
    )
    activation_checkpointing: bool = setting(True, "Compute the layers again in the backward pass.")
    bf16: bool = setting(True, "Autocast to bfloat16.")
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "Dtype of the base.")
    load_in_4bit: bool = setting(False, "The base in NF4.")
    critic: Literal["adapter", "shared", "shared_detached", "none"] = setting("adapter", "Kind of the critic.")
    critic_layers: int | None = setting(None, "Top layers that the adapter critic adapts; default: all.")
    lora_r: int = setting(16, "Rank of LoRA on all linear layers.")

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def rows_of_update(self) -> int:
        """Rows in one forward pass of the update."""
        most = self.max_tokens_per_micro_batch or math.inf
        return max(1, int(min(self.per_device_train_batch_size, most // self.width)))

    def room(self, weights: int) -> int:
        """Return the bytes of the card that weights leave to a phase."""
        return int(USABLE * self.card * 1e9) - weights


@dataclass(frozen=True)
class Peaks:
    """Bytes by phase, on top of `weights`, and the rows that a phase computes at once."""

    weights: int  # the base, the adapters and AdamW's moments
    phases: dict[str, int]
    rows: dict[str, int]

    @property
    def largest(self) -> str:
        """Name of the phase with the highest peak."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def total(self) -> int:
        """The most bytes at once."""
        return self.weights + self.phases[self.largest]


class LiveStorages(TorchDispatchMode):
    """Adds up the bytes of the storages that live at the same time, each once however many tensors share it.

    Args:
        kind: the type of the tensors that are counted.
    """

    def __init__(self, kind: type[Tensor] = FakeTensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.kind = kind
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, self.kind):
                self.add(tensor)
        return out

    def peak_of(self, run: Callable[[], object]) -> int:
        """Return the peak of live bytes during a call, minus the bytes that were live before it."""
        before = self.peak = self.now
        with self:
            run()
        return self.peak - before


def estimate(config: PreTrainedConfig, setup: Setup) -> Peaks:
    """Return the peaks of a run.

    Args:
        config: the base's configuration.
    """
    model, live = without_data(make_model(config, setup)), LiveStorages()
    weights, unpacked = weigh(model, live, setup)
    rows = choose_rows(model, setup, weights)
    phases = measure_phases(model, live, setup, rows)
    return Peaks(weights, {name: size + unpacked for name, size in phases.items()}, rows)


def weigh(model: ActorCritic, live: LiveStorages, setup: Setup) -> tuple[int, int]:
    """Return the bytes of a model with AdamW's moments, and the bytes of the largest layer that NF4 unpacks.

    bitsandbytes packs every frozen linear layer but the output head.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        live.add(tensor)
    weights = live.now + 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not setup.load_in_4bit:
        return weights, 0
    head = model.get_output_embeddings()
    linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    packed = [(x.numel(), x.nbytes) for x in linear if not x.requires_grad]
    return weights - int(sum(size - NF4_BYTES * number for number, size in packed)), max(size for _, size in packed)


def choose_rows(model: ActorCritic, setup: Setup, weights: int) -> dict[str, int]:
    """Return the rows that each phase computes at once, as a run on a GPU chooses them."""
    given = setup.local_rollout_forward_batch_size or (None if setup.card else batch_size.ROWS)
    lengths = setup.max_prompt_length, setup.max_completion_length
    free = max(0, setup.room(weights)) if setup.card else 0
    sampled = batch_size.sampler_rows(model, given, *lengths, GPU, free)
    passed = batch_size.pass_rows(model, given, torch.tensor([setup.width]), GPU, free=free)
    return {"sampling": sampled, "reference": passed, VALUES: passed, "update": setup.rows_of_update}


def measure_phases(model: ActorCritic, live: LiveStorages, setup: Setup, rows: dict[str, int]) -> dict[str, int]:
    """Return the peak bytes of each phase, minus the bytes that were live before it.

    Args:
        model: the model in eval mode; the update leaves it in training mode, with gradients.
    """
    passed, updated = (inputs(model, setup, rows[phase]) for phase in (VALUES, "update"))

    def reference() -> None:
        with model.reference():
            model(**passed, want=Want(values=False, base_states=model.keeps_base_states))

    with chunks_of_a_gpu(), torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16):
        with torch.no_grad(), output_head.float32_logits(model.causal_lm):
            sampling = live.peak_of(lambda: sample(model, setup, rows["sampling"]))
            phases = {"sampling": sampling, "reference": live.peak_of(reference)}
            states = base_states(model, passed)
            phases[VALUES] = live.peak_of(lambda: model(**passed, base_states=states))
        states = base_states(model.train(), updated)
        return {**phases, "update": live.peak_of(lambda: update(model, updated, states))}


def update(model: ActorCritic, batch: dict[str, Tensor], states: Tensor | None = None) -> None:
    """Make the passes of a micro-batch, forward and backward, as `PPOTrainer.training_step` makes them.

    Args:
        batch: `input_ids`, `attention_mask` and `completion_mask`.
        states: the base's states that the critic starts from, if it has `critic_layers`.
    """
    both = Want(entropy="constant", router_loss=True)
    together = model.critic is None or model.critic_is_shared
    for want in [both] if together else [replace(both, values=False), replace(both, policy=False)]:
        outputs = model(**batch, want=want, base_states=states if want.values else None)
        torch.stack([x.sum() for x in (outputs.logprobs, outputs.values) if x is not None]).sum().backward()


def make_model(config: PreTrainedConfig, setup: Setup) -> ActorCritic:
    """Return actor, reference and critic on the "meta" device, in eval mode."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.dtype))
        adapter = LoraConfig(r=setup.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
        critic = None if setup.critic == "none" else replace(find_critic(setup.critic), layers=setup.critic_layers)
        model = ActorCritic(base, adapter, critic)
    if setup.activation_checkpointing:
        model.activation_checkpointing_enable()
    return model.eval()


def without_data(model: ActorCritic) -> ActorCritic:
    """Replace tensors on the "meta" device by CPU tensors without data; shared tensors stay shared.

    Token ids and masks are real tensors, since they decide what is computed; they are not counted.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    @cache
    def fake(tensor: Tensor) -> Tensor:
        with mode:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    for module in model.modules():
        own: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in own:
            tensors.update({name: fake(x) for name, x in tensors.items() if x is not None})
    return model


def inputs(model: ActorCritic, setup: Setup, rows: int) -> dict[str, Tensor]:
    """Return rows with different prompts, without padding."""
    size = rows * setup.width
    return {
        "input_ids": torch.arange(size).view(rows, setup.width) % model.config.get_text_config().vocab_size,
        "attention_mask": torch.ones(rows, setup.width, dtype=torch.int64),
        "completion_mask": torch.ones(rows, setup.max_completion_length, dtype=torch.bool),
    }


def base_states(model: ActorCritic, batch: dict[str, Tensor]) -> Tensor | None:
    """Return the states that `critic_layers` start from; None where the critic reads the tokens."""
    if not model.keeps_base_states:
        return None
    weight = cast(nn.Embedding, model.get_input_embeddings()).weight
    return weight.detach().new_empty(batch["input_ids"].numel(), weight.shape[1])


def sample(model: ActorCritic, setup: Setup, rows: int) -> None:
    """Prefill the prompts and sample the last token; one row is shorter than the others."""
    width = setup.width
    ids = torch.zeros(rows, setup.max_prompt_length, dtype=torch.int64)
    mask = torch.ones(rows, width, dtype=torch.int64)
    mask[0, 0] = 0
    mask_of_prompts = mask[:, : setup.max_prompt_length]
    cache = model.causal_lm(ids, attention_mask=mask_of_prompts, use_cache=True, logits_to_keep=1)[CACHE]
    for layer in cache.layers:  # a DynamicCache
        missing = width - 1 - layer.keys.shape[-2]
        layer.keys, layer.values = (nn.functional.pad(x, (0, 0, 0, missing)) for x in (layer.keys, layer.values))
    out = model.causal_lm(ids[:, :1], attention_mask=mask, **{CACHE: cache}, logits_to_keep=1)
    SeededChoice(torch.zeros(rows, 1, dtype=torch.float64), 1.0, lambda tokens: None)(ids, out.logits[:, -1])


def chunks_of_a_gpu() -> AbstractContextManager[None]:
    """Compute the output head in the chunks of a GPU inside the block, though the tensors are on the CPU."""
    before = output_head.tokens_at_once
    return attributes(output_head, tokens_at_once=lambda vocab_size, _: before(vocab_size, torch.device("cuda")))


def make_fit(config: PreTrainedConfig, setup: Setup) -> tuple[Setup, Peaks] | None:
    """Return a setup that fits its card, with as few changes as possible, and its peaks; None if there is none."""
    smaller: Setup | None = setup
    while smaller is not None:
        setup, peaks = smaller, estimate(config, smaller)
        room = setup.room(peaks.weights)
        if peaks.phases[peaks.largest] <= room:
            return setup, peaks
        smaller = shrink(setup, peaks, room)
    return None


def shrink(setup: Setup, peaks: Peaks, room: int) -> Setup | None:
    """Return a setup whose largest phase takes less, with the cheapest change first; None if there is none.

    A peak falls at most in proportion to its rows.

    Args:
        room: bytes for each phase.
    """
    less: dict[str, Any] = {"dtype": "bfloat16", "bf16": True, "activation_checkpointing": True}
    for name, value in less.items():
        if getattr(setup, name) != value:
            return replace(setup, **{name: value})
    rows = peaks.rows[peaks.largest]
    if room > 0 and rows > 1:
        rows = max(1, rows >> math.ceil(math.log2(peaks.phases[peaks.largest] / room)))
        if peaks.largest == "update":
            return replace(setup, max_tokens_per_micro_batch=rows * setup.width)
        return replace(setup, local_rollout_forward_batch_size=rows)
    return None if setup.load_in_4bit else replace(setup, load_in_4bit=True)


def report(peaks: Peaks, width: int) -> str:
    """Return a Markdown table of the phases.

    Args:
        width: tokens of a row.
    """
    lines = ["| phase | tokens | GB | kB per token |", "|---|---|---|---|"]
    lines.append(f"| weights, AdamW's moments | | {peaks.weights / 1e9:.1f} | |")
    for name, size in peaks.phases.items():
        tokens = peaks.rows[name] * width
        lines.append(f"| {name} | {tokens:,} | {size / 1e9:.1f} | {size / tokens / 1e3:,.0f} |")
    return "\n".join([*lines, f"| **peak** | | **{peaks.total / 1e9:.1f}** | |"])


def main() -> None:
    """Print the peaks of a model, and the settings with which it fits a card."""
    about = "Estimate the memory of a run from a model's configuration."
    parser = HfArgumentParser(cast(Any, Setup), prog="python docs/gpu_memory.py", description=about)
    parser.add_argument("--config", help="a recipe's YAML file, whose values are the defaults")
    try:
        if (file := parser.parse_known_args()[0].config) is not None:
            recipe = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
            parser.set_defaults(**{f.name: recipe[f.name] for f in fields(Setup) if f.name in recipe})
        setup, _ = parser.parse_args_into_dataclasses()
        if setup.model_name_or_path is None:
            parser.error("--model is missing: give the id or path of a model")
        config = AutoConfig.from_pretrained(setup.model_name_or_path, **NO_CODE)
    except (OSError, ValueError) as error:
        parser.error(f"{' '.join(sys.argv[1:])}: {error}")
    found = None if setup.card is None else make_fit(config, setup)
    fitting, peaks = found or (setup, estimate(config, setup))
    print(report(peaks, setup.width))
    if found is not None:
        changed = {name: x for name, x in vars(fitting).items() if x != getattr(setup, name)}
        settings = "".join(f" --{name} {value}" for name, value in changed.items())
        print(f"\nFits {setup.card:g} GB{settings and ' with'}{settings}.")
    elif setup.card is not None:
        print(f"\nDoes not fit {setup.card:g} GB: take shorter completions, critic='shared' or a smaller base.")


if __name__ == "__main__":
    main()
