"""GSM8K's problems as conversations, and the comparison of answers.

Rows have "question" and "answer", the latter ending with the number after "####".
"""

import re
import threading
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from hfppo.cli import DataArguments

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("recipes/gsm8k/gsm8k.py compares answers with Math-Verify: pip install math-verify") from error

MARK, BOX = "####", "\\boxed{"
THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|,\\!)(?=\d{3})")


@dataclass
class GSM8KArguments(DataArguments):
    """Arguments of recipes/gsm8k/gsm8k.py."""

    dataset_name: str = field(default="openai/gsm8k", metadata={"help": "Id or path, or json or parquet for files."})
    dataset_config: str | None = field(default="main", metadata={"help": "GSM8K's configuration."})
    system_prompt: str | None = field(default=None, metadata={"help": "A system message; none by default."})
    instruction: str = field(
        default='Think step by step and end with the answer, a number, on a line of its own after "####".',
        metadata={"help": r"Follows the question; the answer may also stand in \boxed{}."},
    )
    critic: str = field(
        default="adapter", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )


def conversation(question: str, instruction: str, system_prompt: str | None) -> list[dict[str, str]]:
    """Return a prompt as messages: the question, a blank line, the instruction; after a system message, if any."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": f"{question}\n\n{instruction}".strip()}]


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
