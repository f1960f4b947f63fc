"""Peak memory of one micro-batch of the update, forward and backward, over vocabulary and tokens.

    python tests/benchmarks/memory.py [--critic adapter] [--checkpointing]

Llama of 6 layers, width 256, random weights, float32 on a CPU, bfloat16 on a GPU. Each case in a process of its own.
Prints a Markdown table of what is taken on top of the loaded model.
"""

import argparse
import os
import resource
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfppo import ActorCritic
from hfppo.models.loading import default_peft_config

VOCABULARIES, TOKENS, WIDTH = (4096, 32_768, 131_072), (2048, 4096, 8192), 256


def peak() -> int:
    """Bytes, since the start of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(vocabulary: int, tokens: int, critic: str, checkpointing: bool) -> int:
    """Bytes that forward and backward over rows of 256 completion tokens take, on top of what was there."""
    cuda = torch.cuda.is_available()
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=4, **shape))
    base = base.to("cuda", torch.bfloat16) if cuda else base
    model = ActorCritic(base, default_peft_config(), critic).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = torch.randint(vocabulary, (tokens // WIDTH, WIDTH + 1), device=model.device)
    mask = torch.ones(len(ids), WIDTH, dtype=torch.bool, device=model.device)

    def step(ids: torch.Tensor, mask: torch.Tensor) -> None:
        out = model(ids, torch.ones_like(ids), mask, entropy="constant")
        (out.logprobs.sum() + out.values.sum()).backward()

    step(ids[:1, :9], mask[:1, :8])  # what libraries allocate once
    before = peak()
    step(ids, mask)
    return peak() - before


def main(options: argparse.Namespace) -> None:
    print(f"| tokens | {' | '.join(f'vocabulary {v}' for v in VOCABULARIES)} | all logits of the last, float32 |")
    print(f"|---|{'---|' * len(VOCABULARIES)}---|")
    flags = ["--critic", options.critic, *(["--checkpointing"] if options.checkpointing else [])]
    for tokens in TOKENS:
        cells = []
        for vocabulary in VOCABULARIES:
            case = [sys.executable, __file__, *flags, "--case", str(vocabulary), str(tokens)]
            # glibc keeps freed blocks of many megabytes otherwise, and its heap grows with the number of chunks.
            env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
            done = subprocess.run(case, capture_output=True, text=True, check=True, env=env)
            cells.append(f"{int(done.stdout.splitlines()[-1]) / 1e6:.0f} MB")
        print(f"| {tokens} | {' | '.join(cells)} | {tokens * VOCABULARIES[-1] * 4 / 1e6:.0f} MB |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--critic", choices=["adapter", "shared"], default="adapter")
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    parser.add_argument("--case", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(measure(*options.case, options.critic, options.checkpointing))
    else:
        main(options)
