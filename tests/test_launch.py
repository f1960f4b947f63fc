"""accelerate launch with the shipped configurations: a model by its id, two processes, a checkpoint and a resume."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from build_arithmetic_base import character_tokenizer

from helpers.loopback_hub import LoopbackHub
from helpers.processes import ROOT, run_python
from helpers.runs import assert_same_tensors, saved_weights
from helpers.tiny import ragged_model

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROWS = [{"prompt": f"{'请问' * a}{a}+{b}="} for a in range(4) for b in range(3, 7)]
FLAGS = {
    **{"model_name_or_path": "team/base", "reward_funcs": "helpers.runs.count_digits", "use_cpu": "true"},
    **{"per_device_train_batch_size": "4", "num_ppo_epochs": "2", "max_completion_length": "6", "max_steps": "2"},
    **{"save_strategy": "steps", "save_steps": "1", "logging_steps": "1", "learning_rate": "1e-2", "lora_r": "4"},
    **{"report_to": "none", "disable_tqdm": "true"},
}


@pytest.fixture
def hub():
    """A Hub that holds the model."""
    with LoopbackHub() as hub:
        yield hub


def launch(hub: LoopbackHub, engine: str, folder: Path, **flags: str) -> subprocess.CompletedProcess:
    """Run recipes/ppo.py; its processes pass for GPUs, over which alone accelerate shards."""
    data_files = {}
    for split, rows in (("train", ROWS), ("test", ROWS[:7])):
        data_files[split] = str(folder / f"{split}.jsonl")
        Path(data_files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {**FLAGS, "data_files": json.dumps(data_files), **flags}
    return run_python(
        *("-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0", "--config_file"),
        *(f"recipes/accelerate/{engine}.yaml", "tests/helpers/cpus_as_gpus.py", "recipes/ppo.py"),
        *(part for name, value in given.items() for part in (f"--{name}", value)),
        **(hub.environment(folder / "home") | {"DS_ACCELERATOR": "cpu"}),
        cwd=ROOT,
        timeout=900,
    )


@pytest.mark.parametrize(
    ("engine", "critic", "bf16"),
    [
        ("ddp", "adapter", "false"),
        ("fsdp2", "shared", "false"),
        ("zero2", "adapter", "true"),
        ("zero3", "shared", "false"),
        ("zero3", "team/base", "true"),
    ],
)
def test_a_model_by_id_trains_saves_and_resumes(hub, tmp_path, engine, critic, bf16):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    ragged_model().save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    hub.add("team/base", {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()})
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    flags = {"critic": critic, "bf16": bf16}
    run = launch(hub, engine, tmp_path, output_dir=str(straight), **flags)
    assert run.returncode == 0, run.stderr
    first = str(straight / "checkpoint-1")
    run = launch(hub, engine, tmp_path, output_dir=str(resumed), resume_from_checkpoint=first, **flags)
    assert run.returncode == 0, run.stderr
    end, begun = saved_weights(straight), saved_weights(straight / "checkpoint-1")
    assert_same_tensors(saved_weights(resumed), end)
    assert any(not torch.equal(begun[name], tensor) for name, tensor in end.items())
    assert json.loads((straight / "after_greedy_results.json").read_text())["after_greedy_reward"] >= 0
