"""PPO on the game of `recipes/agent/agent.py` beside methods without a critic, at equal numbers of games.

    python tests/benchmarks/orchard.py --model out/smollm2 --methods ppo grpo --learning_rates 3e-4 --seeds 0
    python tests/benchmarks/orchard.py --report

Settings are those of `recipes/agent` where the method says nothing else. Each run writes its result as JSON when
it ends; a result that exists, of as many games, is not measured again. The report counts the way from the untrained
model, measured once, to the best play. Start and curves are expected returns: the optimum minus the mean regret of the
games, see `regret`.
"""

import gc
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from datasets import Dataset
from estimator_tasks import recipe_settings
from transformers import AutoTokenizer, HfArgumentParser

from hfppo import PPOCallback, PPOConfig, PPOTrainer, Rollout

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES / "agent"))
from agent_game import CHAT_TEMPLATE, OPTIMUM, PROMPT, Orchard, regret  # noqa: E402

ROLLOUT = 32  # games
WINDOW = 5  # rollouts
LEVELS = (0.5, 0.7)
PLAIN = {"advantage_estimator": "reinforce_plus_plus"}
GROUPS = {"advantage_estimator": "grpo", "num_generations": 4}
FOUR_BATCHES = {"per_device_train_batch_size": 8, "num_mini_batches": 4}  # of 8 games: a group of 8 stays together
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {},
    **{f"ppo_lam_{lam}": {"lam": lam} for lam in (0.5, 0.9, 1.0)},
    "ppo_epochs_2": {"num_ppo_epochs": 2},
    "ppo_four_batches": FOUR_BATCHES | {"vf_coef": 1.0},
    "ppo_value_weight_1": {"vf_coef": 1.0},
    "reinforce_plus_plus": PLAIN,
    **{f"reinforce_plus_plus_gamma_{gamma}": PLAIN | {"gamma": gamma} for gamma in (0.9, 0.7)},
    "grpo": GROUPS,
    "grpo_8_epochs_3": GROUPS | FOUR_BATCHES | {"num_generations": 8, "num_ppo_epochs": 3},
    "trl_grpo": GROUPS,
}


