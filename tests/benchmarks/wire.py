"""Count the bytes that each of two processes sends per rollout and per optimizer step.

    export PYTHONPATH=tests:recipes/arithmetic
    unshare --net sh -c 'ip link set lo up && python -m torch.distributed.run --nproc_per_node 2 \\
        --master_addr 127.0.0.1 --master_port 29500 tests/benchmarks/wire.py ddp'

"fsdp2" and "fsdp2 server" (a server of plain PEFT in process 0) shard. Run it as root: the network is its own.
"""

import os
import sys
from pathlib import Path
from tempfile import gettempdir

ENGINE, RANK = " ".join(sys.argv[1:]), os.environ["RANK"]
if ENGINE != "ddp":
    shards = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "STATE_DICT_TYPE": "FULL_STATE_DICT"}
    os.environ.update({f"FSDP_{name}": x for name, x in shards.items()}, ACCELERATE_USE_FSDP="true")

from transformers import TrainerCallback  # noqa: E402 (after the engine is chosen)

from helpers.cpus_as_gpus import claim_gpus  # noqa: E402
from helpers.fake_vllm import PeftVLLM  # noqa: E402
from helpers.runs import small_trainer  # noqa: E402
from helpers.tiny import tiny_model  # noqa: E402

CONFIG = {"gradient_accumulation_steps": 2, "num_ppo_epochs": 1, "max_completion_length": 16, "max_steps": 4}


class Count(TrainerCallback):
    """Prints the bytes of each step, and those before it: of a rollout, where one is due."""

    before = 0

    def tell(self, what: str) -> None:
        line = next(x for x in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in x)
        now = int(line.split()[9])  # sent by both processes
        if RANK == "0":
            print(f"{what}: {(now - self.before) / 2 / 1e6:.3f} MB per process", flush=True)
        self.before = now

    def on_step_begin(self, args, state, control, **kwargs):
        self.tell(f"before step {state.global_step + 1}")

    def on_step_end(self, args, state, control, **kwargs):
        self.tell(f"step {state.global_step}")


claim_gpus()
folder = Path(gettempdir()) / "wire"
base = folder / f"base-{RANK}"
tiny_model(hidden_size=256, intermediate_size=688, num_hidden_layers=4).save_pretrained(base)
if ENGINE.endswith("server"):
    CONFIG |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:8000"}
    server = PeftVLLM(base, port=8000) if RANK == "0" else None
trainer = small_trainer(folder / "out", CONFIG, model=str(base), callbacks=[Count()], critic="shared")
trainer.train()
sizes = {p: p.numel() * 4 / 1e6 for p in trainer.model.parameters()}
trained = sum(size for p, size in sizes.items() if p.requires_grad)
print(f"weights in float32: {trained:.3f} MB trained, {sum(sizes.values()):.3f} MB in all")
