"""How long episodes with slow tools take, each at its own pace, beside turns that wait for their slowest tool.

    PYTHONPATH=tests:recipes/arithmetic python tests/benchmarks/pace.py \\
        [--rows 64] [--turns 8] [--scale 0.25] [--sampling 0.1]

Each turn calls a tool that sleeps for 0.02 to 2 s, times `--scale`: more than t seconds with probability 0.02 / t. The
script of a sampler takes `--sampling` seconds for each batch, whatever its rows. "In step" is computed from the same
sleeps: the slowest tool of each turn, all tools of a turn at once, and a batch for each turn; "one after the other" is
the sum of all. Prints a Markdown table, and checks that the episodes are those of tools that do not sleep.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from helpers.agents import Script, TextEnvironment, agent_trainer, call, count_messages
from hfppo import Sample


def draw_sleeps(rows: int, turns: int, scale: float) -> list[list[float]]:
    """Return the seconds of each row's tools."""
    luck = random.Random(0)
    return [[scale * min(0.02 * luck.paretovariate(1.0), 2.0) for _ in range(turns)] for _ in range(rows)]


class Slow(Script):
    """A script that takes its time for each batch."""

    seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.seconds)
        return super().__call__(*args, **kwargs)


def arguments_of(kind: str, sleeps: list[list[float]]) -> dict[str, Any]:
    """Return the trainer's arguments for tools of a kind that sleep so long."""

    def plain(row: int, turn: int) -> str:
        """
        Wait.

        Args:
            row: the row
            turn: the turn
        """
        time.sleep(sleeps[row][turn])
        return f"{row % 4} {turn}"

    async def asynchronous(row: int, turn: int) -> str:
        """
        Wait.

        Args:
            row: the row
            turn: the turn
        """
        await asyncio.sleep(sleeps[row][turn])
        return f"{row % 4} {turn}"

    class Waiting(TextEnvironment):
        def reset(self, start: int, **row: Any) -> str:
            self.start, self.turn = start, 0
            return ""

        def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if self.turn < len(sleeps[self.start]):
                time.sleep(sleeps[self.start][self.turn])
            self.turn += 1
            return "ok", 1.0, self.turn > len(sleeps[self.start]), False, {}

    if kind == "step":
        return {"environment_factory": Waiting}
    tool: Callable[..., Any] = {"plain": plain, "async": asynchronous}[kind]
    tool.__name__ = "wait"
    return {"tools": [tool], "reward_funcs": count_messages}


def play(kind: str, sleeps: list[list[float]], sampling: float) -> tuple[list[Sample], float, int]:
    """Return the episodes, their seconds, and the number of batches."""
    rows, turns = len(sleeps), len(sleeps[0])
    prompts = [{"prompt": [{"role": "user", "content": f"go {row:03d} "}], "start": row} for row in range(rows)]
    scripts = [[*(call("wait", row=row, turn=turn) for turn in range(turns)), "a"] for row in range(rows)]
    with tempfile.TemporaryDirectory() as folder:
        config = {"max_completion_length": 100 * turns, "per_device_train_batch_size": rows}
        trainer = agent_trainer(
            folder,
            dataset=Dataset.from_list(prompts),
            config=config,
            positions=200 * turns,
            **arguments_of(kind, sleeps),
        )
        sampler = Slow(trainer.processing_class, *scripts)
        sampler.seconds = sampling
        collector = trainer.collector.__class__(**{**vars(trainer.collector), "sampler": sampler})
        given = collector.eval_rows(trainer._train_prompts)
        start = time.perf_counter()
        episodes = collector.complete(given)
        return episodes, time.perf_counter() - start, len(sampler.calls)


def main(options: argparse.Namespace) -> None:
    sleeps = draw_sleeps(options.rows, options.turns, options.scale)
    awake = [[0.0] * options.turns] * options.rows
    in_step = sum(max(of_turn) for of_turn in zip(*sleeps, strict=True)) + (options.turns + 1) * options.sampling
    one_by_one = sum(map(sum, sleeps)) + (options.turns + 1) * options.sampling
    longest = max(map(sum, sleeps)) + (options.turns + 1) * options.sampling
    print(f"one after the other {one_by_one:.2f} s, in step {in_step:.2f} s, the longest episode {longest:.2f} s\n")
    print("| tools | seconds | of in step | batches | without sleeps, s | same episodes |\n|---|---|---|---|---|---|")
    for kind in ("plain", "async", "step"):
        expected, overhead, _ = play(kind, awake, 0.0)
        found, seconds, batches = play(kind, sleeps, options.sampling)
        same = all(
            (a.ids, a.sampled, a.text, a.turn_rewards) == (b.ids, b.sampled, b.text, b.turn_rewards)
            for a, b in zip(found, expected, strict=True)
        )
        print(f"| {kind} | {seconds:.2f} | {seconds / in_step:.2f} | {batches} | {overhead:.2f} | {same} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--sampling", type=float, default=0.0)
    main(parser.parse_args())
