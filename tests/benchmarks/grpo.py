"""Seconds by phase, tokens per second and memory of the same work, by hfppo and by TRL's GRPOTrainer.

    python tests/benchmarks/grpo.py [--workload smollm2] [--num_generations 4] [--rounds 6] [--threads 2]
                                    [--sides TRL grpo …]

Both train the same LoRA on the same model with random weights, prompts, group size, full completions, passes (old and
reference log-probs) and optimizer steps. As in `ppo.py`, which shares the machinery, each side is a process, they take
turns rollout by rollout, and the first rollout of each warms up and does not count.

The sides of hfppo are `grpo`, with the KL in the loss as TRL has it; PPO with the shared critic, with the adapter
critic, and with one of the top ten layers; and, where named in `--sides`, `grpo` with every prompt computed for each
of its completions. Prints Markdown: medians over the rounds, from the least to the most, ratios to TRL round by round,
and hfppo's phases beside the time that their matrix products would take at the machine's measured rate.
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
GRPO = {"advantage_estimator": "grpo", "kl_coef": 0.0, "kl_loss_coef": 0.05}  # β of the workload, as TRL has it
PPO = {"vf_coef": 1.0, "cliprange_value": None}
HFPPO = {
    "grpo": GRPO,
    "PPO, critic='shared'": {**PPO, "critic": "shared"},
    "PPO, critic='adapter'": {**PPO, "critic": "adapter"},
    "PPO, critic_layers=10": {**PPO, "critic": "adapter", "critic_layers": 10},
}
APART = {"grpo, prompts apart": {**GRPO, "share_prompts": False}}


def command(side: str, options: argparse.Namespace, folder: str) -> list[str]:
    """What starts the process of a side."""
    given = TRL if side == TRL else json.dumps({**HFPPO, **APART}[side])
    rest = [str(options.num_generations), str(options.rounds + 1), folder]
    return [sys.executable, str(HERE / "grpo_side.py"), options.workload, given, *rest]


def main(options: argparse.Namespace) -> None:
    workload = WORKLOADS[options.workload]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_models(workload, Path(folder), names=("policy",))
        commands = {side: command(side, options, folder) for side in options.sides}
        measured = in_turn(commands, options.rounds, options.threads)
    measured_rates = rates(workload)
    floors = {}
    for side, fields in {**HFPPO, **APART}.items():
        critic = None if fields.get("advantage_estimator") == "grpo" else fields["critic"]
        group = (options.num_generations, side not in APART, fields.get("critic_layers"))
        least = floor(workload, critic, "decoupled", *measured_rates, *group)
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
    parser.add_argument("--num_generations", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--rounds", type=int, default=6, help="rollouts of each side, after the one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=[TRL, *HFPPO, *APART], default=[TRL, *HFPPO])
    main(parser.parse_args())
