"""Memory on paper is what torch's allocator hands out, sharing counts once, and the command needs a config only."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gpu_memory
import pytest
import torch
from gpu_memory import NF4_BYTES, LiveStorages, Peaks, Setup, estimate, make_fit
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from hfppo import ActorCritic
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.sampler import Sampling
from hfppo.models import critic
from hfppo.models.actor_critic import Want
from hfppo.models.loading import default_peft_config

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, use_cache=False
)
SHAPES = {
    "llama": LLAMA,
    "qwen2, grouped queries": Qwen2Config(
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "gpt2": GPT2Config(
        vocab_size=1024, n_embd=64, n_layer=3, n_head=2, n_positions=128, bos_token_id=None, eos_token_id=1
    ),
}
SMALL = Setup(
    **{"max_prompt_length": 32, "max_completion_length": 48, "per_device_train_batch_size": 8, "lora_r": 4},
    **{"local_rollout_forward_batch_size": 16},
)


def real_model(config: PreTrainedConfig, setup: Setup) -> ActorCritic:
    base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.dtype))
    adapter = default_peft_config()
    adapter.r = setup.lora_r
    source = replace(critic.find_critic(setup.critic), layers=setup.critic_layers)
    model = ActorCritic(base, adapter, source)
    if setup.activation_checkpointing:
        model.activation_checkpointing_enable()
    return model


def allocated(tmp_path: Path, run) -> int:
    """The most bytes that torch's CPU allocator hands out during a call, by its own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    record.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    most = now = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["args"]["Ev Idx"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def measured(config: PreTrainedConfig, setup: Setup, tmp_path: Path) -> dict[str, int]:
    """Peaks of a real model with all its layers, by the allocator."""
    model = real_model(config, setup).eval()
    rows, keep = setup.local_rollout_forward_batch_size, model.keeps_base_states
    ids = torch.randint(64, (rows, setup.width), generator=torch.Generator().manual_seed(0))  # prompts differ
    batch = ids, torch.ones_like(ids), torch.ones(rows, setup.max_completion_length, dtype=torch.bool)
    micro_batch = [x[: setup.rows_of_update] for x in batch]

    def reference() -> Tensor | None:
        with model.reference():
            return model(*batch, want=Want(values=False, base_states=keep)).base_states

    def update() -> None:
        start = states if states is None else states[: micro_batch[0].numel()]
        both = Want(entropy="constant")
        wants = [both] if setup.critic == "shared" else [replace(both, values=False), replace(both, policy=False)]
        for want in wants:
            out = model(*micro_batch, want=want, base_states=start if want.values else None)
            torch.stack([x.sum() for x in (out.logprobs, out.values) if x is not None]).sum().backward()

    with gpu_memory.chunks_of_a_gpu(), torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16):
        with torch.no_grad():
            states = reference()
            peaks = {
                "reference": allocated(tmp_path, reference),
                gpu_memory.VALUES: allocated(tmp_path, lambda: model(*batch, base_states=states)),
            }
        model.train()
        return peaks | {"update": allocated(tmp_path, update)}


# Each shape, critic and setting of checkpointing.
PEAKS = [
    ("llama", {"critic": "adapter", "activation_checkpointing": False}),
    ("qwen2, grouped queries", {"critic": "adapter", "activation_checkpointing": True}),
    ("gpt2", {"critic": "shared", "activation_checkpointing": True}),
]
TOP_LAYER = {"critic_layers": 1, "activation_checkpointing": False, "bf16": False, "dtype": "float32"}


@pytest.mark.parametrize(("shape", "fields"), [*PEAKS, ("llama", TOP_LAYER)])
def test_a_peak_is_what_the_allocator_hands_out(shape, fields, tmp_path):
    """With `critic_layers` the critic starts from the base's states of the reference pass."""
    setup = replace(SMALL, **fields)
    found, real = estimate(SHAPES[shape], setup).phases, measured(SHAPES[shape], setup, tmp_path)
    assert {name: found[name] for name in real} == {name: pytest.approx(size, rel=0.1) for name, size in real.items()}


