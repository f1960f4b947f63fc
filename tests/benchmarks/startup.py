"""Seconds and memory from a dataset to a trainer that is ready to train, by the number of prompts.

    PYTHONPATH=recipes/gsm8k python tests/benchmarks/startup.py [--prompts 10000 100000 1000000]

The problems of recipes/gsm8k, each with a number before it, as text: the dataset lies on disk and is memory-mapped.
The model is the one of build_tiny_base.py there. Each start in a process of its own, which makes one trainer of 16
prompts first, so that imports and the model are not counted; a second start finds what the first has stored. Processor
seconds are those of all threads: on a busy machine they tell more. Prints a Markdown table.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from build_tiny_base import PROBLEMS, build
from datasets import Dataset, load_from_disk

from hfppo import PPOConfig, PPOTrainer


def make_rows(prompts: int, folder: Path) -> None:
    """Write the prompts to disk."""
    problems = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()]

    def rows():
        for number in range(prompts):
            yield {"prompt": f"{number}. {problems[number % len(problems)]}"}

    made = Dataset.from_generator(rows, cache_dir=str(folder / "generated"))
    made.save_to_disk(folder / "rows")


def start(rows: Dataset, folder: Path) -> dict[str, float]:
    """Make a trainer; return the seconds that it takes, and the tokens of its longest prompt."""
    args = PPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, max_completion_length=16, max_steps=1, report_to="none"
    )
    began = time.perf_counter(), time.process_time()
    trainer = PPOTrainer(
        model=str(folder / "model"), reward_funcs=lambda completions, **_: [0.0], args=args, train_dataset=rows
    )
    seconds, of_processor = time.perf_counter() - began[0], time.process_time() - began[1]
    return {"seconds": seconds, "processor": of_processor, "longest": trainer._train_prompts.longest}


def peak() -> int:
    """Bytes that this process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: Path) -> None:
    """Print what `start` returns, and the bytes on top of those of a small start."""
    rows = load_from_disk(folder / "rows")
    start(rows.select(range(16)), folder)
    before = peak()
    found = start(rows, folder)
    print(json.dumps({**found, "bytes": peak() - before}))


def main(options: argparse.Namespace) -> None:
    if options.case:
        measure(options.case)
        return
    print("| prompts | start | seconds | processor seconds | memory | longest prompt |")
    print("|---|---|---|---|---|---|")
    for prompts in options.prompts:
        with tempfile.TemporaryDirectory() as name:
            build(f"{name}/model")
            make_rows(prompts, Path(name))
            for number in ("first", "second"):
                case = [sys.executable, __file__, "--case", name]
                out = subprocess.run(case, stdout=subprocess.PIPE, text=True, check=True).stdout
                found = json.loads(out.splitlines()[-1])
                times = f"{found['seconds']:.1f} | {found['processor']:.1f}"
                memory = f"{found['bytes'] / 2**20:.0f} MiB"
                print(f"| {prompts:,} | {number} | {times} | {memory} | {found['longest']} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--case", type=Path)
    main(parser.parse_args())
