"""Advantage estimators on shipped tasks, by equal numbers of completions: a critic against the estimators without one.

    python tests/benchmarks/estimators.py --tasks lake --methods gae rloo --learning_rates 5e-4 1e-3 2e-3 --seeds 0 1
    python tests/benchmarks/estimators.py --report

Each run writes its result as JSON when it ends; a result that exists is not measured again. Settings are those of the
task's recipe where a method does not say otherwise. Completions of a critic's pretraining count. The report is a table
of all runs for each task, and `TASK.png`, which shows each method at the learning rate with most seeds.
"""

import functools
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import HfArgumentParser

from hfppo import PPOConfig, PPOTrainer

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))
from arithmetic import FOLDER as ARITHMETIC  # noqa: E402
from arithmetic import right_answer  # noqa: E402
from build_lake_base import PROMPT  # noqa: E402
from lake_game import Lake, expected_return, uniform_policy  # noqa: E402

WINDOW = 5  # rollouts
LEVELS = (0.5, 0.7, 0.9)  # see `Task.share`


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


@functools.cache
def share_of_way(total: float) -> float:
    """Return a game's mean return as the share of the way from uniform play to the optimum."""
    start = expected_return(uniform_policy())
    return (total - start) / (expected_return() - start)


def play(game: type[Lake], num_eval: int) -> dict[str, Any]:
    """Return the trainer's arguments for a form of the lake game."""
    return {
        "model": str(RECIPES / "lake/base"),
        "environment_factory": game,
        "train_dataset": Dataset.from_dict({"prompt": [PROMPT]}),
        "eval_dataset": Dataset.from_dict({"prompt": [PROMPT] * num_eval}),
    }


def judge_sums(num_eval: int) -> dict[str, Any]:
    """Return the trainer's arguments for the sums of `recipes/arithmetic.py`."""
    files = {name: str(ARITHMETIC / f"{name}.jsonl") for name in ("train", "test")}
    rows = load_dataset("json", data_files=files)
    test = rows["test"]
    return {
        "model": str(ARITHMETIC / "base"),
        "reward_funcs": right_answer,
        "train_dataset": rows["train"],
        "eval_dataset": test.select(range(min(num_eval, len(test)))),
    }


@dataclass(frozen=True)
class Task:
    """What the methods learn."""

    recipe: str  # whose YAML file has the settings
    arguments: Callable[[int], dict[str, Any]]  # of the trainer, given the number of completions at the end
    completions: int  # of a run
    pretraining: int  # of these, for the critic's pretraining where a method has it
    share: Callable[[float], float] = float  # what the report shows of a mean score


TASKS = {
    "lake": Task("lake", functools.partial(play, Lake), 3072, 512, share_of_way),
    "lake_replayed": Task("lake", functools.partial(play, ReplayedLake), 3072, 512, share_of_way),
    "lake_final_reward": Task("lake", functools.partial(play, FinalRewardLake), 3072, 512, share_of_way),
    "arithmetic": Task("arithmetic", judge_sums, 5120, 1280),
}


@dataclass(frozen=True)
class Method:
    """An estimator with its settings."""

    estimator: str
    settings: dict[str, Any] = field(default_factory=dict)
    pretrained: bool = False  # whether the critic's pretraining takes its part of the completions


VAPO = {"lam_critic": 1.0, "lam_alpha": 1.0}  # λ = 0.9 for ten tokens
GROUPS = {"num_generations": 8}
METHODS = {
    "gae": Method("gae"),
    "gae_lam_1": Method("gae", {"lam": 1.0}),
    "gae_pretrained": Method("gae", pretrained=True),
    "vapo": Method("gae", VAPO, pretrained=True),
    "reinforce_plus_plus": Method("reinforce_plus_plus"),
    **{f"reinforce_plus_plus_gamma_{g}": Method("reinforce_plus_plus", {"gamma": g}) for g in (0.9, 0.95, 0.98)},
    **{estimator: Method(estimator, GROUPS) for estimator in ("rloo", "grpo", "opo")},
    "remax": Method("remax"),  # not for games
}


