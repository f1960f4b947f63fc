"""The tasks of the critic bench: prompts, scores, exact values, and tiny bases that `build_base` trains."""

import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfppo.rollout import Rollout

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "arithmetic"
LAKE = REPOSITORY / "recipes" / "lake"
SMOLLM2 = REPOSITORY / "out" / "smollm2"  # of recipes/build_smollm2.py
sys.path += [str(REPOSITORY / "recipes" / name) for name in ("arithmetic", "lake", "reasoning")]
import arithmetic  # noqa: E402
import build_arithmetic_base as builder  # noqa: E402
import lake_game  # noqa: E402

CHAIN_TOKENS, CHAIN_SLIPS = 99, 0.02
DELAYED_TOKENS = 100
STEPS, STEP_SLIPS = 12, 0.12

Row = dict[str, str]


@dataclass(frozen=True)
class Task:
    """A task of the bench."""

    fields: dict[str, Any]  # of PPOConfig, the same for all methods
    score: Callable[..., list[float]] | None  # None: the environment gives rewards
    rows: Callable[[], tuple[list[Row], list[Row]]]  # for training and for the evaluation
    draw: Callable[[Row, random.Random], str] | None = None  # a completion for `build_base`; None: a base as it is
    base: Path | None = None  # None: a new Llama of 2 layers
    environment: type | None = None
    exact: Callable[[Rollout, list[str]], tuple[Tensor, Tensor]] | None = None  # V and its mask, (B, T) each
    base_steps: int = 0  # of `build_base`


def chain_values(on_track: Tensor, slips: Tensor | float) -> Tensor:
    """Return V before each step of a scripted chain, whose step is wrong with probability ε, uniformly.

        Q_t = Π_{k≥t} (1 − 10·ε_k/9),   V = 0.1 + 0.9·Q_t on track, 0.1 − 0.1·Q_t off it

    Args:
        on_track: (B, T) bool, whether the last digit so far is right.
        slips: ε, broadcast to (B, T).
    """
    kept = 1 - 10 / 9 * torch.as_tensor(slips, dtype=torch.float64).expand(on_track.shape)
    remaining = kept.flip(1).cumprod(dim=1).flip(1)
    return torch.where(on_track, 0.1 + 0.9 * remaining, 0.1 - 0.1 * remaining)


def chain_answer(start: int, step: int, length: int = CHAIN_TOKENS) -> str:
    return "".join(str((start + step * n) % 10) for n in range(1, length + 1))


def chain_rows() -> tuple[list[Row], list[Row]]:
    pairs = [(a, d) for a in range(10) for d in range(1, 10)]
    rows = [{"prompt": f"{a}+{d}=", "answer": chain_answer(a, d)} for a, d in pairs]
    return rows * 4, rows * 3


def draw_chain(row: Row, rng: random.Random) -> str:
    """Count on from the last digit, right or not; each step is wrong with probability ε, uniformly."""
    digit, step, text = int(row["prompt"][0]), int(row["prompt"][2]), ""
    for _ in row["answer"]:
        digit = (digit + step) % 10
        if rng.random() < CHAIN_SLIPS:
            digit = (digit + rng.randrange(1, 10)) % 10
        text += str(digit)
    return text


def score_chain(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c) == len(a) and c[-1] == a[-1]) for c, a in zip(completions, answer, strict=True)]


def exact_chain(rollout: Rollout, completions: list[str]) -> tuple[Tensor, Tensor]:
    """Return V of a scripted chain that slips as often as this rollout did, an approximation of the policy's own."""
    width = rollout.mask.shape[1]
    pairs = [(c[4:].ljust(width), chain_answer(int(c[0]), int(c[2]), width)) for c in completions]
    right = torch.tensor([[x == y for x, y in zip(*pair, strict=True)] for pair in pairs])
    before = torch.cat([torch.ones(len(right), 1, dtype=torch.bool), right[:, :-1]], dim=1)
    return chain_values(before, float((right != before).double().mean())), rollout.mask


def delayed_rows() -> tuple[list[Row], list[Row]]:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(max(a, b))} for a in range(10) for b in range(10) if a != b]
    return rows * 4, rows * 3


def draw_delayed(row: Row, rng: random.Random) -> str:
    """Give the larger digit with probability 0.2, the smaller one with 0.5, else another; then low or high digits.

    They are low after the larger digit, so a critic can read the outcome from any of them. The score ignores them.
    """
    small, large = sorted((int(row["prompt"][0]), int(row["prompt"][2])))
    others = [n for n in range(10) if n not in (small, large)]
    first = rng.choices([large, small, rng.choice(others)], [0.2, 0.5, 0.3])[0]
    return str(first) + "".join(rng.choice("01234" if first == large else "56789") for _ in range(DELAYED_TOKENS - 1))


def score_delayed(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(c[:1] == a) for c, a in zip(completions, answer, strict=True)]


def exact_delayed(rollout: Rollout, completions: list[str]) -> tuple[Tensor, Tensor]:
    """Return V after the first token, 1 if it is right; before it, V = π(right) is left out."""
    after = rollout.mask.clone()
    after[:, 0] = False
    return rollout.scores[:, None].double().expand(rollout.mask.shape), after


def arithmetic_rows() -> tuple[list[Row], list[Row]]:
    files = (RECIPE / "train.jsonl", RECIPE / "test.jsonl")
    train, test = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    return train, test


def lake_rows() -> tuple[list[Row], list[Row]]:
    return [{"prompt": lake_game.PROMPT}], [{"prompt": lake_game.PROMPT}] * 512


