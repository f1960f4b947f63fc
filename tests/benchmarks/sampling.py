"""Tokens per second of each sampler, on the same prompts, in one run.

    python tests/benchmarks/sampling.py [--rounds 5] [--new_tokens 128] [--vllm] [--server http://127.0.0.1:8000]

Prints a Markdown table. `--vllm` adds an engine in this process, and needs vLLM; `--server` a server, which must have
been started for the model that `--model_folder` holds (it is made there first by `--only_make_model`).
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hfppo import ActorCritic, PPOConfig
from hfppo.data.prompts import pad_left
from hfppo.generation import make_sampler
from hfppo.models.loading import default_peft_config

EOS = 1


def make_model(folder: str) -> None:
    """6 layers of width 256 and a vocabulary of 4096, with random weights that hardly ever choose EOS."""
    set_seed(0)
    shape = {
        **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024},
        **{"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0},
    }
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    words = models.WordLevel({f"w{n}": n for n in range(shape["vocab_size"])}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w1").save_pretrained(folder)


def main(options: argparse.Namespace) -> None:
    folder = options.model_folder or tempfile.mkdtemp()
    if not (Path(folder) / "config.json").is_file():
        make_model(folder)
    if options.only_make_model:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ActorCritic(LlamaForCausalLM.from_pretrained(folder).to(device), default_peft_config(), critic=None).eval()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 25, (options.prompts,), generator=generator).tolist()
    prompts = [torch.randint(2, 4096, (n,), generator=generator).tolist() for n in lengths]
    inputs = [x.to(device) for x in pad_left(prompts, 0)]
    placements = {"transformers generate": {}}
    if options.vllm:
        engine = {"enforce_eager": device == "cpu", "max_model_len": 24 + options.new_tokens}
        placements["vLLM colocate"] = {"use_vllm": True, "vllm_engine_kwargs": engine}
    if options.server:
        placements["vLLM server"] = {
            **{"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": options.server},
        }
    samplers, starts, rates = {}, {}, {name: [] for name in placements}
    for name, config in placements.items():
        args = PPOConfig(
            tempfile.mkdtemp(), max_completion_length=options.new_tokens, use_cpu=device == "cpu", **config
        )
        start = time.perf_counter()
        samplers[name] = make_sampler(model, [EOS], 0, args, Accelerator(cpu=device == "cpu"))
        starts[name] = time.perf_counter() - start
    for turn in range(options.rounds + 1):  # in alternation, so that all see the machine's moods; the first warms up
        seeds = [options.prompts * turn + n for n in range(options.prompts)]
        for name, sampler in samplers.items():
            start = time.perf_counter()
            with sampler.ready():
                completions = sampler(*inputs, seeds)
            seconds = time.perf_counter() - start
            if turn:
                rates[name].append(int(completions.mask.sum()) / seconds)
    base = sorted(rates["transformers generate"])[options.rounds // 2]
    print("| sampler | tokens per second, sync included | times `generate` | start, s |\n|---|---|---|---|")
    for name, each in rates.items():
        middle = sorted(each)[options.rounds // 2]
        print(
            f"| {name} | {middle:.0f} ({min(each):.0f}–{max(each):.0f}) | {middle / base:.2f} | {starts[name]:.1f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--model_folder", help="where the model lies or is made; none: a temporary folder")
    parser.add_argument("--only_make_model", action="store_true", help="for a server to load")
    parser.add_argument("--vllm", action="store_true", help="with an engine in this process")
    parser.add_argument("--server", help="address of a vLLM server")
    main(parser.parse_args())
