"""Tokens per second of each sampler, on the same prompts, in one run.

    PYTHONPATH=docs python tests/benchmarks/sampling.py [--rounds 5] [--new_tokens 128] [--vllm] [--server http://127.0.0.1:8000]
    PYTHONPATH=docs python tests/benchmarks/sampling.py --rounds 2 --prompts 128 --new_tokens 512 --mean_length 150

Prints a Markdown table. `--vllm` adds an engine in this process, and needs vLLM; `--server` a server, which must have
been started for the model that `--model_folder` holds (it is made there first by `--only_make_model`).

With `--mean_length` a share of the vocabulary ends completions, whose lengths are then geometrically distributed, and
`generate` is compared with itself without a KV cache to continue from: a call for each batch, until its last
completion has ended.
"""

import argparse
import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from gpu_memory import LiveStorages
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hfppo import ActorCritic, PPOConfig
from hfppo.generation import make_sampler
from hfppo.generation.sampler import Sampling
from hfppo.models.loading import default_peft_config
from hfppo.sample import Turn
from hfppo.support.padding import pad_left, pad_right

EOS = 1
GENERATE, ONE_CALL = "transformers generate", "generate, one call per batch"


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


def load_actor(folder: str) -> ActorCritic:
    """Load a model with an adapter that changes it, so that a sampler without the adapter would show."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(PartialState().device)
    actor = ActorCritic(base, default_peft_config(), critic=None).eval()
    set_seed(1)
    for parameter in actor.actor_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return actor


def random_prompts(number: int, shortest: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Draw prompts of random lengths, without padding and EOS."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (number,), generator=generator).tolist()
    return [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def distances(model: ActorCritic, prompts: list[list[int]], turns: list[Turn], at_once: int = 16) -> Tensor:
    """Return |log π_rollout − log π of the training model| of the tokens, (N,) nats."""
    found = []
    for first in range(0, len(turns), at_once):
        some = turns[first : first + at_once]
        inputs = *pad_left(prompts[first : first + at_once], 0), *pad_right([turn.ids for turn in some], torch.int64)
        ids, mask, own, real = (x.to(model.device) for x in inputs)
        out = model(torch.cat([ids, own], dim=1), torch.cat([mask, real], dim=1), completion_mask=real)
        sampled, _ = pad_right([turn.logprobs for turn in some], torch.float32)
        found.append((out.logprobs.cpu() - sampled)[real.cpu()].abs())
    return torch.cat(found)


def compare(
    model: ActorCritic,
    prompts: list[list[int]],
    settings: Sampling,
    placements: dict[str, dict[str, Any]],
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Measure samplers on the same prompts.

    Args:
        placements: fields of PPOConfig, by the sampler's name.
    Returns:
        by sampler: "start", seconds; "sync" and "seconds" (both together), and "processor" seconds, of each round;
        "tokens", of each round; "distance", mean and maximum of |log π_rollout − log π| in nats; "peak", bytes of
        the tensors of this process, without vLLM.
    """
    cpu = model.device.type == "cpu"
    samplers, found = {}, {}
    for name, config in placements.items():
        args = PPOConfig(tempfile.mkdtemp(), max_completion_length=settings.max_tokens, use_cpu=cpu, **config)
        start = time.perf_counter()
        samplers[name] = make_sampler(model, args, Accelerator(cpu=cpu), settings)
        samplers[name].may_reuse = name != ONE_CALL
        found[name] = {"start": time.perf_counter() - start, "sync": [], "seconds": [], "processor": [], "tokens": []}
    for turn in range(rounds + 1):  # in alternation, so that all see the machine's moods; the first warms up
        seeds = [len(prompts) * turn + n for n in range(len(prompts))]
        for name, sampler in samplers.items():
            start, processor, live = time.perf_counter(), time.process_time(), LiveStorages(Tensor)
            with sampler.ready(), nullcontext() if turn or placements[name].get("use_vllm") else live:
                ready = time.perf_counter()
                turns = sampler(prompts, seeds)
                tokens = sum(len(one.ids) for one in turns)
            end = time.perf_counter()
            if turn:
                found[name]["sync"].append(ready - start)
                found[name]["seconds"].append(end - start)
                found[name]["processor"].append(time.process_time() - processor)
                found[name]["tokens"].append(tokens)
            else:
                found[name]["peak"] = live.peak
                off = distances(model, prompts, turns)
                found[name]["distance"] = (float(off.mean()), float(off.max()))
    return found


def main(options: argparse.Namespace) -> None:
    folder = options.model_folder or tempfile.mkdtemp()
    if not (Path(folder) / "config.json").is_file():
        make_model(folder)
    if options.only_make_model:
        return
    model = load_actor(folder)
    placements: dict[str, dict[str, Any]] = {GENERATE: {}, **({ONE_CALL: {}} if options.mean_length else {})}
    if options.vllm:
        engine = {"enforce_eager": model.device.type == "cpu", "max_model_len": 24 + options.new_tokens}
        placements["vLLM colocate"] = {"use_vllm": True, "vllm_engine_kwargs": engine}
    if options.server:
        placements["vLLM server"] = {
            **{"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": options.server},
        }
    vocab_size = model.causal_lm.config.vocab_size
    ends = math.ceil(vocab_size / options.mean_length) if options.mean_length else 1
    settings = Sampling(1.0, options.new_tokens, list(range(EOS, EOS + ends)), 0)
    prompts = random_prompts(options.prompts, 8, 24, vocab_size)
    found = compare(model, prompts, settings, placements, options.rounds)
    rates = {name: [n / s for n, s in zip(own["tokens"], own["seconds"], strict=True)] for name, own in found.items()}
    base = median(rates[GENERATE])
    print(
        "| sampler | tokens | tokens per second, sync included | times `generate` | processor s | peak, MB | "
        "sync, s | start, s | log-probs off by |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, each in rates.items():
        own = found[name]
        processor = ", ".join(f"{seconds:.1f}" for seconds in own["processor"])
        print(
            f"| {name} | {median(own['tokens']):.0f} | {median(each):.0f} ({min(each):.0f}–{max(each):.0f}) | "
            f"{median(each) / base:.2f} | {processor} | {own['peak'] / 1e6:.1f} | "
            f"{median(own['sync']):.2f} | {own['start']:.1f} | {own['distance'][1]:.1g} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--mean_length", type=int, help="of completions without a limit; none: they hardly ever end")
    parser.add_argument("--model_folder", help="where the model lies or is made; none: a temporary folder")
    parser.add_argument("--only_make_model", action="store_true", help="for a server to load")
    parser.add_argument("--vllm", action="store_true", help="with an engine in this process")
    parser.add_argument("--server", help="address of a vLLM server")
    main(parser.parse_args())
