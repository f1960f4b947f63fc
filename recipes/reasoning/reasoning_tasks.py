"""Questions of reasoning-gym as conversations, and the scores of answers: for reasoning.py and calculator.py."""

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import EvalPrediction

from hfppo.cli import ActorArguments

try:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.dataset import ProceduralDataset
except ImportError as error:
    raise ImportError(
        "recipes/reasoning/reasoning.py takes its questions from reasoning-gym: pip install reasoning-gym"
    ) from error

Drawn = list[tuple[ProceduralDataset, dict[str, Any]]]  # entries, each with the task that scores answers to it


def parse_config(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return a task's parameters, from a flag's JSON or a YAML file's mapping.

    Raises:
        ValueError: they are not a mapping.
    """
    try:
        config = json.loads(given) if isinstance(given, str) else given or {}
    except json.JSONDecodeError as error:
        raise ValueError(f"task_config={given!r} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f'task_config={given!r} must map names to values, as {{"min_terms": 2}} does')
    return config


@dataclass
class ReasoningArguments:
    """Arguments of recipes/reasoning/reasoning.py."""

    task: str = field(default="chain_sum", metadata={"help": "A task of reasoning-gym, or 'composite' for several."})
    task_config: dict | str | None = field(
        default=None,
        metadata={
            "help": 'Its parameters as JSON; of composite {"datasets": [{"name": …, "weight": …, "config": …}]}.'
        },
    )
    num_train_questions: int = field(default=2048, metadata={"help": "Questions drawn to train on."})
    num_test_questions: int = field(default=96, metadata={"help": "Questions drawn to evaluate on."})
    train_seed: int = field(default=0, metadata={"help": "Seed of the training questions."})
    test_seed: int = field(default=1_000_000, metadata={"help": "Seed of the test questions, away from the others'."})
    system_prompt: str | None = field(default=None, metadata={"help": "A system message; none by default."})
    instruction: str = field(default="Answer with just the result.", metadata={"help": "Follows the question."})
    answer_pattern: str | None = field(
        default=None,
        metadata={
            "help": "A regular expression: its last match, or the match's first group, is the answer. None: the whole "
            "completion."
        },
    )
    strict: bool = field(default=False, metadata={"help": "Reward right answers only, without partial scores."})
    num_shown: int = field(default=8, metadata={"help": "Test questions printed with their answers."})
    critic: str = field(
        default="adapter", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )

    def __post_init__(self) -> None:
        self.task_config = parse_config(self.task_config)
        if self.answer_pattern is not None:
            try:
                re.compile(self.answer_pattern)
            except re.error as error:
                raise ValueError(
                    f"answer_pattern={self.answer_pattern!r} is not a regular expression: {error}"
                ) from error
        mixed = self.task_config.get("datasets", [])
        configs = [self.task_config, *(part.get("config", {}) for part in mixed)]
        if given := {"seed", "size"} & {name for config in configs for name in config}:
            raise ValueError(
                f"task_config sets {' and '.join(sorted(given))}, which would be the same for training and test; set "
                "train_seed, test_seed, num_train_questions and num_test_questions"
            )
        # A task seeds its question number i with seed + i, and a mixture the i-th question of its task j with
        # seed + j + 1 + i.
        needed = max(self.num_train_questions, self.num_test_questions) + 1 + len(mixed)
        if abs(self.train_seed - self.test_seed) < needed:
            raise ValueError(
                f"train_seed={self.train_seed} and test_seed={self.test_seed} would draw the same questions; set them "
                f"at least {needed} apart"
            )


@dataclass
class ReasoningActor(ActorArguments):
    """The actor's arguments, with a small instruction-tuned model as default."""

    model_name_or_path: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", metadata={"help": "The base: an id or a path."}
    )


def create_task(name: str, config: dict[str, Any], size: int, seed: int) -> ProceduralDataset:
    """Return a task of reasoning-gym; its questions depend only on the seed and their number.

    Raises:
        ValueError: there is no such task, or its parameters do not fit; names them.
    """
    if name not in reasoning_gym.factory.DATASETS:
        close = difflib.get_close_matches(name, reasoning_gym.factory.DATASETS, n=3, cutoff=0.5)
        raise ValueError(
            f"task={name!r} is not a task of reasoning-gym{'; it has ' + ', '.join(close) if close else ''}; "
            "docs/reasoning_gym.md shows how to list all"
        )
    given = dict(config)
    try:
        if name == "composite":
            specs = [{"weight": 1.0, "config": {}} | spec for spec in config.get("datasets", [])]
            given["datasets"] = [DatasetSpec(**spec) for spec in specs]
        return reasoning_gym.create_dataset(name, **given, size=size, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:  # a wrong value, an unknown name, either in a mixture
        raise ValueError(f"task={name!r} cannot be made with task_config={config}: {error}") from error


def find_answer(completion: str, pattern: str | None) -> str | None:
    """Return the last match of a pattern, or the first group of this match, without spaces around it; or None."""
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion))
    if not matches:
        return None
    found = matches[-1][1 if matches[-1].re.groups else 0]
    return None if found is None else found.strip()


