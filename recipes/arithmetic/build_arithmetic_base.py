"""Build the arithmetic task from scratch: tokenizer, base model, training and test prompts.

    python recipes/arithmetic/build_arithmetic_base.py                 # writes recipes/arithmetic/

A question makes a claim, 请问12+7=20？, and the answer judges it and gives the sum: 不对，等于19！ or 是的，等于19！
The base first learns the skill from clean answers. In a short second phase many answers are wrong, and the base learns
to answer unreliably although it has the skill. PPO starts from there. No phase has the held-out pairs of numbers.
The files in `recipes/arithmetic/` were written by this script with its defaults.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import IterableDataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+=请问？是的不对，等于！"


@dataclass
class BuildArguments:
    """Arguments of the arithmetic task and its base model."""

    output_dir: str = field(default=str(Path(__file__).parent), metadata={"help": "Output folder."})
    largest: int = field(default=49, metadata={"help": "Largest number in a sum."})
    held_out: float = field(default=0.15, metadata={"help": "Share of pairs that only the test prompts use."})
    clean_steps: int = field(default=2500, metadata={"help": "Steps on right answers."})
    sloppy_steps: int = field(default=300, metadata={"help": "Steps on sloppy answers."})
    wrong: float = field(default=0.6, metadata={"help": "Share of wrong answers in the sloppy phase."})
    hidden_size: int = field(default=96, metadata={"help": "Width of the model; heads are 32 wide."})
    num_layers: int = field(default=3, metadata={"help": "Depth of the model."})
    batch_size: int = field(default=256, metadata={"help": "Answers per step."})
    num_test_prompts: int = field(default=512, metadata={"help": "Test prompts written."})
    num_train_prompts: int = field(default=4096, metadata={"help": "Training prompts written."})
    num_demonstrations: int = field(default=4096, metadata={"help": "Sloppy answers written, for recipes/sft.py."})
    num_preferences: int = field(default=4096, metadata={"help": "Pairs written, for recipes/reward_model.py."})
    seed: int = field(default=0, metadata={"help": "Seed of the split, the model and the answers."})


def split_pairs(largest: int, held_out: float, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return pairs (a, b) for training and for the test; (a, b) and (b, a) are in the same split."""
    unordered = [(a, b) for a in range(largest + 1) for b in range(a, largest + 1)]
    random.Random(seed).shuffle(unordered)
    cut = round(len(unordered) * held_out)

    def both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return sorted({order for a, b in pairs for order in ((a, b), (b, a))})

    return both_orders(unordered[cut:]), both_orders(unordered[:cut])


def draw_near(number: int, rng: random.Random) -> int:
    """Draw another number, at most 5 away and not negative."""
    return rng.choice([n for n in range(max(0, number - 5), number + 6) if n != number])


def draw_question(pairs: list[tuple[int, int]], rng: random.Random) -> dict[str, str]:
    """Draw a question, whose claim is right half of the time, and its right answer."""
    a, b = rng.choice(pairs)
    claim = a + b if rng.random() < 0.5 else draw_near(a + b, rng)
    verdict = "是的" if claim == a + b else "不对"
    return {"prompt": f"请问{a}+{b}={claim}？", "answer": f"{verdict}，等于{a + b}！"}


def spoil_answer(row: dict[str, str], rng: random.Random) -> str:
    """Return a wrong answer. If the sum has a carry, two in three forget it; the others give a sum nearby."""
    a, b = map(int, re.findall(r"\d+", row["prompt"])[:2])
    carry = a % 10 + b % 10 >= 10
    total = a + b - 10 if carry and rng.random() < 2 / 3 else draw_near(a + b, rng)
    return f"{row['answer'][:2]}，等于{total}！"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, plus padding and end of sequence."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def small_llama(tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    """Return an untrained Llama, initialized at 1/√hidden: the usual 0.02 limits how sure a LoRA can make it."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        max_position_embeddings=512,
        initializer_range=hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def draw_demonstration(pairs: list[tuple[int, int]], wrong: float, rng: random.Random) -> dict[str, str]:
    """Draw a question and an answer; `wrong` is the probability of a wrong one."""
    row = draw_question(pairs, rng)
    return {"prompt": row["prompt"], "completion": spoil_answer(row, rng) if rng.random() < wrong else row["answer"]}


