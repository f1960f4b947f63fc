"""Samplers compared on the same prompts: speed, and how far their log-probs are from the training model's."""

import tempfile
import time
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from transformers import AutoModelForCausalLM, set_seed

from hfppo import ActorCritic, PPOConfig
from hfppo.generation import make_sampler
from hfppo.generation.sampler import Sampling
from hfppo.models.loading import default_peft_config
from hfppo.sample import Turn
from hfppo.support.padding import pad_left, pad_right

EOS = 1


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
        by sampler: "start", seconds; "sync", "seconds" (both together) and "tokens", of each round; "distance", mean
        and maximum of |log π_rollout − log π| in nats.
    """
    cpu = model.device.type == "cpu"
    samplers, found = {}, {}
    for name, config in placements.items():
        args = PPOConfig(tempfile.mkdtemp(), max_completion_length=settings.max_tokens, use_cpu=cpu, **config)
        start = time.perf_counter()
        samplers[name] = make_sampler(model, args, Accelerator(cpu=cpu), settings, lambda share: None)
        found[name] = {"start": time.perf_counter() - start, "sync": [], "seconds": [], "tokens": []}
    for turn in range(rounds + 1):  # in alternation, so that all see the machine's moods; the first warms up
        seeds = [len(prompts) * turn + n for n in range(len(prompts))]
        for name, sampler in samplers.items():
            start = time.perf_counter()
            with sampler.ready():
                ready = time.perf_counter()
                turns = sampler(prompts, seeds)
                tokens = sum(len(one.ids) for one in turns)
            end = time.perf_counter()
            if turn:
                found[name]["sync"].append(ready - start)
                found[name]["seconds"].append(end - start)
                found[name]["tokens"].append(tokens)
            else:
                off = distances(model, prompts, turns)
                found[name]["distance"] = (float(off.mean()), float(off.max()))
    return found
