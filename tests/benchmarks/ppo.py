"""Seconds, tokens per second and memory of a fixed PPO workload, by hfppo and by TRL's PPOTrainer.

    python tests/benchmarks/ppo.py [--workload A] [--rounds 10] [--threads 2] [--trl_python PATH]
                                   [--policy_mode bypass] [--torch_compile]
                                   [--max_tokens_per_micro_batch 1024] [--critic_layers 2]

Each side is a process, and they take turns: in a round each does one rollout with its updates, and waits while the
others do theirs, so that all see the machine's moods. Without `--trl_python` hfppo runs alone. TRL 1.12.0 is the last
release with a PPOTrainer; it wants an environment of its own:

    python -m venv trl112 && trl112/bin/pip install torch==2.13.0
    trl112/bin/pip install trl==1.12.0 transformers==5.23.0 peft==0.21.2 accelerate datasets

    python tests/benchmarks/ppo.py --trl_python trl112/bin/python

Prints Markdown: medians over the rounds, from the least to the most, and ratios to TRL round by round. The first
rollout of a process warms up and does not count. Beside the seconds on the clock stand those of the processor, summed
over threads, which other programs on the machine change less; with one thread the two are the same on an idle machine.

TRL takes the sampler's log-probs for the old ones, as `--policy_mode bypass` does; the default of hfppo is another
pass. `--torch_compile` adds hfppo with compiled layers. (TRL 1.12.0 takes that field, but its passes do not go through
what it compiles, and its times stay.) `--max_tokens_per_micro_batch`, which changes no gradient, is hfppo's as well.
`--critic_layers` adds an adapter critic of the top layers, this many.

With a GPU, `--workload qwen2.5-0.5b`, `qwen2.5-1.5b` or `qwen2.5-7b`, with `--nf4` for a quantized policy, do the same
in bfloat16 with random weights of those shapes: up to 1024 + 512 tokens, 256 prompts, 8 for 7B. There the sides run
one after another, since their memory would add up. These have not been run yet; `tests/gpu/kit.py` runs some of them.
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
TRL = "TRL 1.12.0"
OPTIONS = ("policy_mode", "max_tokens_per_micro_batch")  # of hfppo, passed on


def hfppo_sides(options: argparse.Namespace) -> dict[str, dict]:
    """The critic, and other fields, of each of hfppo's sides."""
    sides: dict[str, dict] = {f"hfppo, critic='{critic}'": {"critic": critic} for critic in ("adapter", "shared")}
    if (layers := options.critic_layers) is not None:
        sides[f"hfppo, critic_layers={layers}"] = {"critic": "adapter", "critic_layers": layers}
    compiled = {f"{side}, compiled": {**chosen, "torch_compile": True} for side, chosen in sides.items()}
    return {**sides, **compiled} if options.torch_compile else sides


def command(side: str, options: argparse.Namespace, folder: str) -> list[str]:
    """What starts the process of a side."""
    rest = [str(options.rounds + 1), folder, "nf4" if options.nf4 else "none"]
    if side == TRL:
        return [options.trl_python, str(HERE / "ppo_trl.py"), options.workload, *rest]
    fields = {name: getattr(options, name) for name in OPTIONS}
    fields |= hfppo_sides(options)[side]
    critic = fields.pop("critic")
    return [sys.executable, str(HERE / "ppo_hfppo.py"), options.workload, critic, json.dumps(fields), *rest]


def main(options: argparse.Namespace) -> None:
    workload = WORKLOADS[options.workload]
    torch.set_num_threads(options.threads)
    ours = hfppo_sides(options)
    sides = [*ours, *([TRL] if options.trl_python else ())]
    cuda = torch.cuda.is_available()
    measured: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_models(workload, Path(folder))
        for together in [[side] for side in sides] if cuda else [sides]:
            measured |= in_turn(
                {side: command(side, options, folder) for side in together}, options.rounds, options.threads
            )
    measured_rates = rates(workload)
    floors = {
        side: floor(
            workload, chosen["critic"], options.policy_mode, *measured_rates, critic_layers=chosen.get("critic_layers")
        )
        for side, chosen in ours.items()
        if "torch_compile" not in chosen
    }
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "accelerate"))
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"    python tests/benchmarks/ppo.py {' '.join(sys.argv[1:])}\n")
    print(f"Workload {options.workload}, threads: {options.threads}, {device}, {packages}, {date.today():%d %B %Y}.\n")
    print_totals(measured, workload, TRL)
    sampling, passes = (f"{number / 1e9:.0f}" for number in measured_rates)
    print(f"\nMatrix products: {passes} GFLOP/s per processor, {sampling} with one token per row.")
    print_phases(measured, CLOCKS[0 if cuda else 1], floors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="A")
    parser.add_argument("--rounds", type=int, default=10, help="rollouts of each side, after the one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl_python", help="interpreter of an environment with TRL 1.12.0")
    parser.add_argument("--policy_mode", default="decoupled", choices=["decoupled", "bypass"])
    parser.add_argument("--torch_compile", action="store_true", help="measure hfppo with compiled layers as well")
    parser.add_argument("--max_tokens_per_micro_batch", type=int)
    parser.add_argument("--critic_layers", type=int, help="measure an adapter critic of this many layers as well")
    parser.add_argument("--nf4", action="store_true", help="with the policy's base in NF4; needs bitsandbytes")
    main(parser.parse_args())
