"""What the default settings learn on three tasks of a real model: sums, a style, a format.

    python recipes/build_smollm2.py
    python tests/benchmarks/defaults.py --task style [--seed 1] [--fields '{"learning_rate": 5e-5}'] > FILE
    python tests/benchmarks/defaults.py --draw FILE … --picture out/defaults.png

`sums` are one-digit sums and differences, right or wrong. `style` wants sentences that VADER finds positive and needs
vaderSentiment. `format` wants a numbered list of two words. Held-out prompts are completed before and after, sampled
and greedily. `--fields` replaces defaults of PPOConfig. Prints Markdown; seconds are the processor's. The second
command draws the rewards of such runs, a line for each.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from matplotlib.lines import Line2D

from hfppo import PPOConfig, PPOTrainer

Row = dict[str, str]
OF_COMPLETIONS = ("reward", "completions/mean_length", "completions/truncated_frac")
OF_ROLLOUTS = ("reward", "kl", "policy/approx_kl", "policy/clip_frac", "value/explained_variance")
THINGS = """rain, bread, stairs, a bus, winter, paper, a clock, mud, the sea, a spoon, trains, salt, a wall, dust, fog,
a shoe, the moon, tea, a bridge, noise, a map, snow, a door, stones, a lamp, wind, a desk, sand, a road, glass, a hill,
wood, ink, a roof, the night, a key, milk, a chair, wool, a fence, smoke, an engine, rope, a bell, ice, a window,
grass, a tunnel, iron, a coat, clouds, a table"""
KINDS = """animals birds boats cakes cars cities coins colors countries dances drinks fabrics fish flowers fruits games
gems herbs hobbies insects islands jobs lakes languages letters metals months mountains nuts planets plants rivers seas
seasons shapes shoes snakes songs spices sports stars tools toys trees vegetables weapons"""


def sums() -> list[Row]:
    asked = "State the final answer to the following arithmetic problem: {} {} {} =\n\nAnswer with just the result."
    pairs = [(a, sign, b) for a in range(10) for b in range(10) for sign in "+-"]
    return [
        {"asked": asked.format(a, sign, b), "answer": str(a + b if sign == "+" else a - b)} for a, sign, b in pairs
    ]


def right(completion: str, answer: str) -> float:
    """Whether the last number is the answer."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


def style() -> list[Row]:
    kinds = ("short", "simple", "new", "plain")
    return [
        {"asked": f"Write a {kind} sentence about {thing}."} for kind in kinds for thing in re.split(r",\s", THINGS)
    ]


def positive(completion: str) -> float:
    """VADER's sentiment, from −1 to 1."""
    return judge().polarity_scores(completion)["compound"]


@cache
def judge() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def lists() -> list[Row]:
    verbs = ("List", "Name", "Give", "Write down")
    return [
        {"asked": f"{verb} two {kind}, numbered 1. and 2., one word each."} for verb in verbs for kind in KINDS.split()
    ]


def numbered(completion: str) -> float:
    """The share of lines in order and form, of two or of however many there are."""
    lines = completion.split("\n")
    good = sum(re.fullmatch(rf"{number}\. \w+", line) is not None for number, line in enumerate(lines[:2], 1))
    return good / max(2, len(lines))


TASKS: dict[str, tuple[Callable[[], list[Row]], Callable[..., float], int]] = {
    "sums": (sums, right, 12),
    "style": (style, positive, 16),
    "format": (lists, numbered, 16),
}  # prompts with what their score needs, the score, the most tokens


