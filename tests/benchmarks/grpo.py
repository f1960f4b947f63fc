"""Seconds by phase, tokens per second and memory of the same work, by hfppo and by TRL's GRPOTrainer.

    python tests/benchmarks/grpo.py [--workload smollm2] [--rounds 6] [--threads 2] [--sides TRL …]

All train the same LoRA on the same model with random weights and as many completions of the same lengths, with the
same passes (old and reference log-probs) and optimizer steps. TRL has groups of four completions of a prompt. PPO as
it comes has one completion of each prompt, with an adapter critic of all layers or of the top ten, or with the shared
one. "In groups" it has TRL's groups, as `grpo` does, with the KL in the loss as TRL has it.

Each side is a process, and they take turns rollout by rollout. The first rollout of each warms up and does not count.
Prints Markdown: medians over the rounds, from the least to the most, ratios to TRL round by round, and hfppo's phases
beside the time that their matrix products would take at the machine's measured rate.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from ppo_floor import floor, rates
from ppo_workload import WORKLOADS, write_models
from turns import CLOCKS, in_turn, print_phases, print_totals

HERE = Path(__file__).parent
TRL = "TRL"
GROUP = 4
GRPO = {"advantage_estimator": "grpo", "kl_coef": 0.0, "kl_loss_coef": 0.05}  # β of the workload, as TRL has it
HFPPO = {
    "critic='adapter'": {"critic": "adapter"},
    "critic_layers=10": {"critic": "adapter", "critic_layers": 10},
    "critic='shared'": {"critic": "shared"},
    "critic='adapter', in groups": {"critic": "adapter", "num_generations": GROUP},
    "grpo": {**GRPO, "critic": None, "num_generations": GROUP},
}


def command(side: str, options: argparse.Namespace, folder: str) -> list[str]:
    """What starts the process of a side."""
    given = json.dumps(HFPPO.get(side, {"num_generations": GROUP}))
    return [sys.executable, str(HERE / "grpo_side.py"), options.workload, side, given, str(options.rounds + 1), folder]


def main(options: argparse.Namespace) -> None:
    workload = WORKLOADS[options.workload]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_models(workload, Path(folder), names=("policy",))
        commands = {side: command(side, options, folder) for side in options.sides}
        measured = in_turn(commands, options.rounds, options.threads)
    measured_rates = rates(workload)
    floors = {}
    for side, fields in HFPPO.items():
        more = (fields.get("num_generations", 1), fields.get("critic_layers"))
        least = floor(workload, fields["critic"], *measured_rates, *more)
        floors[side] = {name: seconds for name, seconds in least.items() if name != "reward model"}
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "trl"))
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"    python tests/benchmarks/grpo.py {' '.join(sys.argv[1:])}\n")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load at the end {load}, threads: {options.threads}"
    print(f"Workload {options.workload}, {machine}, {packages}, {date.today():%d %B %Y}.\n")
    print_totals(measured, workload, TRL)
    sampling, passes = (f"{number / 1e9:.0f}" for number in measured_rates)
    print(f"\nMatrix products: {passes} GFLOP/s per processor, {sampling} with one token per row.")
    print_phases(measured, CLOCKS[1], floors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="smollm2")
    parser.add_argument("--rounds", type=int, default=6, help="rollouts of each side, after the one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=[*HFPPO, TRL], default=[*HFPPO, TRL])
    main(parser.parse_args())