def draw_preference(pairs: list[tuple[int, int]], rng: random.Random) -> dict[str, str]:
    """Draw a question with its right answer and a wrong one."""
    row = draw_question(pairs, rng)
    return {"prompt": row["prompt"], "chosen": row["answer"], "rejected": spoil_answer(row, rng)}


class Answers(IterableDataset):
    """An endless stream of questions and answers; `wrong` is the probability of a wrong answer."""

    def __init__(self, pairs: list[tuple[int, int]], wrong: float, seed: int):
        self.pairs, self.wrong, self.seed = pairs, wrong, seed

    def __iter__(self) -> Iterator[dict[str, str]]:
        rng = random.Random(self.seed)
        while True:
            row = draw_question(self.pairs, rng)
            yield {**row, "answer": spoil_answer(row, rng)} if rng.random() < self.wrong else row


def collate(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Return right-padded token ids, with labels only on the answer and its end."""
    text = [row["prompt"] + row["answer"] + EOS for row in rows]
    batch = tokenizer(text, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for label, row in zip(labels, rows, strict=True):
        label[: len(row["prompt"])] = -100
    return {**batch, "labels": labels}


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, answers: Answers, steps: int, lr: float, args):
    """Train with supervision and a cosine schedule."""
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, steps // 10),
        weight_decay=0.01,
        remove_unused_columns=False,
        logging_steps=100,
        save_strategy="no",
        seed=args.seed,
    )
    Trainer(model, training_args, lambda rows: collate(rows, tokenizer), answers).train()


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[dict[str, str]], do_sample: bool) -> float:
    """Return the share of answers with every character right, sampled at temperature 1 or greedy."""
    model.eval()
    prompts = tokenizer(
        [row["prompt"] for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    out = model.generate(**prompts, max_new_tokens=12, do_sample=do_sample, top_k=0, top_p=1.0)
    texts = tokenizer.batch_decode(out[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main(args: BuildArguments) -> None:
    set_seed(args.seed)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    train_pairs, test_pairs = split_pairs(args.largest, args.held_out, args.seed)
    rng = random.Random(args.seed)
    train_rows = [draw_question(train_pairs, rng) for _ in range(args.num_train_prompts)]
    test_rows = [draw_question(test_pairs, rng) for _ in range(args.num_test_prompts)]
    write_rows(folder / "train.jsonl", train_rows)
    write_rows(folder / "test.jsonl", test_rows)
    rows = [draw_demonstration(train_pairs, args.wrong, rng) for _ in range(args.num_demonstrations)]
    write_rows(folder / "demonstrations.jsonl", rows)
    write_rows(folder / "preferences.jsonl", [draw_preference(train_pairs, rng) for _ in range(args.num_preferences)])
    held_out = [draw_preference(test_pairs, rng) for _ in range(args.num_test_prompts)]
    write_rows(folder / "test_preferences.jsonl", held_out)

    tokenizer = character_tokenizer()
    model = small_llama(tokenizer, args.hidden_size, args.num_layers)
    print(f"{model.num_parameters():,} parameters, {len(train_pairs)} training pairs, {len(test_pairs)} held out")

    train(model, tokenizer, Answers(train_pairs, 0.0, args.seed + 1), args.clean_steps, 3e-3, args)
    for name, rows in (("train", train_rows[:512]), ("held-out", test_rows)):
        print(f"clean, {name}: sampled {accuracy(model, tokenizer, rows, True):.3f}", end=" ")
        print(f"greedy {accuracy(model, tokenizer, rows, False):.3f}")
    if args.sloppy_steps:
        train(model, tokenizer, Answers(train_pairs, args.wrong, args.seed + 2), args.sloppy_steps, 1e-3, args)
    for name, rows in (("train", train_rows[:512]), ("held-out", test_rows)):
        print(f"sloppy, {name}: sampled {accuracy(model, tokenizer, rows, True):.3f}", end=" ")
        print(f"greedy {accuracy(model, tokenizer, rows, False):.3f}")

    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(BuildArguments, allow_abbrev=False).parse_args_into_dataclasses()
    main(arguments)