@dataclass
class BenchmarkArguments:
    """Arguments of this script."""

    output_dir: str = field(default="out/estimators", metadata={"help": "Folder of the results."})
    tasks: list[str] = field(default_factory=lambda: ["lake"], metadata={"help": "Names in TASKS."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": "Names in METHODS."})
    learning_rates: list[float] = field(default_factory=lambda: [1e-3], metadata={"help": "Of the actor."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    num_eval: int = field(default=512, metadata={"help": "Completions after a run."})
    report: bool = field(default=False, metadata={"help": "Print the results as tables instead of measuring."})


def measure(name: str, method_name: str, learning_rate: float, seed: int, args: BenchmarkArguments) -> dict[str, Any]:
    """Train once, and return the result."""
    task, method = TASKS[name], METHODS[method_name]
    recipe = yaml.safe_load((RECIPES / f"{task.recipe}.yaml").read_text())
    lora = LoraConfig(r=recipe.pop("lora_r"), lora_alpha=recipe.pop("lora_alpha"), target_modules="all-linear")
    settings = recipe | {
        "output_dir": f"{args.output_dir}/run",
        "advantage_estimator": method.estimator,
        "learning_rate": learning_rate,
        "seed": seed,
        "total_episodes": task.completions,
        "max_steps": -1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **method.settings,
    }
    if method.pretrained:
        settings |= {"critic_pretraining_completions": task.pretraining, "critic_pretraining_learning_rate": 5e-3}
    config = PPOConfig(**settings)
    config.logging_steps = config.updates_per_rollout
    trainer = PPOTrainer(args=config, peft_config=lora, **task.arguments(args.num_eval))
    clock, cpu_clock = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu_clock
    with trainer.eval_sampling(True):
        final = trainer.evaluate()["eval_reward"]
    history = trainer.state.log_history
    return {
        "task": name,
        "method": method_name,
        "learning_rate": learning_rate,
        "seed": seed,
        "completions": task.completions,
        "pretraining": config.critic_pretraining_completions,
        "curve": [entry["reward"] for entry in history if "reward" in entry],
        "explained_variance": [e["value/explained_variance"] for e in history if "value/explained_variance" in e],
        "final": final,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def smooth(curve: list[float]) -> np.ndarray:
    """Return the means of `WINDOW` rollouts in a row."""
    return np.convolve(curve, np.ones(WINDOW) / WINDOW, mode="valid")


def shares(result: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return completions taken so far, and the share that the last `WINDOW` rollouts reached."""
    share = TASKS[result["task"]].share
    means = np.array([share(score) for score in smooth(result["curve"])])
    per_rollout = (result["completions"] - result["pretraining"]) / len(result["curve"])
    return result["pretraining"] + per_rollout * np.arange(WINDOW, WINDOW + len(means)), means


def completions_to(level: float, result: dict[str, Any]) -> str:
    """Return the completions after which the last `WINDOW` rollouts reach a share; a dash: never."""
    taken, means = shares(result)
    reached = taken[means >= level]
    return f"{reached[0]:.0f}" if len(reached) else "–"


def report(results: list[dict[str, Any]]) -> None:
    """Print a line for each method and learning rate, with all seeds."""

    def key(result: dict[str, Any]) -> tuple[str, str, float]:
        return result["task"], result["method"], result["learning_rate"]

    levels = " | ".join(f"completions to {level:.0%}" for level in LEVELS)
    print(f"| task | method | rate | at the end, by seed | mean | {levels} | CPU s |")
    print("|" + "---|" * (6 + len(LEVELS)))
    for (name, method, rate), group in itertools.groupby(sorted(results, key=key), key):
        runs = sorted(group, key=lambda run: run["seed"])
        final = [TASKS[name].share(run["final"]) for run in runs]
        to = " | ".join(", ".join(completions_to(level, run) for run in runs) for level in LEVELS)
        seconds = np.mean([run["cpu_seconds"] for run in runs])
        by_seed = ", ".join(f"{share:.2f}" for share in final)
        print(f"| {name} | {method} | {rate:g} | {by_seed} | {np.mean(final):.2f} | {to} | {seconds:.0f} |")


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Draw the shares of one task during training: a line for each method, in a band over all of its seeds."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    by_method: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for result in results:
        by_method.setdefault(result["method"], {}).setdefault(result["learning_rate"], []).append(result)
    for method, by_rate in sorted(by_method.items()):
        rate, runs = max(by_rate.items(), key=lambda item: len(item[1]))
        taken = shares(runs[0])[0]
        curves = np.array([shares(run)[1] for run in runs])
        (line,) = axes.plot(taken, curves.mean(axis=0), label=f"{method}, {rate:g} ({len(runs)})")
        axes.fill_between(taken, curves.min(axis=0), curves.max(axis=0), alpha=0.12, color=line.get_color())
    axes.set(xlabel="completions", ylabel="share", ylim=(-0.1, 1))
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
        for name in {result["task"] for result in results}:
            plot([result for result in results if result["task"] == name], folder / f"{name}.png")
        return
    for seed, name, method, rate in itertools.product(args.seeds, args.tasks, args.methods, args.learning_rates):
        file = folder / f"{name}_{method}_{rate:g}_{seed}.json"
        if not file.exists():
            result = measure(name, method, rate, seed, args)
            file.write_text(json.dumps(result))
            print(
                f"{file.stem}: {TASKS[name].share(result['final']):.3f}, {result['cpu_seconds']:.0f} CPU s", flush=True
            )
            gc.collect()


if __name__ == "__main__":
    main(HfArgumentParser(BenchmarkArguments, allow_abbrev=False).parse_args_into_dataclasses()[0])
