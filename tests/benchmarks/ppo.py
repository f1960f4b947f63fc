"""Seconds, tokens per second and memory of a fixed PPO workload, by hfppo and by TRL's PPOTrainer.

    python tests/benchmarks/ppo.py [--workload A] [--rounds 3] [--rollouts 3] [--threads 2] [--trl_python PATH]
                                   [--policy_mode bypass] [--torch_compile] [--merge_adapters]
                                   [--max_tokens_per_micro_batch 1024]

Each side runs in processes of its own, in alternation, so that all see the machine's moods. Without `--trl_python`
hfppo runs alone. TRL 1.12.0 is the last release with a PPOTrainer; it wants an environment of its own:

    python -m venv trl112 && trl112/bin/pip install torch==2.13.0
    trl112/bin/pip install trl==1.12.0 transformers==5.23.0 peft==0.21.2 accelerate datasets

    python tests/benchmarks/ppo.py --trl_python trl112/bin/python

Prints Markdown. The first rollout of a process warms up and does not count. Beside the seconds on the clock stand
those of the processor, summed over threads, which other programs on the machine hardly change; with one thread the
two are the same on an idle machine.

TRL takes the sampler's log-probs for the old ones, as `--policy_mode bypass` does; the default of hfppo is another
pass. `--torch_compile` adds hfppo with compiled layers. (TRL 1.12.0 takes that field, but its passes do not go through
what it compiles, and its times stay.) `--merge_adapters` and `--max_tokens_per_micro_batch`, which change no gradient,
are hfppo's as well.

With a GPU, `--workload qwen2.5-0.5b`, `qwen2.5-1.5b` or `qwen2.5-7b`, with `--nf4` for a quantised policy, do the same
in bfloat16 with random weights of those shapes: 512 + 1024 tokens, 32 prompts. These have not been run yet.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from ppo_floor import floor, rates
from ppo_workload import WORKLOADS, Workload, write_models

HERE = Path(__file__).parent
HFPPO = {f"hfppo, critic='{critic}'": {"critic": critic} for critic in ("adapter", "shared")}
COMPILED = {f"{side}, compiled": {**chosen, "torch_compile": True} for side, chosen in HFPPO.items()}
TRL = "TRL 1.12.0"
OPTIONS = ("policy_mode", "merge_adapters", "max_tokens_per_micro_batch")  # of hfppo, passed on


def command(side: str, options: argparse.Namespace, folder: str) -> list[str]:
    """What starts one process of a side."""
    rest = [str(options.rollouts + 1), folder, "nf4" if options.nf4 else "none"]
    if side == TRL:
        return [options.trl_python, str(HERE / "ppo_trl.py"), options.workload, *rest]
    fields = {name: getattr(options, name) for name in OPTIONS}
    fields |= {**HFPPO, **COMPILED}[side]
    critic = fields.pop("critic")
    return [sys.executable, str(HERE / "ppo_hfppo.py"), options.workload, critic, json.dumps(fields), *rest]


def run(side: str, options: argparse.Namespace, folder: str) -> dict:
    """What one process of a side measured."""
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command(side, options, folder), env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def totals(runs: list[dict], clock: str) -> list[float]:
    """Seconds of every rollout that counts."""
    return [sum(phases.values()) for found in runs for phases in found[clock]]


def middle_phases(runs: list[dict], clock: str) -> dict[str, float]:
    """The median seconds of each phase."""
    rollouts = [phases for found in runs for phases in found[clock]]
    return {name: median(phases.get(name, 0.0) for phases in rollouts) for name in rollouts[0]}


def print_totals(measured: dict[str, list[dict]], workload: Workload) -> None:
    """The table of seconds, tokens and memory."""
    print("| | s per rollout | ratio | processor s | ratio | tokens per s | completion tokens | peak MB | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    base = measured.get(TRL)
    for side, runs in measured.items():
        wall, cpu = totals(runs, "seconds"), totals(runs, "cpu_seconds")
        peak = median(found["peak"] for found in runs)
        tokens = sorted({tokens for found in runs for tokens in found["tokens"]})
        ratios = ["–"] * 3
        if base:
            others = (median(totals(base, "seconds")), median(totals(base, "cpu_seconds")))
            others = (*others, median(found["peak"] for found in base))
            ratios = [f"{a / b:.2f}" for a, b in zip((median(wall), median(cpu), peak), others, strict=True)]
        print(
            f"| {side} | {median(wall):.2f} ({min(wall):.2f}–{max(wall):.2f}) | {ratios[0]} "
            f"| {median(cpu):.2f} ({min(cpu):.2f}–{max(cpu):.2f}) | {ratios[1]} "
            f"| {workload.new_in_all / median(wall):.0f} | {', '.join(map(str, tokens))} "
            f"| {peak / 1e6:.0f} | {ratios[2]} |"
        )


def print_phases(measured: dict[str, list[dict]], clock: str, floors: dict[str, dict[str, float]]) -> None:
    """The table of phases, with the floor of hfppo's."""
    found = {side: middle_phases(runs, clock) for side, runs in measured.items()}
    names = list(dict.fromkeys(name for phases in found.values() for name in phases))
    heads = [title for side in found for title in ((side, "floor", "distance") if side in floors else (side,))]
    print(f"\n| seconds, {clock.replace('_', ' ')} | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|")
    for name in [*names, "all"]:
        cells = []
        for side, phases in found.items():
            seconds = sum(phases.values()) if name == "all" else phases.get(name, 0.0)
            cells.append(f"{seconds:.2f}")
            if side in floors:
                least = sum(floors[side].values()) if name == "all" else floors[side].get(name, 0.0)
                cells += [f"{least:.2f}", f"{seconds / least:.1f}"] if least else ["–", "–"]
        print(f"| {name} | {' | '.join(cells)} |")


def main(options: argparse.Namespace) -> None:
    workload = WORKLOADS[options.workload]
    torch.set_num_threads(options.threads)
    sides = [*HFPPO, *(COMPILED if options.torch_compile else ()), *([TRL] if options.trl_python else ())]
    measured: dict[str, list[dict]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        write_models(workload, Path(folder))
        for _ in range(options.rounds):
            for side in sides:
                measured[side].append(run(side, options, folder))
    measured_rates = rates(workload)
    floors = {
        side: floor(workload, chosen["critic"], options.policy_mode, *measured_rates) for side, chosen in HFPPO.items()
    }
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "accelerate"))
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"    python tests/benchmarks/ppo.py {' '.join(sys.argv[1:])}\n")
    print(f"Workload {options.workload}, threads: {options.threads}, {device}, {packages}, {date.today():%d %B %Y}.\n")
    print_totals(measured, workload)
    sampling, passes = (f"{number / 1e9:.0f}" for number in measured_rates)
    print(f"\nMatrix products: {passes} GFLOP/s per processor, {sampling} with one token per row.")
    print_phases(measured, "seconds" if cuda else "cpu_seconds", floors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="A")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--rollouts", type=int, default=3, help="per process, after the one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl_python", help="interpreter of an environment with TRL 1.12.0")
    parser.add_argument("--policy_mode", default="decoupled", choices=["decoupled", "bypass"])
    parser.add_argument("--torch_compile", action="store_true", help="measure hfppo with compiled layers as well")
    parser.add_argument("--merge_adapters", action="store_true")
    parser.add_argument("--max_tokens_per_micro_batch", type=int)
    parser.add_argument("--nf4", action="store_true", help="with the policy's base in NF4; needs bitsandbytes")
    main(parser.parse_args())
