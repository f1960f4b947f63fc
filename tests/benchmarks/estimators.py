"""Advantage estimators on shipped tasks, by equal numbers of completions: a critic against the estimators without one.

    python tests/benchmarks/estimators.py --tasks lake --methods gae rloo --learning_rates 5e-4 1e-3 2e-3 --seeds 0 1
    python tests/benchmarks/estimators.py --report

Each run writes its result as JSON when it ends; a result that exists is not measured again. Settings are those of the
task's recipe where neither the task nor the method says otherwise. Completions of a pretraining in the run count. The
report is a table of all runs, one of their critics' explained variance, and `TASK.png`, which shows each method of a
task at the learning rate with most seeds, or the best of them.
"""

import gc
import itertools
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
from estimator_critics import PARTS, measure_critic
from estimator_tasks import RECIPES, TASKS, recipe_settings
from transformers import HfArgumentParser

from hfppo import PPOConfig, PPOTrainer

WINDOW = 5  # rollouts
LEVELS = (0.5, 0.7, 0.9)  # see `Task.share`


@dataclass(frozen=True)
class Method:
    """An estimator with its settings."""

    estimator: str
    settings: dict[str, Any] = field(default_factory=dict)
    pretrained: bool = False  # whether the critic's pretraining takes its part of the completions
    critic: str = "adapter"
    trainer: Literal["hfppo", "TRL"] = "hfppo"


VAPO = {"lam_critic": 1.0, "lam_alpha": 1.0}  # λ = 0.9 for ten tokens
GROUPS = {"num_generations": 8}
NO_EOS_PENALTY = {"missing_eos_penalty": None}
LAYERS = {"critic_layers": 10, "critic_learning_rate": 1e-3}  # of the 30 of a real model
METHODS = {
    "gae": Method("gae"),
    "gae_lam_1": Method("gae", {"lam": 1.0}),
    "gae_pretrained": Method("gae", pretrained=True),
    # The critic that docs/results.md "Pretraining of a critic" leaves behind; its completions are not counted.
    "gae_fitted_critic": Method("gae", critic=str(RECIPES.parent / "out/arithmetic/checkpoint-0")),
    "vapo": Method("gae", VAPO, pretrained=True),
    "reinforce_plus_plus": Method("reinforce_plus_plus"),
    **{f"reinforce_plus_plus_gamma_{g}": Method("reinforce_plus_plus", {"gamma": g}) for g in (0.9, 0.95, 0.98)},
    **{estimator: Method(estimator, GROUPS) for estimator in ("rloo", "grpo", "opo")},
    "grpo_no_division": Method("grpo", GROUPS | {"scale_rewards": "none"}),
    "grpo_no_eos_penalty": Method("grpo", GROUPS | NO_EOS_PENALTY),
    "gae_shared": Method("gae", critic="shared"),
    "gae_shared_no_eos_penalty": Method("gae", NO_EOS_PENALTY, critic="shared"),
    "gae_shared_entropy": Method("gae", {"entropy_coef": 0.03}, critic="shared"),
    "gae_layers": Method("gae", LAYERS),
    "gae_layers_pretrained": Method("gae", LAYERS, pretrained=True),
    "vapo_layers": Method("gae", LAYERS | VAPO, pretrained=True),
    "trl_grpo": Method("grpo", trainer="TRL"),  # for tasks without KL, in groups
}


