"""Best of n by the critic, by log-probability and by majority, beside one sample and the ceiling (any of the n right).

    python tests/benchmarks/best_of.py arithmetic out/arithmetic/checkpoint-0
    python tests/benchmarks/best_of.py reasoning out/reasoning

The prompts are the held-out ones of the recipe with its settings. Prints a row for the table in docs/results.md.
"""

import argparse
import collections
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from datasets import load_dataset
from tqdm import tqdm

from hfppo import ValueRanker
from hfppo.best_of.value_ranker import Prompt, Ranked

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))
COLUMNS = ("one sample", "critic", "log-probability", "majority", "any right")


@dataclass
class Question:
    """A prompt, and what judges completions of it."""

    prompt: Prompt
    score: Callable[[str], float]  # 1 is right
    answer: Callable[[str], str | None] = str  # the part of a completion that a majority is counted over


def arithmetic_questions() -> list[Question]:
    """Return the held-out sums; every character counts."""
    rows = load_dataset("json", data_files=str(RECIPES / "arithmetic/test.jsonl"), split="train")
    return [Question(row["prompt"], lambda text, right=row["answer"]: float(text == right)) for row in rows]


def reasoning_questions() -> list[Question]:
    """Return the held-out questions of recipes/reasoning.yaml, scored as its reward scores them."""
    from reasoning_tasks import ReasoningArguments, draw_questions, find_answer, make_reward, make_rows

    settings = yaml.safe_load((RECIPES / "reasoning.yaml").read_text())
    names = ("task", "task_config", "instruction", "answer_pattern", "strict")
    args = ReasoningArguments(**{name: settings[name] for name in names})
    _, test = draw_questions(args)
    reward = make_reward(test, args)

    def score(text: str, number: int) -> float:
        return reward([[{"role": "assistant", "content": text}]], entry=[number])[0]

    return [
        Question(
            row["prompt"],
            lambda text, number=row["entry"]: score(text, number),
            lambda text: find_answer(text, args.answer_pattern),
        )
        for row in make_rows(test, 0, args)
    ]


def judge(question: Question, ranked: list[Ranked]) -> dict[str, float]:
    """Return the score of what each way chooses from the completions."""
    scores = {one.completion: float(question.score(one.completion) >= 1) for one in ranked}
    votes = collections.Counter(question.answer(one.completion) for one in ranked)
    most_common = votes.most_common(1)[0][0]
    chosen = {
        "critic": max(ranked, key=lambda one: one.value),
        "log-probability": max(ranked, key=lambda one: one.mean_logprob),
        "majority": next(one for one in ranked if question.answer(one.completion) == most_common),
    }
    return {
        "one sample": sum(scores[one.completion] for one in ranked) / len(ranked),
        **{name: scores[one.completion] for name, one in chosen.items()},
        "any right": max(scores.values()),
    }


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = {"arithmetic": arithmetic_questions, "reasoning": reasoning_questions}
    parser.add_argument("task", choices=tasks)
    parser.add_argument("folder", help="output folder or checkpoint of a run of the recipe")
    parser.add_argument("-n", type=int, default=8, help="completions of each prompt (%(default)s)")
    parser.add_argument("--max_completion_length", type=int, default=12, help="in tokens (%(default)s)")
    options = parser.parse_args()
    ranker = ValueRanker.from_pretrained(options.folder)
    questions = tasks[options.task]()
    rows = [
        judge(
            question,
            ranker.best_of(question.prompt, options.n, options.max_completion_length, seed=number),
        )
        for number, question in enumerate(tqdm(questions, disable=None))
    ]
    means = [sum(row[name] for row in rows) / len(rows) for name in COLUMNS]
    print(f"| {options.task} | {' | '.join(COLUMNS)} |")
    print(f"| {options.folder} | {' | '.join(f'{mean:.3f}' for mean in means)} |")


if __name__ == "__main__":
    main()
