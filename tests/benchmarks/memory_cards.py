"""The tables of docs/memory.md: Qwen2.5's shapes on four cards, and their peaks by phase. No GPU, no weights.

    PYTHONPATH=docs python tests/benchmarks/memory_cards.py

Prompts and completions of 512 tokens, micro-batches of 8 rows, 64 rows at once without gradient.
"""

import warnings
from dataclasses import replace

from gpu_memory import Peaks, Setup, estimate, make_fit
from transformers import Qwen2Config

from hfppo import memory

# Hidden size, inner size, layers, heads, key-value heads, vocabulary, tied head: config.json of Qwen/Qwen2.5-….
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
CARDS = (16, 24, 40, 80)  # GB
DEFAULTS = Setup(max_completion_length=512, local_rollout_forward_batch_size=64)
OTHERS = {
    "update without `activation_checkpointing`": replace(DEFAULTS, activation_checkpointing=False),
    "the same, and without `bf16`": replace(DEFAULTS, activation_checkpointing=False, bf16=False),
    'update with `critic="shared"`': replace(DEFAULTS, critic="shared"),
    'update with `critic="shared"`, without `activation_checkpointing`': replace(
        DEFAULTS, critic="shared", activation_checkpointing=False
    ),
}


def config_of(name: str) -> Qwen2Config:
    hidden, inner, layers, heads, key_values, vocabulary, tied = SHAPES[name]
    return Qwen2Config(
        **{"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary},
        **{"num_attention_heads": heads, "num_key_value_heads": key_values, "tie_word_embeddings": tied},
    )


def cell(name: str, card: int) -> str:
    """The peak on a card, and the settings that differ from the defaults."""
    asked = replace(DEFAULTS, card=card)
    found = make_fit(config_of(name), asked)
    if found is None:
        return "–"
    setup, peaks = found
    changed = [f"`{name}={x}`" for name, x in vars(setup).items() if x != getattr(asked, name)]
    return "; ".join([f"{peaks.total / 1e9:.1f}", *changed])


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    known: dict[tuple[str, Setup], Peaks] = {}

    def remembered(config: Qwen2Config, setup: Setup) -> Peaks:
        key = str(config.hidden_size), replace(setup, card=None)  # which has no effect beside a number of rows
        return known[key] if key in known else known.setdefault(key, estimate(config, setup))

    memory.estimate = remembered
    print(f"| | {' | '.join(f'{card} GB' for card in CARDS)} |\n|---|{'---|' * len(CARDS)}")
    for name in SHAPES:
        print(f"| {name} | {' | '.join(cell(name, card) for card in CARDS)} |", flush=True)
    found = {name: remembered(config_of(name), DEFAULTS) for name in SHAPES}
    four_bits = {name: remembered(config_of(name), replace(DEFAULTS, load_in_4bit=True)) for name in SHAPES}
    rows = {
        "weights, AdamW's moments": [x.weights for x in found.values()],
        "the same with a base in NF4": [x.weights for x in four_bits.values()],
        **{phase: [x.phases[phase] for x in found.values()] for phase in found["0.5B"].phases},
        **{
            label: [remembered(config_of(name), setup).phases["update"] for name in SHAPES]
            for label, setup in OTHERS.items()
        },
    }
    print(f"\n| GB | {' | '.join(SHAPES)} |\n|---|{'---|' * len(SHAPES)}")
    for label, sizes in rows.items():
        print(f"| {label} | {' | '.join(f'{size / 1e9:.1f}' for size in sizes)} |", flush=True)


if __name__ == "__main__":
    main()
