"""Prompts chosen by `prompt_candidates` against the next ones: sums of which four in five are trivial.

    python tests/benchmarks/candidates.py --methods ppo ppo_2 ppo_4 grpo grpo_4 --seeds 0 1 2 3 4
    python tests/benchmarks/candidates.py --report

The base is the one of `recipes/arithmetic`, trained further on answers that are right for trivial sums and wrong at
the recipe's rate for the others. A sum is trivial if one of its numbers has one digit. Each run writes its result as
JSON when it ends; a result that exists is not measured again. All sampled completions count, also those of groups that
are left out. After each rollout the exact probability of the right answer is measured on held-out sums, which nothing
filters: the report has the completions after which its mean over the hard ones reaches each level.
"""

import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from estimator_tasks import recipe_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed

from hfppo import PPOCallback, PPOConfig, PPOTrainer

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES / "arithmetic"))
from arithmetic import FOLDER, right_answer  # noqa: E402
from build_arithmetic_base import (  # noqa: E402
    Answers,
    BuildArguments,
    draw_question,
    split_pairs,
    spoil_answer,
    train,
)

Pairs = list[tuple[int, int]]
TRIVIAL = 0.8  # share of the prompts
LEVELS = (0.7, 0.9)  # of the mean probability of the right answer to hard sums
# A critic that has to know prompts, not only the last tokens of answers.
CRITIC = {"critic_learning_rate": 2e-3, "lam_critic": 1.0, "num_critic_epochs": 4}
PRETRAINED = CRITIC | {"critic_pretraining_completions": 192}  # three rollouts, which count
GROUPS = {"advantage_estimator": "grpo", "num_generations": 8}
METHODS: dict[str, dict[str, Any]] = {
    "ppo": CRITIC,
    "ppo_4": CRITIC | {"prompt_candidates": 4},
    "ppo_pretrained": PRETRAINED,
    "ppo_pretrained_2": PRETRAINED | {"prompt_candidates": 2},
    "ppo_pretrained_4": PRETRAINED | {"prompt_candidates": 4},
    "grpo": GROUPS,
    "grpo_4": GROUPS | {"prompt_candidates": 4},
}


