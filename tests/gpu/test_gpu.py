"""What holds on a GPU as on a CPU: ratio 1, KL 0, an unchanged base, packing, exact resume, and vLLM's policy.

`python tests/gpu/kit.py` runs these tests. Those that need no kernel of a GPU run on accelerate's device, whatever it
is, so that they are known to work before a GPU is at hand.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from helpers.flash import flash_attention
from helpers.runs import count_digits, digest, final_state, frozen_tensors
from helpers.tiny import LORA, other_tokenizer, scorer, tiny_model
from helpers.vllm_runs import Server, save_base
from hfppo import ActorCritic
from hfppo.generation.vllm_server import serve_command
from hfppo.models import layout
from hfppo.models.loading import default_peft_config

pytestmark = pytest.mark.gpu

# Largest |ratio − 1| of the first update: rounding of the dtype in two passes over batches of other shapes.
FIRST_RATIO = {"float32": 1e-4, "bfloat16": 0.25, "nf4": 0.25}


def on_device(dtype: str, **fields: Any) -> dict[str, Any]:
    """Fields of PPOConfig for a run in a dtype on accelerate's device."""
    cpu = PartialState().device.type == "cpu"
    return {"use_cpu": cpu, "bf16": dtype != "float32", "max_steps": 4, "learning_rate": 1e-3, **fields}


@pytest.fixture
def flash() -> str:
    if (name := flash_attention()) is None:
        pytest.skip("needs CUDA and flash attention")
    return name


def load(folder: str | Path, dtype: str, attention: str = "sdpa") -> PreTrainedModel:
    """A base on accelerate's device; made, unless it is there, with heads wide enough for flash attention and vLLM."""
    if not Path(folder, "config.json").is_file():
        tiny_model(hidden_size=128, intermediate_size=128).save_pretrained(folder)
    options: dict[str, Any] = {"attn_implementation": attention}
    if dtype == "nf4":
        pytest.importorskip("bitsandbytes")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,  # as vLLM does
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        return AutoModelForCausalLM.from_pretrained(folder, **options, device_map=PartialState().device)
    return AutoModelForCausalLM.from_pretrained(folder, **options, dtype=dtype).to(PartialState().device)


def check_first_rollout(trainer, dtype: str) -> None:
    """Train for one rollout; ratio 1 and KL 0 at its start, and the base as it was, though the actor has moved."""
    before = digest(frozen_tensors(trainer.model))
    start = [p.detach().cpu().clone() for p in trainer.model.actor_parameters()]  # some move when training starts
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["policy/first_ratio_deviation"] < FIRST_RATIO[dtype]
    assert first["policy/ratio"] == pytest.approx(1, abs=FIRST_RATIO[dtype] / 5)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert digest(frozen_tensors(trainer.model)) == before
    moved = [not torch.equal(p.cpu(), q) for p, q in zip(trainer.model.actor_parameters(), start, strict=True)]
    assert any(moved)


@pytest.mark.parametrize("dtype", FIRST_RATIO)
@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_ratio_1_and_kl_0_at_the_start_and_the_base_stays(make_trainer, tmp_path, dtype, critic):
    """With a reward model that was loaded to the CPU."""
    rewards = {
        "reward_funcs": [count_digits, scorer()],
        "reward_processing_classes": [None, other_tokenizer("right", "<void>")],
    }
    trainer = make_trainer(on_device(dtype), model=load(tmp_path / "base", dtype), critic=critic, **rewards)
    check_first_rollout(trainer, dtype)
    assert trainer.collector.rewards.funcs[1].model.device == trainer.args.device


@pytest.mark.parametrize("dtype", ["bfloat16", "nf4"])
def test_the_same_with_flash_attention(make_trainer, tmp_path, flash, dtype):
    trainer = make_trainer(on_device(dtype), model=load(tmp_path / "base", dtype, flash))
    assert layout.can_pack(trainer.model.causal_lm)
    check_first_rollout(trainer, dtype)


