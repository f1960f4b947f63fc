"""Let several processes take turns, a rollout each, and print what they measured; for `grpo.py`."""

import json
import os
import subprocess
import sys
from statistics import median

from ppo_workload import DONE, Workload

CLOCKS = ("seconds", "cpu_seconds")


class Side:
    """A process that warms up with a rollout, and does another each time it is told to."""

    def __init__(self, name: str, command: list[str], threads: int):
        self.name = name
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait()

    def rollout(self) -> None:
        """Have it do one, and wait for the end."""
        self._go()
        self._wait()

    def measured(self) -> dict:
        """What it measured; it ends with that."""
        self._go()
        return json.loads([*self._process.stdout][-1])

    def _go(self) -> None:
        print(file=self._process.stdin, flush=True)

    def _wait(self) -> None:
        if DONE not in map(str.rstrip, self._process.stdout):
            sys.exit(f"{self.name} failed; its error stands above")


def in_turn(commands: dict[str, list[str]], rounds: int, threads: int) -> dict[str, dict]:
    """What the sides measured, a rollout of each in every round."""
    sides = [Side(name, command, threads) for name, command in commands.items()]
    for _ in range(rounds):
        for side in sides:
            side.rollout()
    return {side.name: side.measured() for side in sides}


def totals(found: dict, clock: str) -> list[float]:
    """Seconds of every rollout that counts."""
    return [sum(phases.values()) for phases in found[clock]]


def middle_phases(found: dict, clock: str) -> dict[str, float]:
    """The median seconds of each phase."""
    return {name: median(phases.get(name, 0.0) for phases in found[clock]) for name in found[clock][0]}


def spread(numbers: list[float]) -> str:
    """The median, the least and the most."""
    return f"{median(numbers):.2f} ({min(numbers):.2f}–{max(numbers):.2f})"


def print_totals(measured: dict[str, dict], workload: Workload, base_name: str) -> None:
    """The table of seconds, tokens and memory; ratios are to the side of that name, if it took part."""
    print("| | s per rollout | ratio | processor s | ratio | tokens per s | completion tokens | peak MB | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    base = measured.get(base_name)
    for side, found in measured.items():
        cells = []
        for clock in CLOCKS:
            own = totals(found, clock)
            ratios = [a / b for a, b in zip(own, totals(base, clock), strict=True)] if base else []
            cells += [spread(own), spread(ratios) if ratios else "–"]
        speed = workload.new_in_all / median(totals(found, CLOCKS[0]))
        tokens = ", ".join(map(str, sorted(set(found["tokens"]))))
        memory = f"{found['peak'] / base['peak']:.2f}" if base else "–"
        print(f"| {side} | {' | '.join(cells)} | {speed:.0f} | {tokens} | {found['peak'] / 1e6:.0f} | {memory} |")


def print_phases(measured: dict[str, dict], clock: str, floors: dict[str, dict[str, float]]) -> None:
    """The table of phases, with the floor of hfppo's."""
    found = {side: middle_phases(own, clock) for side, own in measured.items()}
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