@pytest.mark.parametrize(("shape", "prompt", "new"), [("llama", 4, 120), ("gpt2", 32, 48)])
def test_the_peak_of_sampling_is_the_samplers(shape, prompt, new):
    """With more key-values than states of the prompts, or fewer; its stretches included."""
    setup = replace(SMALL, max_prompt_length=prompt, max_completion_length=new)
    model, live = real_model(SHAPES[shape], setup).eval(), LiveStorages(Tensor)
    rows = setup.local_rollout_forward_batch_size
    for tensor in (*model.parameters(), *model.buffers()):
        live.add(tensor)
    ids = torch.randint(64, (rows, prompt), generator=torch.Generator().manual_seed(0))
    sampler = TransformersSampler(model, Sampling(1.0, new, [10**6], 0), rows)
    with torch.autocast("cpu", torch.bfloat16):
        peak = live.peak_of(lambda: sampler(ids.tolist(), list(range(rows))))
    assert estimate(SHAPES[shape], setup).phases["sampling"] == pytest.approx(peak, rel=0.1)


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Run the command with flags; return what it prints, and what it says is wrong."""

    def run(*flags: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["memory", *flags])
        with suppress(SystemExit):
            gpu_memory.main()
        return capsys.readouterr()

    return run


def weigh_without_data(setup: Setup) -> int:
    return gpu_memory.weigh(gpu_memory.without_data(gpu_memory.make_model(LLAMA, setup)), LiveStorages(), setup)[0]


def test_what_two_trees_share_counts_once():
    """The base in bfloat16; two adapters with AdamW's moments, 12 bytes per weight; buffers."""
    layers, hidden, inner, rank = 3, 64, 256, SMALL.lora_r
    base = 2 * 64 * hidden + layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden) + hidden
    adapter = layers * rank * (4 * 2 * hidden + 3 * (hidden + inner))
    rotary = 4 * hidden // 4 // 2  # float32, one frequency for two numbers of a head
    trained = {"adapter": 2 * adapter + hidden + 1, "shared": adapter + hidden + 1, "none": adapter}
    for kind, weights in trained.items():
        rest = weigh_without_data(replace(SMALL, critic=kind)) - 2 * base - 12 * weights
        assert rest % rotary == 0, kind
        assert rest <= 2 * 2 * rotary, kind


def test_nf4_takes_the_bytes_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(torch.randn(256, 512), quant_type="nf4")
    assert packed.nbytes + state.absmax.nbytes == NF4_BYTES * 256 * 512


def test_nf4_packs_the_linear_layers_of_the_base_only():
    whole, packed = (weigh_without_data(replace(SMALL, load_in_4bit=bits)) for bits in (False, True))
    assert whole - packed == (2 - NF4_BYTES) * 3 * (4 * 64**2 + 3 * 64 * 256)


CHECKPOINTED = {"activation_checkpointing": True}
ONE_ROW = {**CHECKPOINTED, "local_rollout_forward_batch_size": 1, "max_tokens_per_micro_batch": 80}


@pytest.mark.parametrize(
    ("card", "changed"),
    [
        (100, {}),
        (40, CHECKPOINTED),
        (20, {**CHECKPOINTED, "local_rollout_forward_batch_size": 32}),
        (12, {**CHECKPOINTED, "local_rollout_forward_batch_size": 2, "max_tokens_per_micro_batch": 160}),
        (11.33, {**ONE_ROW, "load_in_4bit": True}),  # a row of a pass does not fit beside weights of 10 GB
        (10, {**CHECKPOINTED, "load_in_4bit": True, "local_rollout_forward_batch_size": 16}),
        (1, None),
    ],
)
def test_the_settings_that_make_a_run_fit(card, changed, monkeypatch):
    """By hand: weights of 10 GB or 3; passes of 1/4 GB a row; an update of 4 GB a row, or 1/4 checkpointed."""

    def by_hand(config, setup):
        update = (0.25 if setup.activation_checkpointing else 4) * setup.rows_of_update
        rows = {"reference": setup.local_rollout_forward_batch_size, "update": setup.rows_of_update}
        phases = {"reference": rows["reference"] / 4, "update": update}
        weights = 3 if setup.load_in_4bit else 10
        return Peaks(weights * 10**9, {name: int(size * 1e9) for name, size in phases.items()}, rows)

    monkeypatch.setattr(gpu_memory, "estimate", by_hand)
    asked = replace(SMALL, activation_checkpointing=False, local_rollout_forward_batch_size=64, card=card)
    found = make_fit(LLAMA, asked)
    assert (found and found[0]) == (changed if changed is None else replace(asked, **changed))


@pytest.mark.parametrize(
    ("given", "card", "weights", "rows"),
    [
        (None, None, 0, 64),
        (None, 1.0, 0, 819),  # as many as a run on a GPU passes at once: 65,536 // 80
        (None, 1.0, 10**9, 1),
        (4, 1.0, 0, 4),
    ],
)
def test_rows_are_those_of_a_run_on_the_card(given, card, weights, rows):
    setup = replace(SMALL, local_rollout_forward_batch_size=given, card=card)
    found = gpu_memory.choose_rows(gpu_memory.make_model(LLAMA, setup), setup, weights)
    assert found["reference"] == found[gpu_memory.VALUES] == rows
    assert rows == 819 or found["sampling"] == rows
    assert found["update"] == 8


def test_the_command_reads_a_config_and_a_recipe(tmp_path, run_command):
    LLAMA.save_pretrained(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        f"model_name_or_path: {tmp_path}\nmax_prompt_length: 32\nmax_completion_length: 48\nlearning_rate: 1.0e-5\n"
    )
    flags = "--config", str(tmp_path / "recipe.yaml"), "--per_device_train_batch_size", "2", "--card", "1"
    printed, _ = run_command(*flags)
    assert "| update | 160 |" in printed  # 2 × (32 + 48)
    assert "| reference | 65,520 |" in printed  # 819 × (32 + 48)
    assert "Fits 1 GB." in printed
