"""FSDP2 over two CPU processes: the numbers of DDP, checkpoints that plain PEFT reads, exact resume; refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from conftest import tiny_model
from peft import PeftModel
from safetensors.torch import load_file

from hfppo.reward_model import RewardAdapter
from hfppo.sharding import check_engine

TESTS = Path(__file__).parent
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def launch(out: Path, critic: str, engine: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "recipes"), str(TESTS.parent)])
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *(str(TESTS / "sharded.py"), str(out), critic, engine),
        ],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(FSDP2 if engine == "fsdp2" else {})},
        capture_output=True,
        text=True,
        timeout=300,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "critic" / "critic.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, dict]]:
    """What tests/sharded.py writes, by the engine."""
    found = {}
    for engine in ("ddp", "fsdp2"):
        out = tmp_path_factory.mktemp(engine)
        run = launch(out, "shared", engine)
        assert run.returncode == 0, run.stderr[-3000:]
        found[engine] = (out, json.loads((out / "result_0.json").read_text()))
    return found


@pytest.mark.slow
def test_a_sharded_run_has_the_numbers_of_one_that_is_not(runs):
    (ddp_out, ddp), (fsdp_out, fsdp) = runs["ddp"], runs["fsdp2"]
    assert fsdp["engine"] == "DistributedType.FSDP" != ddp["engine"]
    assert len(fsdp["straight"]) == len(ddp["straight"]) == 6
    for sharded, whole in zip(fsdp["straight"], ddp["straight"], strict=True):
        assert sharded.keys() == whole.keys()
        for name, value in whole.items():
            assert sharded[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    found, expected = (weights(out / "straight" / "checkpoint-4") for out in (fsdp_out, ddp_out))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_traces_of_a_sharded_run_lack_the_update(runs):
    ddp, fsdp = runs["ddp"][1]["traces"], runs["fsdp2"][1]["traces"]
    for sharded, whole in zip(fsdp, ddp, strict=True):
        assert sharded["columns"]["value"] == pytest.approx(whole["columns"]["value"], rel=1e-3, abs=1e-4)
        assert (sharded["updated_step"], whole["updated_step"]) == (None, 4)


@pytest.mark.slow
def test_a_sharded_run_resumes_bit_for_bit(runs):
    out, result = runs["fsdp2"]
    assert result["resumed"] == result["straight"]
    straight, resumed = (weights(out / name / "checkpoint-4") for name in ("straight", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    first = weights(out / "straight" / "checkpoint-1")
    assert any(not torch.equal(first[name], tensor) for name, tensor in straight.items())


@pytest.mark.slow
def test_plain_peft_reads_what_a_sharded_run_saves(runs):
    loaded = PeftModel.from_pretrained(tiny_model(seed=1), runs["fsdp2"][0] / "straight" / "checkpoint-4")
    trained = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert max(float(p.detach().abs().max()) for p in trained) > 0


BUDGET, VLLM = {"max_tokens_per_micro_batch": 100}, {"use_vllm": True}


def config(args: dict) -> SimpleNamespace:
    """The fields that `check_engine` asks."""
    return SimpleNamespace(**{"max_tokens_per_micro_batch": None, "use_vllm": False, **args})


def engine(kind: DistributedType, fsdp2: bool = True, zero: int = 0):
    """As much of an Accelerator as `check_engine` asks."""
    plugin = SimpleNamespace(zero_stage=zero)
    return SimpleNamespace(distributed_type=kind, is_fsdp2=fsdp2, state=SimpleNamespace(deepspeed_plugin=plugin))


@pytest.mark.parametrize(
    ("accelerator", "critic", "funcs", "args", "message"),
    [
        (engine(DistributedType.FSDP), "adapter", [], {}, "FSDP2 cannot shard; use critic='shared'"),
        (engine(DistributedType.DEEPSPEED, zero=3), "adapter", [], {}, "ZeRO-3 cannot shard; use critic='shared'"),
        (engine(DistributedType.FSDP), "shared", [RewardAdapter], {}, "a reward adapter .* merge it into its base"),
        (engine(DistributedType.FSDP, fsdp2=False), "shared", [], {}, "FSDP version 1 is not supported; set"),
        (engine(DistributedType.FSDP), "shared", [], VLLM, "use_vllm sends the adapter whole, and FSDP2 keeps shards"),
        (engine(DistributedType.DEEPSPEED, zero=2), "adapter", [], BUDGET, "max_tokens_per_micro_batch needs DDP"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(accelerator, critic, funcs, args, message):
    funcs = [object.__new__(kind) for kind in funcs]
    with pytest.raises(ValueError, match=message):
        check_engine(accelerator, SimpleNamespace(kind=critic), funcs, config(args))


@pytest.mark.parametrize(
    ("accelerator", "critic", "funcs", "args"),
    [
        (engine(DistributedType.MULTI_GPU), "adapter", [RewardAdapter], BUDGET | VLLM),
        (engine(DistributedType.FSDP), "shared", [], BUDGET),
        (engine(DistributedType.DEEPSPEED, zero=3), "model", [], {}),
        (engine(DistributedType.DEEPSPEED, zero=2), "adapter", [RewardAdapter], VLLM),
    ],
)
def test_what_an_engine_can_do_is_not(accelerator, critic, funcs, args):
    check_engine(accelerator, SimpleNamespace(kind=critic), [object.__new__(kind) for kind in funcs], config(args))
