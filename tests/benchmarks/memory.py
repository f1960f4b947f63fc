"""Peak memory of one micro-batch of the update, forward and backward, over vocabulary and tokens.

    PYTHONPATH=docs python tests/benchmarks/memory.py [--critic adapter] [--checkpointing]

Llama of 6 layers, width 256, random weights, float32 on a CPU, bfloat16 on a GPU. Each case in a process of its own.
Prints a Markdown table of what is taken on top of the loaded model, and after it the estimate of `docs/gpu_memory.py`.
"""

import argparse
import os
import resource
import subprocess
import sys
from contextlib import nullcontext

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfppo import ActorCritic, memory
from hfppo.models.loading import default_peft_config

VOCABULARIES, TOKENS, WIDTH = (4096, 32_768, 131_072), (2048, 4096, 8192), 256


def peak() -> int:
    """Bytes, since the start of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def config_of(vocabulary: int) -> LlamaConfig:
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
    return LlamaConfig(vocab_size=vocabulary, num_key_value_heads=4, **shape)


def estimate(vocabulary: int, tokens: int, critic: str, checkpointing: bool) -> int:
    """Bytes of the same, on paper."""
    cuda = torch.cuda.is_available()
    setup = memory.Setup(
        **{"max_prompt_length": 1, "max_completion_length": WIDTH, "per_device_train_batch_size": tokens // WIDTH},
        **{"critic": critic, "activation_checkpointing": checkpointing, "bf16": False},
        **{"dtype": "bfloat16" if cuda else "float32", "local_rollout_forward_batch_size": 1},
    )
    if not cuda:  # the output head's chunks are those of a CPU
        memory.chunks_of_a_gpu = nullcontext
    return memory.estimate(config_of(vocabulary), setup).phases["update"]


def measure(vocabulary: int, tokens: int, critic: str, checkpointing: bool) -> int:
    """Bytes that forward and backward over rows of 256 completion tokens take, on top of what was there."""
    cuda = torch.cuda.is_available()
    base = LlamaForCausalLM(config_of(vocabulary))
    base = base.to("cuda", torch.bfloat16) if cuda else base
    model = ActorCritic(base, default_peft_config(), critic).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = torch.randint(vocabulary, (tokens // WIDTH, WIDTH + 1), device=model.device)
    mask = torch.ones(len(ids), WIDTH, dtype=torch.bool, device=model.device)

    def step(ids: torch.Tensor, mask: torch.Tensor) -> None:
        memory.update(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask})

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
            measured, estimated = (int(x) / 1e6 for x in done.stdout.splitlines()[-1].split())
            cells.append(f"{measured:.0f} MB; {estimated:.0f}")
        print(f"| {tokens} | {' | '.join(cells)} | {tokens * VOCABULARIES[-1] * 4 / 1e6:.0f} MB |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--critic", choices=["adapter", "shared"], default="adapter")
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    parser.add_argument("--case", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = *options.case, options.critic, options.checkpointing
        print(measure(*case), estimate(*case))
    else:
        main(options)