@dataclass
class BenchmarkArguments:
    """Arguments of this script."""

    model: str = field(default="out/smollm2", metadata={"help": "Id or path of the model."})
    output_dir: str = field(default="out/orchard", metadata={"help": "Folder of the results."})
    methods: list[str] = field(default_factory=lambda: ["ppo", "grpo"], metadata={"help": "Names in METHODS."})
    learning_rates: list[float] = field(default_factory=lambda: [3e-4], metadata={"help": "Of all adapters."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    games: int = field(default=320, metadata={"help": "Games of a run; the report has the share after them."})
    untrained_games: int = field(default=256, metadata={"help": "Games of the untrained model."})
    report: bool = field(default=False, metadata={"help": "Print the results as tables instead of measuring."})


class Probe(PPOCallback):
    """Takes the expected return and the critic's explained variance of each rollout."""

    def __init__(self):
        self.points, self.clock = [], time.process_time()
        self.trainer: PPOTrainer | None = None

    def on_rollout_end(self, args, state, control, *, rollout, metrics, **kwargs):
        seconds, self.clock = time.process_time() - self.clock, time.process_time()
        point = {
            "expected_return": expected_return(self.trainer, rollout),
            "reward": float(rollout.scores.mean()),
            "explained_variance": metrics.get("value/turn_explained_variance"),
            "cpu_seconds": seconds,  # since the rollout before, the update on it included
        }
        self.points.append(point)
        print(json.dumps(point), flush=True)


def expected_return(trainer: PPOTrainer, rollout: Rollout) -> float:
    """Return the expected return that the games of a rollout tell."""
    games = [ids[real] for ids, real in zip(rollout.completion_ids, rollout.real, strict=True)]
    texts = trainer.processing_class.batch_decode(games, skip_special_tokens=True)
    return OPTIMUM - float(np.mean([regret(text) for text in texts]))


def build(method: str, learning_rate: float, seed: int, args: BenchmarkArguments) -> dict[str, Any]:
    """Return the trainers' arguments for a method."""
    settings, lora = recipe_settings("agent")
    settings |= {
        "output_dir": f"{args.output_dir}/run_{method}_{learning_rate:g}_{seed}",
        "learning_rate": learning_rate,
        "seed": seed,
        "total_episodes": args.games,
        **METHODS[method],
    }
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    return {"settings": settings, "model": args.model, "processing_class": tokenizer, "peft_config": lora}


def make_trainer(built: dict[str, Any], probe: Probe) -> PPOTrainer:
    """Return hfppo's trainer."""
    config = PPOConfig(**built["settings"])
    config.logging_steps = config.updates_per_rollout
    trainer = PPOTrainer(
        model=built["model"],
        environment_factory=Orchard,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
        processing_class=built["processing_class"],
        peft_config=built["peft_config"],
        critic="shared",
        callbacks=[probe],
    )
    probe.trainer = trainer
    return trainer


def measure_untrained(args: BenchmarkArguments) -> float:
    """Return the expected return of the untrained model; it is measured once and kept in a file."""
    file = Path(args.output_dir) / "untrained.txt"
    if not file.exists():
        built = build("grpo", 1e-4, 0, args)
        built["settings"]["local_rollout_forward_batch_size"] = args.untrained_games  # one batch keeps its key-values
        trainer = make_trainer(built, Probe())
        file.write_text(f"{expected_return(trainer, trainer.rollout([PROMPT] * args.untrained_games))}\n")
    return float(file.read_text())


def measure(method: str, learning_rate: float, seed: int, args: BenchmarkArguments) -> dict[str, Any]:
    """Train once, and return the result."""
    built = build(method, learning_rate, seed, args)
    probe = Probe()
    clock, cpu_clock = time.perf_counter(), time.process_time()
    if method == "trl_grpo":
        from orchard_trl import make_trl_trainer  # needs TRL

        make_trl_trainer(**built, points=probe.points).train()
    else:
        make_trainer(built, probe).train()
    return {
        "method": method,
        "learning_rate": learning_rate,
        "seed": seed,
        "games": args.games,
        "points": probe.points,
        "seconds": time.perf_counter() - clock,
        "cpu_seconds": time.process_time() - cpu_clock,
    }


def shares(run: dict[str, Any], start: float) -> tuple[np.ndarray, np.ndarray]:
    """Return games so far, and the share of the way that the last `WINDOW` rollouts show."""
    returns = [point["expected_return"] for point in run["points"]]
    means = np.convolve(returns, np.ones(WINDOW) / WINDOW, mode="valid")
    return ROLLOUT * np.arange(WINDOW, WINDOW + len(means)), (means - start) / (OPTIMUM - start)


def report(runs: list[dict[str, Any]], start: float, most: int, file: Path) -> None:
    """Print a line for each method and learning rate, with all seeds, and draw curves: thin ones of runs, thick means.

    Args:
        most: games after which the share of the way is printed; a longer run counts for the levels as a whole.
    """
    print(f"untrained: {start:.3f}, best play: {OPTIMUM:.3f}\n")
    to = " | ".join(f"games to {level:.0%}" for level in LEVELS)
    print(f"| method | rate | share of the way, by seed | mean | {to} | explained variance | CPU s per rollout |")
    print("|" + "---|" * (6 + len(LEVELS)))
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    runs = sorted(runs, key=lambda run: (run["method"], run["learning_rate"], run["seed"]))
    drawn: dict[str, float] = {}  # each method's rate with most seeds; all rates are too many lines
    for (method, rate), _ in Counter((run["method"], run["learning_rate"]) for run in runs).most_common():
        drawn.setdefault(method, rate)
    for (method, rate), group in groupby(runs, key=lambda run: (run["method"], run["learning_rate"])):
        some = list(group)
        curves = [shares(run, start) for run in some]
        ends = [means[games <= most][-1] for games, means in curves]
        cells = []
        for level in LEVELS:
            reached = [games[means >= level] for games, means in curves]
            cells.append(", ".join(f"{found[0]:.0f}" if len(found) else "–" for found in reached))
        explained = [run["points"][most // ROLLOUT - 1]["explained_variance"] for run in some]
        cells.append("–" if explained[0] is None else ", ".join(f"{value:.2f}" for value in explained))
        seconds = np.mean([point["cpu_seconds"] for run in some for point in run["points"][1:]])
        by_seed = ", ".join(f"{share:.2f}" for share in ends)
        print(f"| {method} | {rate:g} | {by_seed} | {np.mean(ends):.2f} | {' | '.join(cells)} | {seconds:.0f} |")
        if drawn[method] == rate:
            shortest = min((games for games, _ in curves), key=len)
            mean = np.mean([means[: len(shortest)] for _, means in curves], axis=0)
            (line,) = axes.plot(shortest, mean, linewidth=2.5, label=f"{method}, {rate:g} ({len(some)})")
            for games, means in curves:
                axes.plot(games, means, color=line.get_color(), alpha=0.35, linewidth=1)
    axes.set(xlabel="games", ylabel="share of the way")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(file, dpi=110)


def main(args: BenchmarkArguments) -> None:
    torch.set_num_threads(1)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if args.report:
        runs = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        report(runs, measure_untrained(args), args.games, folder / "orchard.png")
        return
    for seed, rate, method in product(args.seeds, args.learning_rates, args.methods):
        file = folder / f"{method}_{rate:g}_{seed}.json"
        if not file.exists() or json.loads(file.read_text())["games"] < args.games:
            file.write_text(json.dumps(measure(method, rate, seed, args)))
            gc.collect()


if __name__ == "__main__":
    main(HfArgumentParser(BenchmarkArguments, allow_abbrev=False).parse_args_into_dataclasses()[0])