def datasets(rows: list[Row], held_out: int) -> tuple[Dataset, Dataset]:
    """Return prompts to train on, and others to evaluate on, which are the same for all seeds."""
    rows = random.Random(0).sample(rows, len(rows))
    prompts = [{"prompt": [{"role": "user", "content": row["asked"]}], **row} for row in rows]
    return Dataset.from_list(prompts[held_out:]), Dataset.from_list(prompts[:held_out])


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    make_rows, score, longest = TASKS[options.task]
    train, test = datasets(make_rows(), options.held_out)
    needed = [name for name in train.column_names if name not in ("prompt", "asked")]

    def reward(completions: list[list[Row]], **columns: Any) -> list[float]:
        given = zip(completions, *(columns[name] for name in needed), strict=True)
        return [score(messages[-1]["content"].strip(), *more) for messages, *more in given]

    own = {"max_completion_length": longest, "seed": options.seed, "save_strategy": "no", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(folder, **own, use_cpu=True, disable_tqdm=True, **options.fields)
        args.max_steps = options.rollouts * args.updates_per_rollout
        trainer = PPOTrainer(options.model, reward, args, train, test)

        def evaluate() -> list[dict[str, float]]:
            found = []
            for do_sample in (True, False):
                with trainer.eval_sampling(do_sample):
                    found.append(trainer.evaluate())
            return found

        before, start = evaluate(), time.process_time()
        trainer.train()
        seconds, after = time.process_time() - start, evaluate()
    logs = [log for log in trainer.state.log_history if "kl" in log]
    print(f"    python tests/benchmarks/defaults.py {' '.join(sys.argv[1:])}\n")
    print(f"{options.rollouts} rollouts of {args.rollout_size_per_process} completions, {seconds:.0f} s.\n")
    print("| | sampled, before | after | greedy, before | after |\n|---|---|---|---|---|")
    for name in OF_COMPLETIONS:
        cells = (f"{one[f'eval_{name}']:.3f}" for one in (before[0], after[0], before[1], after[1]))
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\n| rollout | {' | '.join(map(str, range(1, len(logs) + 1)))} |\n|---{'|---' * len(logs)}|")
    for name in OF_ROLLOUTS:
        print(f"| {name} | {' | '.join(f'{log[name]:.3f}' for log in logs)} |")


def draw(files: list[Path], picture: Path) -> None:
    """Draw the rewards of runs over their rollouts, a panel for each task."""
    figure, panels = plt.subplots(1, len(TASKS), figsize=(12, 4), layout="constrained")
    shown, lines = dict(zip(TASKS, panels, strict=True)), {}  # panels by task, colors by name
    for file in sorted(files):
        text = file.read_text()
        task, seed = re.search(r"--task (\w+)", text)[1], re.search(r"--seed (\d)", text)
        fields = json.loads((re.search(r"--fields ({.*})", text) or ["", "{}"])[1])
        settings = ", ".join(f"{name}={value:g}" for name, value in fields.items()) or "defaults"
        name = f"{settings}, seed {seed[1] if seed else 0}"
        *_, row = re.findall(r"^\| reward \|(.*)\|$", text, re.MULTILINE)  # the first is of the evaluations
        rewards = [float(cell) for cell in row.split("|")]
        lines[name] = lines.get(name) or f"C{len(lines)}"
        shown[task].plot(range(1, len(rewards) + 1), rewards, marker=".", color=lines[name])
    for task, axes in shown.items():
        axes.set(title=task, xlabel="rollout", ylabel="reward")
        axes.grid(alpha=0.3)
    figure.legend(
        [Line2D([], [], color=color) for color in lines.values()], lines, loc="outside lower center", ncols=2
    )
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--model", default="out/smollm2", help="id or folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--held_out", type=int, default=64, help="prompts of an evaluation")
    parser.add_argument("--fields", type=json.loads, default={}, help="other fields of PPOConfig, as JSON")
    parser.add_argument("--draw", type=Path, nargs="+", default=[], help="outputs of runs; draws instead of measuring")
    parser.add_argument("--picture", type=Path, default="out/defaults.png")
    options = parser.parse_args()
    if options.draw:
        draw(options.draw, options.picture)
    elif options.task is None:
        parser.error("--task or --draw")
    else:
        main(options)
