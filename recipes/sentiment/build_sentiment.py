"""Build the small size of recipes/sentiment/sentiment.py: film reviews, a language model and a sentiment classifier.

    python recipes/sentiment/build_sentiment.py    # writes out/sentiment/, in about a minute on one core

Reviews come from the grammar below: a neutral beginning, then clauses that praise or criticize the film. A tiny GPT-2
learns to write both kinds equally often, and a tiny DistilBERT with its own tokenizer learns to tell them apart.
No training review begins with the first eight words of a test review.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

EOS = "<|endoftext|>"
PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
LABELS = ("NEGATIVE", "POSITIVE")

BEGINNINGS = (
    "I watched this {kind} with my {friend} last {day}.",
    "My {friend} and I saw this {kind} in {place}.",
    "This {kind} tells the story of a {hero} in {place}.",
    "On {day} we went to a {kind} about a {hero}.",
)
CLAUSES = (  # by label
    (
        "The {part} is {very} {bad}.",
        "The {part} is never {good}.",
        "I {hated} the {part}.",
        "Every scene feels {bad}.",
        "What a {bad} {kind}!",
        "I would not watch it again.",
    ),
    (
        "The {part} is {very} {good}.",
        "The {part} is never {bad}.",
        "I {loved} the {part}.",
        "Every scene feels {good}.",
        "What a {good} {kind}!",
        "I would gladly watch it again.",
    ),
)
NEUTRAL = ("It runs for {number} minutes.", "It was filmed in {place}.", "The book came out in {place}.")
WORDS = {
    "kind": ["film", "movie", "picture", "drama", "comedy", "western", "thriller"],
    "friend": ["sister", "brother", "mother", "father", "neighbour", "teacher", "boss"],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "place": ["Rome", "Paris", "London", "Madrid", "Vienna", "Lisbon", "Dublin"],
    "hero": ["doctor", "sailor", "painter", "farmer", "soldier", "singer", "thief"],
    "number": ["eighty", "ninety", "hundred"],
    "part": ["acting", "music", "story", "ending", "cast", "dialogue", "camera", "plot"],
    "very": ["very", "truly", "really", "quite", "so", "simply"],
    "good": ["wonderful", "moving", "brilliant", "funny", "charming", "superb", "gripping", "beautiful"],
    "bad": ["dull", "poor", "boring", "clumsy", "terrible", "weak", "tedious", "silly"],
    "loved": ["loved", "adored", "enjoyed", "admired"],
    "hated": ["hated", "disliked", "regretted", "despised"],
}


@dataclass
class BuildArguments:
    """Arguments of the reviews and the two models."""

    output_dir: str = field(default="out/sentiment", metadata={"help": "Folder to write to."})
    num_train_reviews: int = field(default=16384, metadata={"help": "Training reviews written."})
    num_test_reviews: int = field(default=512, metadata={"help": "Test reviews written."})
    held_out: float = field(default=0.2, metadata={"help": "Share of beginnings that only the test reviews use."})
    hidden_size: int = field(default=64, metadata={"help": "Width of both models; heads are 32 wide."})
    num_layers: int = field(default=2, metadata={"help": "Depth of both models."})
    lm_steps: int = field(default=600, metadata={"help": "Steps of the language model."})
    classifier_steps: int = field(default=800, metadata={"help": "Steps of the classifier."})
    batch_size: int = field(default=32, metadata={"help": "Reviews per step."})
    seed: int = field(default=0, metadata={"help": "Seed of the reviews and of the models."})


def all_beginnings() -> list[str]:
    """Return every beginning of the grammar."""
    made = []
    for template in BEGINNINGS:
        names = re.findall(r"\{(\w+)\}", template)
        for words in product(*(WORDS[name] for name in names)):
            made.append(template.format(**dict(zip(names, words, strict=True))))
    return made


def split_beginnings(held_out: float, rng: random.Random) -> tuple[list[str], list[str]]:
    """Return beginnings for training and for the test, which differ within the first eight words."""

    def first_words(first: str) -> tuple[str, ...]:
        return tuple(first.split()[:8])

    openings = sorted({first_words(first) for first in all_beginnings()})
    rng.shuffle(openings)
    test = set(openings[: round(len(openings) * held_out)])
    train_firsts = [first for first in all_beginnings() if first_words(first) not in test]
    return train_firsts, [first for first in all_beginnings() if first_words(first) in test]


def fill_clause(templates: tuple[str, ...], rng: random.Random) -> str:
    """Draw a template and fill each slot independently."""
    return re.sub(r"\{(\w+)\}", lambda slot: rng.choice(WORDS[slot[1]]), rng.choice(templates))


def draw_review(first: str, rng: random.Random) -> dict[str, str | int]:
    """Draw a review with a given beginning; one clause of four may contradict its label."""
    label, length = rng.randrange(2), rng.randint(2, 4)
    says = [CLAUSES[label]] * length
    if length == 4 and rng.random() < 0.5:
        says[rng.randrange(length)] = CLAUSES[1 - label]
    if rng.random() < 0.3:
        says.insert(rng.randint(0, length), NEUTRAL)
    return {"text": " ".join([first, *(fill_clause(templates, rng) for templates in says)]), "label": label}


def text_pattern(templates: tuple[str, ...]) -> str:
    """Return a regular expression that matches every text of the templates."""
    escaped = "|".join(re.sub(r"[.!]", r"\\\g<0>", template) for template in templates)
    return re.sub(r"\{(\w+)\}", lambda slot: f"(?:{'|'.join(WORDS[slot[1]])})", escaped)


def well_formed(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """A reward function: 1 for a whole text that the grammar can write, positive or not, else 0."""
    text = re.compile(f"(?:{text_pattern(BEGINNINGS)})(?: (?:{text_pattern((*CLAUSES[0], *CLAUSES[1], *NEUTRAL))}))+")
    return [float(bool(text.fullmatch(p + c))) for p, c in zip(prompts, completions, strict=True)]


def write_reviews(args: BuildArguments) -> tuple[list[dict], list[dict]]:
    """Write train.jsonl and test.jsonl; return the training and the test reviews."""
    rng = random.Random(args.seed)
    train_firsts, test_firsts = split_beginnings(args.held_out, rng)
    train = [draw_review(rng.choice(train_firsts), rng) for _ in range(args.num_train_reviews)]
    test = [draw_review(rng.choice(test_firsts), rng) for _ in range(args.num_test_reviews)]
    for name, rows in (("train", train), ("test", test)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(args.output_dir) / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return train, test


def byte_level_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a small tokenizer like GPT-2's, without a padding token; most words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, unk_token=EOS)


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a small tokenizer like BERT's: lower case, one token per word, a token before and one after."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    vocabulary = {token: index for index, token in enumerate([PAD, UNKNOWN, START, END, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(token, vocabulary[token]) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=START,
        sep_token=END,
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_gpt2(tokenizer: PreTrainedTokenizerFast, args: BuildArguments) -> GPT2LMHeadModel:
    """Return an untrained GPT-2, initialized at 1/√hidden: the usual 0.02 limits how sure a LoRA can make it."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=args.hidden_size,
        n_layer=args.num_layers,
        n_head=max(1, args.hidden_size // 32),
        n_positions=128,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        initializer_range=args.hidden_size**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config)


