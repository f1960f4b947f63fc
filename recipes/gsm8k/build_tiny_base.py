"""Build a tiny chat model with random weights, to try a recipe without the Hub.

    python recipes/gsm8k/build_tiny_base.py --output_dir out/tiny

The model writes noise and cannot learn anything useful; it shows within seconds on a CPU that a command runs. The
tokenizer is byte-level BPE, so it accepts any text; its merges come from the problems in `recipes/gsm8k`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

PAD, EOS = "<pad>", "<eos>"
PROBLEMS = Path(__file__).parent / "problems.jsonl"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass
class BuildArguments:
    """Arguments of this script."""

    output_dir: str = field(default="out/tiny", metadata={"help": "Folder for model and tokenizer."})


def byte_tokenizer(vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template; frequent words of the problems are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(PROBLEMS)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left", chat_template=CHAT_TEMPLATE
    )


def build(output_dir: str) -> None:
    """Write model and tokenizer, identical every time."""
    set_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=170,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=64**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(BuildArguments, allow_abbrev=False).parse_args_into_dataclasses()
    build(arguments.output_dir)
