"""The two scripts of docs/nodes.md run as they stand, with two processes on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from build_arithmetic_base import character_tokenizer

from helpers.processes import ROOT, environment, free_port
from helpers.runs import read_log
from helpers.tiny import tiny_model

pytestmark = pytest.mark.slow

CONFIG = """
model_name_or_path: base
data_files: rows.jsonl
reward_funcs: helpers.runs.count_digits
output_dir: out
use_cpu: true
rollout_size: 8
per_device_train_batch_size: 2
num_mini_batches: 2
max_completion_length: 4
max_steps: 3
save_steps: 1
report_to: none
"""
COMMANDS = {
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "python": f'exec "{sys.executable}" "$@"',
    "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
    # Its options come first; every task gets the command.
    "srun": """
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait $task || exit 1; done
""",
}
SLURM, PAIR = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/nodes.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def start(tmp_path: Path):
    """Start a script in a folder with the recipes, a model, data and a cluster's commands; return its process."""
    tiny_model().save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "my.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{a}+{b}="}}\n' for a in range(4) for b in range(4)))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    port = str(free_port())
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def started(script: str) -> subprocess.Popen:
        here = script.replace("29500", port).replace("node0", "127.0.0.1").replace("per_node 8", "per_node 1")
        variables = environment(PATH=path, SLURM_JOB_NODELIST="node[0-1]")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(["bash", "-ec", here], cwd=tmp_path, env=variables, text=True, **pipes)

    return started


@pytest.mark.parametrize(
    ("script", "copies"), [(PAIR, 2), pytest.param(SLURM, 1, marks=pytest.mark.nightly)], ids=["torchrun", "slurm"]
)
def test_a_script_of_the_page_trains_on_two_processes(start, tmp_path, script, copies):
    started = [start(script) for _ in range(copies)]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0] * copies, said[0][-3000:]
    assert [entry["step"] for entry in read_log(tmp_path / "out") if "loss" in entry][-1] == 3
    states = sorted(path.name for path in (tmp_path / "out/checkpoint-3").glob("ppo_state_?.json"))
    assert states == ["ppo_state_0.json", "ppo_state_1.json"]
