"""Build the base of the lake game: it plays legal moves, each with the same probability, and knows nothing of the way.

    python recipes/lake/build_lake_base.py                 # writes recipes/lake/base

The base is a small Llama, trained on the transcripts of random games. The files in `recipes/lake/base` were written by
this script with its defaults.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lake_game import CELLS, FELL, FOUND_CHEST, HAS_KEY, ILLEGAL, MOVED, MOVES, PROMPT, TURNS, Lake
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

PAD, END_OF_TURN, UNKNOWN = "<pad>", "<eot>", "<unk>"
# A message of the user is an observation, one of the assistant a move. Neither needs a header.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}"
)


@dataclass
class BuildArguments:
    """Arguments of this script."""

    output_dir: str = field(default=str(Path(__file__).parent / "base"), metadata={"help": "Output folder."})
    num_episodes: int = field(default=2500, metadata={"help": "Random games to learn from."})
    num_epochs: int = field(default=2, metadata={"help": "Times that each game is gone through."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Learning rate after warmup; it decays to 0."})
    observations: bool = field(default=False, metadata={"help": "Learn to predict the observations as well."})
    hidden_size: int = field(default=64, metadata={"help": "Width of the model; heads are 32 wide."})
    num_layers: int = field(default=2, metadata={"help": "Depth of the model."})
    seed: int = field(default=0, metadata={"help": "Seed of the model and of the games."})


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word: cells, key, moves and events."""
    words = [f"{row},{column}" for row, column in CELLS]
    words += [*HAS_KEY.values(), *MOVES, MOVED, FOUND_CHEST, FELL, ILLEGAL]
    vocabulary = {token: index for index, token in enumerate([PAD, END_OF_TURN, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END_OF_TURN,
        unk_token=UNKNOWN,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


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


def random_game(seed: int) -> list[dict[str, str]]:
    """Play random moves, and return the conversation."""
    luck, lake = random.Random(f"game {seed}"), Lake()
    messages = [{"role": "user", "content": PROMPT[0]["content"] + lake.reset(seed=seed)}]
    lake.luck = luck
    ended = False
    while not ended:
        move = luck.choice("".join(MOVES))
        observation, _, ended, _, _ = lake.step(move)
        messages += [{"role": "assistant", "content": move}, {"role": "user", "content": observation}]
    return messages[:-1]  # nobody sees the last observation


def tokenize(
    game: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast, observations: bool
) -> dict[str, torch.Tensor]:
    """Return token ids and labels of a game; labels on the moves, and on the observations if asked."""
    encoded: Any = tokenizer.apply_chat_template(
        game, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    ids = encoded["input_ids"][0]
    learned = torch.as_tensor(encoded["assistant_masks"]).bool().view(-1) | observations
    return {"input_ids": ids, "labels": ids.masked_fill(~learned, -100)}


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: BuildArguments) -> None:
    """Train on random games with a linear schedule."""
    games = [tokenize(random_game(args.seed + i), tokenizer, args.observations) for i in range(args.num_episodes)]
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.num_epochs,
        per_device_train_batch_size=16,
        learning_rate=args.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=20,
        logging_steps=50,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        seed=args.seed,
    )
    Trainer(model, training_args, train_dataset=games).train()  # all games have one length


@torch.no_grad()
def move_probabilities(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_games: int) -> torch.Tensor:
    """Return the mean probability of each move at the turns of fresh games, (4,): the rest of 1 is illegal."""
    games = [tokenize(random_game(10**6 + i), tokenizer, False) for i in range(num_games)]
    ids, labels = (torch.stack([game[name] for game in games]) for name in ("input_ids", "labels"))
    moves = torch.tensor(tokenizer.convert_tokens_to_ids(list(MOVES)))
    probabilities = model.eval()(input_ids=ids).logits[:, :-1].softmax(dim=-1)
    legal = probabilities[torch.isin(labels[:, 1:], moves)]
    ended = probabilities[labels[:, 1:] == tokenizer.eos_token_id][:, tokenizer.eos_token_id]
    return legal[:, moves].mean(dim=0) * ended.mean()


def main(args: BuildArguments) -> None:
    set_seed(args.seed)
    torch.set_num_threads(1)
    tokenizer = word_tokenizer()
    model = small_llama(tokenizer, args.hidden_size, args.num_layers)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} words")
    train(model, tokenizer, args)
    probabilities = move_probabilities(model, tokenizer, 200)
    print(", ".join(f"{move} {p:.3f}" for move, p in zip(MOVES, probabilities.tolist(), strict=True)), end="; ")
    print(f"{TURNS * (1 - float(probabilities.sum())):.3f} illegal turns per episode")
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(BuildArguments, allow_abbrev=False).parse_args_into_dataclasses()
    main(arguments)