def draw_questions(args: ReasoningArguments) -> tuple[Drawn, Drawn]:
    """Return entries to train on and to evaluate on; no training question is one of the evaluation's.

    Raises:
        ValueError: the task has so few questions that none is left to train on.
    """
    tests = create_task(args.task, args.task_config, args.num_test_questions, args.test_seed)
    test = [(tests, entry) for entry in tests]
    held_out = {entry["question"] for _, entry in test}
    trains = create_task(args.task, args.task_config, args.num_train_questions, args.train_seed)
    train = [(trains, entry) for entry in trains if entry["question"] not in held_out]
    if not train:
        raise ValueError(
            f"num_test_questions={args.num_test_questions} holds out every question that task={args.task!r} has drawn "
            f"for training; lower it, or let task_config={args.task_config} make more different ones"
        )
    return train, test


def conversation(question: str, instruction: str, system_prompt: str | None) -> list[dict[str, str]]:
    """Return a prompt as messages: the question, a blank line, the instruction; after a system message, if any."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": f"{question}\n\n{instruction}".strip()}]


def make_rows(drawn: Drawn, first: int, args: ReasoningArguments) -> Dataset:
    """Return the questions as conversations, with the right answers and the entries' numbers, from `first` on."""
    return Dataset.from_list(
        [
            {
                "prompt": conversation(entry["question"], args.instruction, args.system_prompt),
                "question": entry["question"],
                "answer": str(entry["answer"]),
                "entry": first + number,
            }
            for number, (_, entry) in enumerate(drawn)
        ]
    )


def make_reward(drawn: Drawn, args: ReasoningArguments) -> Callable[..., list[float]]:
    """Return a reward function: the task's own score, from 0 to 1, for the answer in each completion."""

    def score(completion: str, number: int) -> float:
        answer = find_answer(completion, args.answer_pattern)
        task, entry = drawn[number]
        score = 0.0 if answer is None else float(task.score_answer(answer, entry))
        return score if score >= 1 or not args.strict else 0.0

    def answer_score(completions: list[list[dict[str, str]]], entry: list[int], **kwargs) -> list[float]:
        return [score(messages[-1]["content"], number) for messages, number in zip(completions, entry, strict=True)]

    return answer_score


class Answers:
    """A `compute_metrics` that keeps the answers of the last evaluation in `rows`.

    Its metrics are the share of right answers (score 1) and the share of completions in which an answer was found.
    """

    def __init__(self, reward: Callable[..., list[float]], pattern: str | None):
        self.reward, self.pattern = reward, pattern
        self.rows: list[dict[str, Any]] = []

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        scores = self.reward(prediction.predictions, prediction.label_ids["entry"])
        texts = [messages[-1]["content"] for messages in prediction.predictions]
        self.rows = [{"completion": text, "score": score} for text, score in zip(texts, scores, strict=True)]
        found = [find_answer(text, self.pattern) is not None for text in texts]
        return {
            "accuracy": sum(score >= 1 for score in scores) / len(scores),
            "answered": sum(found) / len(found),
        }


def visible(text: str) -> str:
    """Replace characters that a terminal would obey, such as escapes, by their codes."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"<U+{ord(c):04X}>" for c in text)


def answer_table(test: Dataset, folder: Path, num_rows: int) -> Table:
    """Return a table of test questions with their answers before, if saved, and after training."""
    table = Table("question", "right answer", show_lines=True)
    columns = [test["question"][:num_rows], test["answer"][:num_rows]]
    for file in (folder / "before_answers.jsonl", folder / "after_answers.jsonl"):
        if file.is_file():
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:num_rows]]
            when = file.name.partition("_")[0]
            for column in (f"{when}, greedy", "score"):
                table.add_column(column)
            columns += [[row["greedy"] for row in rows], [f"{row['greedy_score']:.2f}" for row in rows]]
    for row in zip(*columns, strict=True):
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table
