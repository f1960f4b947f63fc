"""PPO on GSM8K: word problems with a number as the answer; the reward is 1 or 0.

    accelerate launch recipes/gsm8k.py --config recipes/gsm8k.yaml

To try it without the Hub and a GPU, on the 50 shipped problems (the model is random and learns nothing):

    python recipes/build_tiny_base.py --output_dir out/tiny
    accelerate launch --cpu --num_processes 1 recipes/gsm8k.py --config recipes/gsm8k.yaml \\
        --model_name_or_path out/tiny --dtype float32 --dataset_name json --output_dir out/gsm8k-tiny \\
        --data_files '{"train": "recipes/gsm8k/problems.jsonl", "test": "recipes/gsm8k/test.jsonl"}' \\
        --gradient_accumulation_steps 1 --max_completion_length 32 --max_steps 8

Rows hold "question" and "answer", the latter ending with the number after "####". docs/gsm8k.md explains the settings.
"""

import re
import threading
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import EvalPrediction

from hfppo import PPOConfig, PPOTrainer

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("recipes/gsm8k.py compares answers with Math-Verify: pip install math-verify") from error

from dataset import DataArguments, conversation, load
from run import ActorArguments, RecipeParser, actor_config, evaluate, init_kwargs, run

MARK, BOX = "####", "\\boxed{"
THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|,\\!)(?=\d{3})")


@dataclass
class GSM8KArguments(DataArguments):
    """Arguments of this recipe."""

    dataset_name: str = field(default="openai/gsm8k", metadata={"help": "Id or path, or json or parquet for files."})
    dataset_config: str | None = field(default="main", metadata={"help": "GSM8K's configuration."})
    system_prompt: str | None = field(default=None, metadata={"help": "A system message; none by default."})
    instruction: str = field(
        default='Think step by step and end with the answer, a number, on a line of its own after "####".',
        metadata={"help": r"Follows the question; the answer may also stand in \boxed{}."},
    )
    critic: str = field(default="adapter", metadata={"help": "'adapter', 'shared', or a model's id or path."})


@dataclass
class GSM8KActor(ActorArguments):
    """Arguments of the actor, with an instruction-tuned model as default."""

    model_name_or_path: str = field(default="Qwen/Qwen2.5-0.5B-Instruct", metadata={"help": "The base."})


def final_answer(text: str) -> str | None:
    r"""Return the text at the last mark: the rest of the line after `####`, or the inside of `\boxed{}`; or None."""
    mark, box = text.rfind(MARK), text.rfind(BOX)
    if mark > box:
        answer = text[mark + len(MARK) :].strip().partition("\n")[0]
    else:
        answer = text_in_braces(text[box + len(BOX) :]) if box >= 0 else ""
    return answer.strip() or None


def text_in_braces(text: str) -> str:
    """Return the text up to the brace that closes an already open one; "" if there is none."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return ""


def parse_answer(answer: str, timeout: int | None) -> list[Any]:
    """Parse an answer with Math-Verify, as LaTeX if it has a backslash, and without commas between thousands."""
    answer = THOUSANDS.sub("", answer).replace("\\$", "").replace("−", "-")
    return parse(f"${answer}$" if "\\" in answer else answer, parsing_timeout=timeout)


def is_right(completion: str, answer: str) -> bool:
    """Return whether the final answer of a completion equals the number after `####` in GSM8K's answer."""
    given = final_answer(completion)
    if given is None:
        return False
    # Math-Verify's time limit is a signal, and only the main thread may set one.
    timeout = 5 if threading.current_thread() is threading.main_thread() else None
    wanted = parse_answer(answer.rpartition(MARK)[2].strip(), timeout)
    return verify(wanted, parse_answer(given, timeout), timeout_seconds=timeout)


def right_answer(completions: list[list[dict[str, str]]], answer: list[str], **kwargs) -> list[float]:
    """Return 1 for a completion with the right final answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(is_right(messages[0]["content"], wanted)) for messages, wanted in pairs]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of completions with the right final answer, and with any."""
    right = right_answer(prediction.predictions, prediction.label_ids["answer"])
    answered = [final_answer(messages[0]["content"]) is not None for messages in prediction.predictions]
    return {"accuracy": sum(right) / len(right), "answered": sum(answered) / len(answered)}


def make_conversations(dataset: Dataset, split: str, args: GSM8KArguments) -> Dataset:
    """Add the questions as messages, in a column "prompt".

    Raises:
        ValueError: a column is missing, or an answer has no `####`.
    """
    if not {"question", "answer"} <= set(dataset.column_names):
        raise ValueError(
            f"{split} has the columns {', '.join(dataset.column_names)}; GSM8K's are question and answer: rename "
            "yours, or choose other data with --dataset_name and --data_files"
        )
    for row, answer in enumerate(dataset["answer"]):
        if MARK not in str(answer):
            raise ValueError(
                f"{split} row {row}: answer={answer!r} has no {MARK} before its final number; write it as "
                f"'reasoning {MARK} 72', or remove the row"
            )
    return dataset.map(lambda row: {"prompt": conversation(row["question"], args.instruction, args.system_prompt)})


def main(script_args: GSM8KArguments, args: PPOConfig, model_args: GSM8KActor) -> None:
    train, test = load(script_args)
    train = make_conversations(train, script_args.train_split, script_args)
    test = None if test is None else make_conversations(test, script_args.test_split, script_args)
    args.model_init_kwargs = init_kwargs(args, model_args)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=right_answer,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=accuracy,
    )
    run(trainer, lambda when: evaluate(trainer, when, do_sample=False))


if __name__ == "__main__":
    main(*RecipeParser((GSM8KArguments, PPOConfig, GSM8KActor), allow_abbrev=False).parse_args_and_config())