@dataclass
class BenchmarkArguments:
    """Arguments of this benchmark."""

    output_dir: str = field(default="out/candidates", metadata={"help": "Folder of the base and the results."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": "Names in METHODS."})
    learning_rates: list[float] = field(default_factory=lambda: [1e-3], metadata={"help": "Of the actor."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    completions: int = field(
        default=3072, metadata={"help": "Completions of a run, at most, groups left out included."}
    )
    report: bool = field(default=False, metadata={"help": "Print the results as tables instead of measuring."})


def is_trivial(prompt: str) -> bool:
    """Return whether a number of the sum has one digit."""
    return min(map(int, re.findall(r"\d+", prompt)[:2])) < 10


class MixedAnswers(Answers):
    """Questions and answers: right to trivial sums, and wrong to others with probability `wrong`."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        rng = random.Random(self.seed)
        while True:
            row = draw_question(self.pairs, rng)
            wrong = 0.0 if is_trivial(row["prompt"]) else self.wrong
            yield {**row, "answer": spoil_answer(row, rng)} if rng.random() < wrong else row


def build_base(folder: Path, pairs: Pairs) -> None:
    """Train the recipe's base further, and write it."""
    args = BuildArguments(output_dir=str(folder))
    set_seed(args.seed)
    model, tokenizer = (x.from_pretrained(FOLDER / "base") for x in (AutoModelForCausalLM, AutoTokenizer))
    train(model, tokenizer, MixedAnswers(pairs, args.wrong, args.seed + 3), 200, 1e-3, args)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def draw_rows(pairs: Pairs, count: int, seed: int) -> list[dict[str, str]]:
    """Draw questions, of which a share of `TRIVIAL` is trivial."""
    rng = random.Random(seed)
    rows = []
    while len(rows) < count:
        wanted = rng.random() < TRIVIAL
        while is_trivial((row := draw_question(pairs, rng))["prompt"]) != wanted:
            pass
        rows.append(row)
    return rows


@torch.no_grad()
def probabilities(trainer: PPOTrainer, rows: Sequence[dict[str, str]]) -> torch.Tensor:
    """Return the policy's probability of each right answer, (B,)."""
    tokenizer = trainer.processing_class
    prompts = [len(row["prompt"]) for row in rows]  # a token for each character
    text = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    batch = tokenizer(text, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
    trainer.model.eval()
    logprobs = trainer.model(**batch).logits[:, :-1].log_softmax(-1)
    logprobs = logprobs.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    of_answer = torch.arange(1, batch["input_ids"].shape[1]) >= torch.tensor(prompts)[:, None]
    return (logprobs * (of_answer & batch["attention_mask"][:, 1:].bool())).sum(dim=1).exp()


class Probe(PPOCallback):
    """Measures held-out sums and the share of hard prompts after each rollout."""

    def __init__(self, rows: list[dict[str, str]], sampled: int, most: int):
        self.rows, self.sampled, self.most, self.points = rows, sampled, most, []
        self.hard = torch.tensor([not is_trivial(row["prompt"]) for row in rows])
        self.trainer: PPOTrainer | None = None

    def on_update_end(self, args, state, control, *, rollout, **kwargs):
        self.sampled += self.rollout_completions
        found = probabilities(self.trainer, self.rows)
        texts = self.trainer.processing_class.batch_decode(rollout.prompt_ids, skip_special_tokens=True)
        self.points.append(
            {
                "completions": self.sampled,
                "hard": float(found[self.hard].mean()),
                "trivial": float(found[~self.hard].mean()),
                "hard_prompts": float(np.mean([not is_trivial(text) for text in texts])),
            }
        )
        control.should_training_stop = self.sampled >= self.most or self.points[-1]["hard"] >= LEVELS[-1]

    def on_rollout_end(self, args, state, control, *, rollout, metrics, **kwargs):
        self.rollout_completions = metrics.get("candidates/completions", len(rollout))


def measure(method: str, learning_rate: float, seed: int, args: BenchmarkArguments) -> dict[str, Any]:
    """Train once, and return the result."""
    folder = Path(args.output_dir)
    train_pairs, test_pairs = split_pairs(BuildArguments.largest, BuildArguments.held_out, BuildArguments.seed)
    if not (folder / "base").exists():
        build_base(folder / "base", train_pairs)
    config, lora = recipe_settings("arithmetic")
    config |= {
        "output_dir": str(folder / f"run_{method}_{learning_rate:g}_{seed}"),
        "per_device_train_batch_size": 32,  # rollouts of 64 completions
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "total_episodes": args.completions,
        "seed": seed,
        **METHODS[method],
    }
    settings = PPOConfig(**config)
    settings.logging_steps = settings.updates_per_rollout
    pretraining = settings.critic_pretraining_rollouts * settings.rollout_size_per_process
    probe = Probe(draw_rows(test_pairs, 1024, seed=2), pretraining, args.completions)
    trainer = PPOTrainer(
        model=str(folder / "base"),
        reward_funcs=right_answer,
        args=settings,
        train_dataset=Dataset.from_list(draw_rows(train_pairs, 8192, seed=1)),
        peft_config=lora,
        callbacks=[probe],
    )
    probe.trainer = trainer
    clock = time.process_time()
    trainer.train()
    return {
        "method": method,
        "learning_rate": learning_rate,
        "seed": seed,
        "points": probe.points,
        "cpu_seconds": time.process_time() - clock,
        "log": [entry for entry in trainer.state.log_history if "reward" in entry],
    }


def completions_to(level: float, run: dict[str, Any]) -> float:
    """Return the completions after which the probability over hard sums has reached a level; inf: never."""
    return next((point["completions"] for point in run["points"] if point["hard"] >= level), float("inf"))


def report(runs: list[dict[str, Any]]) -> None:
    """Print a line for each method and learning rate, with all seeds."""
    runs = sorted(runs, key=lambda run: (run["method"], run["learning_rate"], run["seed"]))
    to = " | ".join(f"completions to {level:.0%} | mean" for level in LEVELS)
    print(f"| method | rate | {to} | hard, at the end | trivial | hard prompts in rollouts | CPU s |")
    print("|" + "---|" * (6 + 2 * len(LEVELS)))
    for (method, rate), group in groupby(runs, key=lambda run: (run["method"], run["learning_rate"])):
        some = list(group)
        cells = []
        for level in LEVELS:
            found = [completions_to(level, run) for run in some]
            cells += [", ".join(f"{x:.0f}" for x in found), f"{np.mean(found):.0f}"]
        ends = [f"{np.mean([run['points'][-1][name] for run in some]):.3f}" for name in ("hard", "trivial")]
        share = np.mean([point["hard_prompts"] for run in some for point in run["points"]])
        seconds = np.mean([run["cpu_seconds"] for run in some])
        print(f"| {method} | {rate:g} | {' | '.join([*cells, *ends])} | {share:.2f} | {seconds:.0f} |")


def report_calibration(runs: list[dict[str, Any]]) -> None:
    """Print the mean score by fifth of the expected one, over all rollouts of the runs in which the critic chooses."""
    for method, group in groupby(sorted(runs, key=lambda run: run["method"]), key=lambda run: run["method"]):
        entries = [entry for run in group for entry in run["log"]]
        names = [f"candidates/calibration_{i}" for i in range(1, 6)]
        found = [[entry[name] for entry in entries if name in entry] for name in names]
        if any(found):
            cells = ", ".join(f"{np.mean(x):.2f} ({len(x)})" if x else "–" for x in found)
            print(f"{method}: mean score by fifth of the expected one (rollouts): {cells}")


def main(args: BenchmarkArguments) -> None:
    torch.set_num_threads(1)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if args.report:
        runs = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        report(runs)
        report_calibration(runs)
        return
    for seed, rate, method in product(args.seeds, args.learning_rates, args.methods):
        file = folder / f"{method}_{rate:g}_{seed}.json"
        if not file.exists():
            result = measure(method, rate, seed, args)
            file.write_text(json.dumps(result))
            to = [completions_to(level, result) for level in LEVELS]
            print(f"{file.stem}: {to}, {result['points'][-1]}, {result['cpu_seconds']:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main(HfArgumentParser(BenchmarkArguments, allow_abbrev=False).parse_args_into_dataclasses()[0])