def tiny_distilbert(tokenizer: PreTrainedTokenizerFast, args: BuildArguments) -> DistilBertForSequenceClassification:
    """Return an untrained DistilBERT with the labels of the usual sentiment classifiers."""
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=args.hidden_size,
        hidden_dim=2 * args.hidden_size,
        n_layers=args.num_layers,
        n_heads=max(1, args.hidden_size // 32),
        max_position_embeddings=512,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        initializer_range=args.hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    return DistilBertForSequenceClassification(config)


def language_batch(rows: list[dict], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Return right-padded reviews with their EOS, and labels on every real token."""
    ids = [torch.tensor(tokenizer(row["text"] + EOS)["input_ids"]) for row in rows]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def classifier_batch(rows: list[dict], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Return padded reviews and their labels."""
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    return {**batch, "labels": torch.tensor([row["label"] for row in rows])}


def train(
    model: PreTrainedModel,
    rows: list[dict],
    collate: Callable[[list[dict]], dict],
    steps: int,
    learning_rate: float,
    args: BuildArguments,
) -> None:
    """Train with supervision and a cosine schedule."""
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=learning_rate,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=min(50, steps // 10),
        weight_decay=0.01,
        remove_unused_columns=False,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=args.seed,
    )
    Trainer(model, training_args, collate, rows).train()
    model.eval()


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict]) -> float:
    """Return the share of reviews that the classifier labels correctly."""
    batch = classifier_batch(rows, tokenizer)
    labels = batch.pop("labels")
    return float((model(**batch).logits.argmax(dim=1) == labels).float().mean())


def main(args: BuildArguments) -> None:
    torch.set_num_threads(1)  # more threads cost such small models more than they save
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    train_rows, test_rows = write_reviews(args)
    texts = [row["text"] for row in train_rows]

    set_seed(args.seed)
    tokenizer = byte_level_tokenizer(texts)
    model = tiny_gpt2(tokenizer, args)
    train(model, train_rows, lambda rows: language_batch(rows, tokenizer), args.lm_steps, 6e-3, args)
    with torch.no_grad():
        loss = model(**language_batch(test_rows, tokenizer)).loss
    print(f"language model: {model.num_parameters():,} parameters, {loss:.3f} nats per token on test reviews")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    set_seed(args.seed)
    tokenizer = word_tokenizer(texts)
    model = tiny_distilbert(tokenizer, args)
    train(model, train_rows, lambda rows: classifier_batch(rows, tokenizer), args.classifier_steps, 3e-3, args)
    right = accuracy(model, tokenizer, test_rows)
    print(f"classifier: {model.num_parameters():,} parameters, accuracy {right:.3f} on test reviews")
    model.save_pretrained(folder / "classifier")
    tokenizer.save_pretrained(folder / "classifier")


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(BuildArguments, allow_abbrev=False).parse_args_into_dataclasses()
    main(arguments)
