"""Advantage estimators on the lake game, by equal numbers of games: a critic against the estimators without one.

    python tests/benchmarks/estimators.py --methods gae rloo --learning_rates 5e-4 1e-3 2e-3 --seeds 0 1
    python tests/benchmarks/estimators.py --report

Each run writes its result as JSON when it ends; a result that exists is not measured again. Settings are those of
`recipes/lake.yaml` where a method does not say otherwise. The report is a table of all runs, and `curves.png`, which
shows each method at the learning rate with most seeds.
"""

import functools
import gc
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from transformers import HfArgumentParser

from hfppo import PPOConfig, PPOTrainer

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))
from build_lake_base import PROMPT  # noqa: E402
from lake_game import Lake, expected_return, uniform_policy  # noqa: E402

WINDOW = 5  # rollouts
LEVELS = (0.5, 0.7, 0.9)  # shares of the way from uniform play to the optimum


class ReplayedLake(Lake):
    """The game with the same luck in each turn for all games of a group, whatever they play."""

    def reset(self, seed: int, **row: Any) -> str:
        """Begin; see `Lake`."""
        self.seed = seed
        return super().reset(seed=seed)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn with luck from the seed and the number of the turn."""
        random.seed(f"{self.seed} {self.turn}")
        return super().step(text)


class FinalRewardLake(Lake):
    """The game with all rewards at its end."""

    def reset(self, seed: int, **row: Any) -> str:
        """Begin; see `Lake`."""
        self.total = 0.0
        return super().reset(seed=seed)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn, and keep its reward until the last."""
        observation, reward, terminated, truncated, info = super().step(text)
        self.total += reward
        return observation, self.total if terminated else 0.0, terminated, truncated, info


@dataclass(frozen=True)
class Method:
    """An estimator with its settings, and the game it plays."""

    estimator: str
    settings: dict[str, Any] = field(default_factory=dict)
    game: type[Lake] = Lake


GROUPS = {"num_generations": 8}
METHODS = {
    "gae": Method("gae"),
    "gae_lam_1": Method("gae", {"lam": 1.0}),
    "reinforce_plus_plus": Method("reinforce_plus_plus"),
    "reinforce_plus_plus_gamma_0.95": Method("reinforce_plus_plus", {"gamma": 0.95}),
    "rloo": Method("rloo", GROUPS),
    "grpo": Method("grpo", GROUPS),
    "rloo_replayed": Method("rloo", GROUPS, ReplayedLake),
    "grpo_replayed": Method("grpo", GROUPS, ReplayedLake),
    "gae_final_reward": Method("gae", game=FinalRewardLake),
    "reinforce_plus_plus_final_reward": Method("reinforce_plus_plus", game=FinalRewardLake),
    "rloo_final_reward": Method("rloo", GROUPS, FinalRewardLake),
}