def test_packed_rows_give_what_padded_ones_give(tmp_path, monkeypatch, flash):
    model = ActorCritic(load(tmp_path, "bfloat16", flash), default_peft_config())
    ids = torch.tensor(
        [[0, 0, 5, 6, 8, 9, 1, 0], [3, 4, 5, 6, 8, 1, 0, 0], [0, 7, 8, 9, 9, 8, 7, 6]], device=model.device
    )
    mask = torch.tensor([[True] * n + [False] * (4 - n) for n in (3, 2, 4)], device=model.device)
    attention = torch.cat([ids[:, :4] != 0, mask], dim=1)

    def outputs() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(ids, attention, mask)
        (out.logprobs.sum() + out.values.sum()).backward()
        return [out.logprobs, out.values, *(p.grad.clone() for p in model.actor_parameters())]

    packed = outputs()
    monkeypatch.setattr(layout, "PACKING_ATTENTION", "none")
    for a, b in zip(packed, outputs(), strict=True):
        assert_close(a, b, rtol=0, atol=0.05 * max(1e-3, float(b.detach().abs().max())))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_equals_the_straight_run(make_trainer, tmp_path, dtype):
    """From within a rollout, and from between two."""
    saving = {"full_determinism": True, "save_strategy": "steps", "save_steps": 1}

    def train(folder: str, step: int | None = None):
        if step is not None:
            name = f"checkpoint-{step}"
            shutil.copytree(tmp_path / "straight" / name, tmp_path / folder / name)
        fields = on_device(dtype, max_steps=8, output_dir=str(tmp_path / folder), **saving)
        trainer = make_trainer(fields, model=load(tmp_path / "base", dtype))
        trainer.train(resume_from_checkpoint=step is not None)
        return final_state(trainer)

    straight = train("straight")
    for step in (3, 4):
        resumed = train(f"from-{step}", step)
        assert resumed.keys() == straight.keys()
        assert [name for name, x in resumed.items() if not torch.equal(x, straight[name])] == [], step
    torch.use_deterministic_algorithms(False)


ENGINE_OF_A_TEST = {"max_model_len": 256, "enforce_eager": True, "gpu_memory_utilization": 0.2}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "colocate": {},
    "asleep between rollouts": {"vllm_engine_kwargs": {**ENGINE_OF_A_TEST, "enable_sleep_mode": True}},
    "nf4": {"vllm_engine_kwargs": {**ENGINE_OF_A_TEST, "quantization": "bitsandbytes"}},
    "server": {"vllm_mode": "server"},
}


@pytest.fixture
def server_of(tmp_path) -> Iterator[Callable[[PreTrainedModel], str]]:
    """Starts a server for a base, and returns its address."""
    started = []

    def serve(base: PreTrainedModel) -> str:
        command = serve_command(ActorCritic(base, LORA, critic=None)) + " --gpu-memory-utilization 0.2"
        started.append(Server(command, tmp_path / "log"))
        started[0].start()
        started[0].wait()
        return started[0].url

    yield serve
    for server in started:
        server.kill()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning")  # vLLM's look at it
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_vllm_samples_from_the_training_models_policy(make_trainer, tmp_path, server_of, placement):
    """Before any update, and after those of one rollout."""
    if placement not in ("colocate", "server") and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    base = save_base(str(tmp_path / "base"))
    model = load(base, "nf4" if placement == "nf4" else "bfloat16")
    fields = {"use_vllm": True, "vllm_engine_kwargs": ENGINE_OF_A_TEST}
    fields |= PLACEMENTS[placement]
    if placement == "server":
        fields["vllm_server_base_url"] = server_of(load(base, "bfloat16"))
    trainer = make_trainer(on_device("bfloat16", max_steps=8, **fields), model=model)
    trainer.train()
    mismatch = [entry["mismatch/mean"] for entry in trainer.state.log_history if "mismatch/mean" in entry]
    assert len(mismatch) == 2
    assert max(mismatch) < 0.1  # from where docs/metrics.md calls the two other policies
