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
from functools import partial
from pathlib import Path

import torch
import yaml
from datasets import load_dataset

from hfppo import Rollout

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path[:0] = [str(RECIPES), str(RECIPES / "reasoning")]
COLUMNS = ("one sample", "critic", "log-probability", "majority", "any right")
Prompt = str | list[dict[str, str]]  # text, or a conversation


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
    """Return the held-out questions of recipes/reasoning/reasoning.yaml, scored as its reward scores them."""
    from reasoning_tasks import ReasoningArguments, draw_questions, find_answer, make_reward, make_rows

    settings = yaml.safe_load((RECIPES / "reasoning/reasoning.yaml").read_text())
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


@dataclass
class Ranked:
    """A completion with its numbers."""

    completion: str
    value: float  # before the last token
    mean_logprob: float  # per token, nats


def read_rollout(rollout: Rollout, decode: Callable[[list[int]], str]) -> list[Ranked]:
    """Return the completions of a rollout."""
    ids, values, logprobs = (
        [row[mask].tolist() for row, mask in zip(column, rollout.mask, strict=True)]
        for column in (rollout.completion_ids, rollout.values, rollout.old_logprobs)
    )
    return [
        Ranked(decode(tokens), of_critic[-1], sum(of_actor) / len(of_actor))
        for tokens, of_critic, of_actor in zip(ids, values, logprobs, strict=True)
    ]


def judge(question: Question, found: list[Ranked]) -> dict[str, float]:
    """Return the score of what each way chooses from the completions."""
    ranked = sorted(found, key=lambda one: -one.value)
    scores = {one.completion: float(question.score(one.completion) >= 1) for one in ranked}
    votes = collections.Counter(question.answer(one.completion) for one in ranked)
    most_common = votes.most_common(1)[0][0]
    chosen = {
        "critic": ranked[0],
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
    from best_of import load_run  # the recipe

    trainer = load_run(options.folder, max_completion_length=options.max_completion_length)
    questions, n = tasks[options.task](), options.n
    rollout = trainer.rollout([question.prompt for question in questions for _ in range(n)])
    found = read_rollout(rollout, partial(trainer.processing_class.decode, skip_special_tokens=True))
    rows = [judge(question, found[i * n : (i + 1) * n]) for i, question in enumerate(questions)]
    means = [sum(row[name] for row in rows) / len(rows) for name in COLUMNS]
    print(f"| {options.task} | {' | '.join(COLUMNS)} |")
    print(f"| {options.folder} | {' | '.join(f'{mean:.3f}' for mean in means)} |")


if __name__ == "__main__":
    main()