@dataclass
class BenchmarkArguments:
    """Arguments of this script."""

    output_dir: str = field(default="out/estimators", metadata={"help": "Folder of the results."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": "Names in METHODS."})
    learning_rates: list[float] = field(default_factory=lambda: [1e-3], metadata={"help": "Of the actor."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    games: int = field(default=3072, metadata={"help": "Games per run."})
    num_eval_games: int = field(default=512, metadata={"help": "Games played after a run."})
    report: bool = field(default=False, metadata={"help": "Print the results as a table instead of measuring."})


@functools.cache
def share_of_way(total: float) -> float:
    """Return a return as the share of the way from uniform play to the optimum."""
    start = expected_return(uniform_policy())
    return (total - start) / (expected_return() - start)


def measure(name: str, learning_rate: float, seed: int, args: BenchmarkArguments) -> dict[str, Any]:
    """Train once, and return the result."""
    method = METHODS[name]
    recipe = yaml.safe_load((RECIPES / "lake.yaml").read_text())
    lora = LoraConfig(r=recipe.pop("lora_r"), lora_alpha=recipe.pop("lora_alpha"), target_modules="all-linear")
    settings = recipe | {
        "output_dir": args.output_dir + "/run",
        "advantage_estimator": method.estimator,
        "learning_rate": learning_rate,
        "seed": seed,
        "total_episodes": args.games,
        "max_steps": -1,
        "use_cpu": True,
        "disable_tqdm": True,
        **method.settings,
    }
    trainer = PPOTrainer(
        model=str(RECIPES / "lake/base"),
        environment_factory=method.game,
        args=PPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
        eval_dataset=Dataset.from_dict({"prompt": [PROMPT] * args.num_eval_games}),
        peft_config=lora,
    )
    clock, cpu_clock = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu_clock
    with trainer.eval_sampling(True):
        final = trainer.evaluate()["eval_reward"]
    history = trainer.state.log_history
    return {
        "method": name,
        "learning_rate": learning_rate,
        "seed": seed,
        "games": args.games,
        "curve": [entry["reward"] for entry in history if "reward" in entry],
        "explained_variance": [e["value/explained_variance"] for e in history if "value/explained_variance" in e],
        "final_return": final,
        "final_share": share_of_way(final),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def smooth(curve: list[float]) -> np.ndarray:
    """Return the means of `WINDOW` rollouts in a row."""
    return np.convolve(curve, np.ones(WINDOW) / WINDOW, mode="valid")


def games_to(level: float, result: dict[str, Any]) -> float:
    """Return the games until the mean return of `WINDOW` rollouts reaches a share of the way; NaN: never."""
    reached = np.flatnonzero([share_of_way(total) >= level for total in smooth(result["curve"])])
    return (reached[0] + WINDOW) * result["games"] / len(result["curve"]) if len(reached) else float("nan")


def report(results: list[dict[str, Any]]) -> None:
    """Print a line for each method and learning rate, with all seeds."""

    def key(result: dict[str, Any]) -> tuple[int, str, float]:
        return result["games"], result["method"], result["learning_rate"]

    levels = " | ".join(f"games to {level:.0%}" for level in LEVELS)
    print(f"| method | learning rate | games | share of the way, by seed | mean | {levels} | CPU s |")
    print("|" + "---|" * (6 + len(LEVELS)))
    for (games, name, rate), group in itertools.groupby(sorted(results, key=key), key):
        runs = sorted(group, key=lambda run: run["seed"])
        shares = [run["final_share"] for run in runs]
        to = [", ".join(f"{games_to(level, run):.0f}".replace("nan", "–") for run in runs) for level in LEVELS]
        seconds = np.mean([run["cpu_seconds"] for run in runs])
        by_seed = ", ".join(f"{share:.2f}" for share in shares)
        print(
            f"| {name} | {rate:g} | {games} | {by_seed} | {np.mean(shares):.2f} | {' | '.join(to)} | {seconds:.0f} |"
        )


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Draw the share of the way during training: a line for each method, in a band over all of its seeds."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    by_method: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for result in results:
        by_method.setdefault(result["method"], {}).setdefault(result["learning_rate"], []).append(result)
    for method, by_rate in sorted(by_method.items()):
        rate, runs = max(by_rate.items(), key=lambda item: len(item[1]))
        shares = np.array([[share_of_way(total) for total in smooth(run["curve"])] for run in runs])
        games = np.arange(WINDOW, WINDOW + shares.shape[1]) * runs[0]["games"] / len(runs[0]["curve"])
        (line,) = axes.plot(games, shares.mean(axis=0), label=f"{method}, {rate:g} ({len(runs)})")
        axes.fill_between(games, shares.min(axis=0), shares.max(axis=0), alpha=0.12, color=line.get_color())
    axes.set(xlabel="games", ylabel="share of the way to the optimum", ylim=(-0.1, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def main(args: BenchmarkArguments) -> None:
    torch.set_num_threads(1)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if args.report:
        results = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        report(results)
        plot(results, folder / "curves.png")
        return
    for seed, name, rate in itertools.product(args.seeds, args.methods, args.learning_rates):
        file = folder / f"{name}_{rate:g}_{args.games}_{seed}.json"
        if not file.exists():
            result = measure(name, rate, seed, args)
            file.write_text(json.dumps(result))
            print(
                f"{file.stem}: {result['final_share']:.3f} of the way, {result['cpu_seconds']:.0f} CPU s", flush=True
            )
            gc.collect()


if __name__ == "__main__":
    main(HfArgumentParser(BenchmarkArguments, allow_abbrev=False).parse_args_into_dataclasses()[0])
