"""Prompts chosen by `prompt_candidates` against the next ones, with SmolLM2 on sums of mixed difficulty.

    python tests/benchmarks/candidates_questions.py --model out/smollm2 --seeds 0 1 2
    python tests/benchmarks/candidates_questions.py --report

Two questions in five are sums of two numbers with one digit, three in ten of two numbers with two digits, three in ten
of four numbers with three digits. The model never solves the last kind. Held-out questions of the first two kinds are
answered, sampled, after every few rollouts; nothing filters them. All sampled completions count, also those of the
pretraining and of groups that are left out. Each run writes its result as JSON when it ends; a result that exists is
not measured again.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from datasets import concatenate_datasets
from peft import LoraConfig
from transformers import EvalPrediction, HfArgumentParser

from hfppo import PPOCallback, PPOConfig, PPOTrainer

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES / "reasoning"))
from reasoning_tasks import ReasoningArguments, draw_questions, make_reward, make_rows  # noqa: E402

KINDS = {  # share of the questions, number of terms, digits of each
    "easy": (0.4, 2, 1),
    "middle": (0.3, 2, 2),
    "hopeless": (0.3, 4, 3),
}
TESTED = ("easy", "middle")
LEVELS = (0.4, 0.45)  # of the accuracy, mean of these kinds
PER_EVALUATION = 256  # completions, at least
COMMON = {
    "per_device_train_batch_size": 32,
    "num_mini_batches": 2,  # 64 completions per rollout
    "num_ppo_epochs": 1,
    "max_completion_length": 12,
    "missing_eos_penalty": 0.2,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.01,
}
CRITIC = {  # that has to know prompts, not only the last tokens of answers
    "critic_layers": 10,
    "critic_learning_rate": 1e-3,
    "lam_critic": 1.0,
    "num_critic_epochs": 2,
}
PRETRAINED = CRITIC | {"critic_pretraining_completions": 192}  # three rollouts
METHODS: dict[str, dict[str, Any]] = {
    "uniform": CRITIC,
    "uniform_pretrained": PRETRAINED,
    "chosen": CRITIC | {"prompt_candidates": 4},
    "chosen_pretrained": PRETRAINED | {"prompt_candidates": 4},
    "grpo_4": {"advantage_estimator": "grpo", "num_generations": 8, "prompt_candidates": 4},
}


@dataclass
class BenchmarkArguments:
    """Arguments of this benchmark."""

    model: str = field(default="out/smollm2", metadata={"help": "Id or path of the model."})
    output_dir: str = field(default="out/candidates_questions", metadata={"help": "Folder of the results."})
    methods: list[str] = field(default_factory=lambda: ["uniform", "chosen"], metadata={"help": "Names in METHODS."})
    learning_rates: list[float] = field(default_factory=lambda: [2e-4], metadata={"help": "Of the actor."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    completions: int = field(default=1536, metadata={"help": "Completions of a run, groups left out included."})
    num_test: int = field(default=64, metadata={"help": "Held-out questions of each kind that is tested."})
    report: bool = field(default=False, metadata={"help": "Print the results as a table instead of measuring."})


class Probe(PPOCallback):
    """Answers held-out questions every few rollouts, and counts the kinds of questions trained on."""

    def __init__(self, kinds: dict[str, str], pretraining: int, most: int):
        self.kinds, self.sampled, self.tested, self.most = kinds, pretraining, pretraining, most
        self.points: list[dict[str, Any]] = []
        self.shares: list[dict[str, float]] = []
        self.trainer: PPOTrainer | None = None

    def on_rollout_end(self, args, state, control, *, rollout, metrics, **kwargs):
        self.sampled += int(metrics.get("candidates/completions", len(rollout)))

    def on_update_end(self, args, state, control, *, rollout, **kwargs):
        texts = self.trainer.processing_class.batch_decode(rollout.prompt_ids, skip_special_tokens=True)
        found = [next(kind for question, kind in self.kinds.items() if question in text) for text in texts]
        self.shares.append({kind: found.count(kind) / len(found) for kind in KINDS})
        control.should_training_stop = self.sampled >= self.most
        if self.sampled - self.tested >= PER_EVALUATION:
            self.measure()

    def measure(self):
        """Answer the held-out questions."""
        with self.trainer.eval_sampling(True):
            metrics = self.trainer.evaluate()
        self.tested = self.sampled
        point = {"completions": self.sampled} | {kind: metrics[f"eval_{kind}"] for kind in TESTED}
        self.points.append(point)
        print(json.dumps(point), flush=True)


def measure(method: str, learning_rate: float, seed: int, args: BenchmarkArguments) -> dict[str, Any]:
    """Train once, and return the result."""
    trained, tested, drawn, kinds = [], [], [], {}
    for kind, (share, terms, digits) in KINDS.items():
        config = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
        questions = ReasoningArguments(
            task_config=config,
            num_train_questions=int(8192 * share),
            num_test_questions=args.num_test,
            answer_pattern=r"-?\d+",
            strict=True,
        )
        for found, rows in zip(draw_questions(questions), (trained, tested), strict=True):
            if rows is trained or kind in TESTED:
                rows.append(make_rows(found, len(drawn), questions))
                drawn += found
                kinds |= {entry["question"]: kind for _, entry in found}
    reward = make_reward(drawn, questions)

    def by_kind(prediction: EvalPrediction) -> dict[str, float]:
        scores = np.array(reward(prediction.predictions, prediction.label_ids["entry"]))
        of = np.array([kinds[drawn[number][1]["question"]] for number in prediction.label_ids["entry"]])
        return {kind: float(scores[of == kind].mean()) for kind in TESTED}

    config = PPOConfig(
        f"{args.output_dir}/run_{method}_{learning_rate:g}_{seed}", total_episodes=args.completions, seed=seed,
        learning_rate=learning_rate, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        local_rollout_forward_batch_size=32, per_device_eval_batch_size=64, **COMMON | METHODS[method],
    )  # fmt: skip
    pretraining = config.critic_pretraining_rollouts * config.rollout_size_per_process
    probe = Probe(kinds, pretraining, args.completions)
    trainer = PPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=config,
        train_dataset=concatenate_datasets(trained),
        eval_dataset=concatenate_datasets(tested),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        compute_metrics=by_kind,
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
        "shares": probe.shares,
        "cpu_seconds": time.process_time() - clock,
        "log": [entry for entry in trainer.state.log_history if "reward" in entry],
    }


def completions_to(level: float, points: list[dict[str, Any]]) -> float:
    """Return the completions until a level of accuracy, on straight lines between evaluations; inf if never."""
    x = [point["completions"] for point in points]
    y = [np.mean([point[kind] for kind in TESTED]) for point in points]
    above = next((i for i, accuracy in enumerate(y) if accuracy >= level), None)
    if above is None:
        return np.inf
    return float(np.interp(level, y[above - 1 : above + 1], x[above - 1 : above + 1])) if above else x[0]


def report(runs: list[dict[str, Any]]) -> None:
    """Print for each method and learning rate the accuracies at each evaluation, and the completions to `LEVELS`."""
    runs = sorted(runs, key=lambda run: (run["method"], run["learning_rate"], run["seed"]))
    for (method, rate), group in groupby(runs, key=lambda run: (run["method"], run["learning_rate"])):
        some = list(group)
        seeds, seconds = [run["seed"] for run in some], np.mean([run["cpu_seconds"] for run in some])
        print(f"{method}, {rate:g}, seeds {seeds}, {seconds:.0f} CPU s")
        for run in some:
            for point in run["points"]:
                accuracies = ", ".join(f"{kind} {point[kind]:.2f}" for kind in TESTED)
                print(f"  seed {run['seed']}, {point['completions']} completions: {accuracies}")
        for level in LEVELS:
            reached = [completions_to(level, run["points"]) for run in some]
            mean = np.mean([min(x, run["points"][-1]["completions"]) for x, run in zip(reached, some, strict=True)])
            by_seed = ", ".join(f"{x:.0f}" for x in reached)
            least = "at least " if np.inf in reached else ""
            print(f"  completions to {level:g}: {by_seed}; mean {least}{mean:.0f}")
        shares = {kind: np.mean([share[kind] for run in some for share in run["shares"]]) for kind in KINDS}
        print("  trained on:", ", ".join(f"{kind} {share:.2f}" for kind, share in shares.items()))


def main(args: BenchmarkArguments) -> None:
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if args.report:
        report([json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))])
        return
    for seed, rate, method in product(args.seeds, args.learning_rates, args.methods):
        file = folder / f"{method}_{rate:g}_{seed}.json"
        if not file.exists():
            file.write_text(json.dumps(measure(method, rate, seed, args)))


if __name__ == "__main__":
    main(HfArgumentParser(BenchmarkArguments, allow_abbrev=False).parse_args_into_dataclasses()[0])