@dataclass
class BenchmarkArguments:
    """Arguments of this script."""

    output_dir: str = field(default="out/estimators", metadata={"help": "Folder of the results."})
    tasks: list[str] = field(default_factory=lambda: ["lake"], metadata={"help": "Names in TASKS."})
    methods: list[str] = field(
        default_factory=lambda: ["gae", "reinforce_plus_plus", "rloo", "grpo"], metadata={"help": "Names in METHODS."}
    )
    learning_rates: list[float] = field(default_factory=lambda: [1e-3], metadata={"help": "Of the actor."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    report: bool = field(default=False, metadata={"help": "Print the results as tables instead of measuring."})


def measure(name: str, method_name: str, learning_rate: float, seed: int, args: BenchmarkArguments) -> dict[str, Any]:
    """Train once, and return the result."""
    task, method = TASKS[name], METHODS[method_name]
    settings, lora = recipe_settings(task.recipe)
    settings |= {
        "output_dir": f"{args.output_dir}/run",
        "learning_rate": learning_rate,
        "seed": seed,
        "total_episodes": task.completions,
        **({"critic_pretraining_completions": task.pretraining} if method.pretrained else {}),
        **method.settings,
        **task.settings,
    }
    arguments = task.arguments(task.num_eval)
    if method.trainer == "TRL":
        from estimators_trl import grpo_trainer  # needs TRL

        trainer = grpo_trainer(settings, lora, **arguments)
    else:
        config = PPOConfig(advantage_estimator=method.estimator, **settings)
        config.logging_steps = config.updates_per_rollout
        trainer = PPOTrainer(args=config, peft_config=lora, critic=method.critic, **arguments)
    clock, cpu_clock = time.perf_counter(), time.process_time()
    with nullcontext() if method.trainer == "TRL" else trainer.eval_sampling(True):
        trainer.train()
        seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu_clock
        trainer.evaluate()
    history = trainer.state.log_history
    critic = {"critic": measure_critic(trainer, name)} if method.estimator == "gae" else {}
    return {
        "task": name,
        "method": method_name,
        "learning_rate": learning_rate,
        "seed": seed,
        "completions": task.completions,
        "pretraining": settings.get("critic_pretraining_completions", 0),
        "curve": [entry["reward"] for entry in history if "reward" in entry],
        "explained_variance": [e["value/explained_variance"] for e in history if "value/explained_variance" in e],
        # TRL's `evaluate` logs the reward, and does not return it.
        "final": next(entry["eval_reward"] for entry in reversed(history) if "eval_reward" in entry),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        **critic,
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


def by_setting(results: list[dict[str, Any]]) -> list[tuple[tuple[str, str, float], list[dict[str, Any]]]]:
    """Return task, method and learning rate with their runs, in order of the seeds."""

    def key(result: dict[str, Any]) -> tuple[str, str, float]:
        return result["task"], result["method"], result["learning_rate"]

    runs = sorted(results, key=lambda run: (*key(run), run["seed"]))
    return [(setting, list(group)) for setting, group in itertools.groupby(runs, key)]


def report(results: list[dict[str, Any]]) -> None:
    """Print a line for each method and learning rate, with all seeds."""
    levels = " | ".join(f"completions to {level:.0%}" for level in LEVELS)
    print(f"| task | method | rate | at the end, by seed | mean | {levels} | CPU s |")
    print("|" + "---|" * (6 + len(LEVELS)))
    for (name, method, rate), runs in by_setting(results):
        final = [TASKS[name].share(run["final"]) for run in runs]
        to = " | ".join(", ".join(completions_to(level, run) for run in runs) for level in LEVELS)
        seconds = np.mean([run["cpu_seconds"] for run in runs])
        by_seed = ", ".join(f"{share:.2f}" for share in final)
        print(f"| {name} | {method} | {rate:g} | {by_seed} | {np.mean(final):.2f} | {to} | {seconds:.0f} |")


def report_critics(results: list[dict[str, Any]]) -> None:
    """Print the critics' explained variance over each third of an episode, and the highest possible, by seed."""
    if not (measured := [result for result in results if "critic" in result]):
        return

    def show(explained: float, possible: float | None) -> str:
        return f"{explained:.2f}" if possible is None else f"{explained:.2f} of {possible:.2f}"

    print("| task | method | rate | " + " | ".join(f"{part}, of possible" for part in PARTS) + " |")
    print("|" + "---|" * (3 + len(PARTS)))
    for (name, method, rate), runs in by_setting(measured):
        cells = " | ".join(", ".join(show(*run["critic"][part]) for run in runs) for part in PARTS)
        print(f"| {name} | {method} | {rate:g} | {cells} |")


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Draw the shares of one task during training: the mean of each method, and a thin line for each of its seeds."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    by_method: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for result in results:
        by_method.setdefault(result["method"], {}).setdefault(result["learning_rate"], []).append(result)
    for method, by_rate in sorted(by_method.items()):
        rate, runs = max(by_rate.items(), key=lambda item: (len(item[1]), np.mean([run["final"] for run in item[1]])))
        taken = shares(runs[0])[0]
        curves = np.array([shares(run)[1] for run in runs])
        (line,) = axes.plot(taken, curves.mean(axis=0), label=f"{method}, {rate:g} ({len(runs)})", linewidth=2)
        axes.plot(taken, curves.T, color=line.get_color(), linewidth=0.6, alpha=0.6)
    axes.set(xlabel="completions", ylabel=TASKS[results[0]["task"]].unit, ylim=(-0.1, 1))
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
        report_critics(results)
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