def sign_rows() -> tuple[list[Row], list[Row]]:
    """Return sums and differences of two digits: the default task of recipes/reasoning/reasoning.py."""
    import reasoning_tasks as tasks

    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    args = tasks.ReasoningArguments(task_config=digits)
    train, test = (tasks.make_rows(drawn, 0, args) for drawn in tasks.draw_questions(args))
    return train.to_list(), test.to_list()


def score_sign(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
    numbers = (re.findall(r"-?\d+", messages[-1]["content"]) for messages in completions)
    return [float(found[-1:] == [a]) for found, a in zip(numbers, answer, strict=True)]


def step_rows() -> tuple[list[Row], list[Row]]:
    """Return a number to count on from, in `STEPS` written steps of the same width."""
    pairs = [(start, by) for start in range(10, 90) for by in range(2, 10)]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"From {a} by {d}:\n", "answer": str(a + STEPS * d)} for a, d in pairs]
    return rows[96:], rows[:96]


def draw_steps(row: Row, rng: random.Random) -> str:
    """Write a line per step, which gives one too many with probability `STEP_SLIPS`."""
    total, by = (int(x) for x in re.findall(r"\d+", row["prompt"]))
    lines = []
    for _ in range(STEPS):
        after = total + by + (rng.random() < STEP_SLIPS)
        lines.append(f"{total}+{by}={after}")
        total = after
    return "\n".join(lines) + "<|im_end|>"


def score_steps(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(c.strip().split("=")[-1] == a) for c, a in zip(completions, answer, strict=True)]


ROLLOUTS = {"num_ppo_epochs": 1, "num_mini_batches": 4, "per_device_eval_batch_size": 512, "total_episodes": 2560}
SHORT = {**ROLLOUTS, "per_device_train_batch_size": 32, "learning_rate": 1e-3, "max_completion_length": 12}
LONG = {**ROLLOUTS, "per_device_train_batch_size": 16}  # 40 rollouts of 64 completions
CHAIN = {**LONG, "learning_rate": 1e-3, "max_completion_length": CHAIN_TOKENS}
DELAYED = {**LONG, "learning_rate": 2e-3, "max_completion_length": DELAYED_TOKENS}
LAKES = {"num_ppo_epochs": 2, "num_mini_batches": 4, "per_device_eval_batch_size": 256, "total_episodes": 3072}
LAKES |= {"per_device_train_batch_size": 8, "learning_rate": 2e-3, "max_completion_length": 192, "max_turn_length": 2}
LAKES |= {"local_rollout_forward_batch_size": 256}
SIGNS = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_eval_batch_size": 96, "total_episodes": 960}
SIGNS |= {"per_device_train_batch_size": 32, "learning_rate": 2e-4, "max_completion_length": 12}
SIGNS |= {"local_rollout_forward_batch_size": 32}
LINES = {**SIGNS, "num_ppo_epochs": 1, "num_mini_batches": 4, "per_device_train_batch_size": 8}
LINES |= {"total_episodes": 480, "max_completion_length": 128}

TASKS = {
    "sums": Task(SHORT, arithmetic.right_answer, arithmetic_rows, base=RECIPE / "base"),
    "chain": Task(CHAIN, score_chain, chain_rows, draw_chain, exact=exact_chain, base_steps=700),
    "delayed": Task(DELAYED, score_delayed, delayed_rows, draw_delayed, exact=exact_delayed, base_steps=1200),
    "lake": Task(LAKES, None, lake_rows, base=LAKE / "base", environment=lake_game.Lake),
    "signs": Task(SIGNS, score_sign, sign_rows, base=SMOLLM2),
    "steps": Task(LINES, score_steps, step_rows, draw_steps, base=SMOLLM2, base_steps=60),
}


def build_base(task: Task, folder: Path) -> None:
    """Train the task's model, or a new Llama of 2 layers, on the task's sloppy completions."""
    torch.manual_seed(0)
    rng, rows = random.Random(0), task.rows()[0]
    if task.base is None:
        tokenizer, rate, size = builder.character_tokenizer(), 3e-3, 48
        model: Any = builder.small_llama(tokenizer, 64, 2)
    else:
        tokenizer, rate, size = AutoTokenizer.from_pretrained(task.base, padding_side="right"), 2e-4, 16
        model = AutoModelForCausalLM.from_pretrained(task.base, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=task.base_steps)
    for _ in range(task.base_steps):
        chosen = rng.sample(rows, size)
        batch = tokenizer([r["prompt"] + task.draw(r, rng) for r in chosen], return_tensors="pt", padding=True)
        prompts = torch.tensor([len(tokenizer(r["prompt"])["input_ids"]) for r in chosen])
        place = torch.arange(batch["input_ids"].shape[1]) - prompts[:, None]  # in the completion
        labels = batch["input_ids"].masked_fill((place < 0) | (batch["attention_mask"] == 0), -100)
        with torch.autocast("cpu", torch.bfloat16, enabled=task.base is not None):
            output = model(**batch, labels=labels)
        # The first two tokens count as much as all others: in "delayed" all there is to learn is in them.
        early = ((place == 0) | (place == 1))[:, 1:]
        loss = output.loss + torch.nn.functional.cross_entropy(output.logits[:, :-1][early], labels[:, 1:][early])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.to(torch.float32 if task.base is None else torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def datasets(task: Task, with_answer: bool) -> tuple[Dataset, Dataset]:
    """Return the rows for training, with the answer for the critic if asked, and for the evaluation."""
    train, test = task.rows()
    shown = [row | {"critic_prompt": row["answer"] + row["prompt"]} for row in train] if with_answer else train
    return Dataset.from_list(shown), Dataset.from_list(test)
