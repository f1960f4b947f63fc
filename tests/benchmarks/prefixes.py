"""How much time `generate` saves by continuing from its KV cache and reading shared tokens once, in processor seconds.

    PYTHONPATH=tests/benchmarks python tests/benchmarks/prefixes.py --model recipes/lake/base --rows 32 \\
        --prompt 4 --turns 32 --sampled 2 --answer 3
    PYTHONPATH=tests/benchmarks python tests/benchmarks/prefixes.py --model out/smollm2 --rows 32 --group 4 \\
        --prompt 80 --turns 1 --sampled 28 --answer 0
    PYTHONPATH=tests/benchmarks python tests/benchmarks/prefixes.py --model out/smollm2 --rows 32 --instruction 40 \\
        --prompt 20 --turns 1 --sampled 28 --answer 0

Rows of random tokens are played turn by turn, each with the whole episode before it as its prompt, as `EpisodePlayer`
does: anew, where each turn of each row is read from its beginning, and with key-values kept, by turns. A forward of
more than one position reads a prompt, or the new part of it; the others sample. Prints a Markdown table: medians, the
ratio's smallest and largest, and the share of rows with the same tokens. Rounding makes it less than 1 where the
distributions are flat over a large vocabulary: a number near the border of two tokens draws the other one.
"""

import argparse
import time
from contextlib import nullcontext
from statistics import median

import torch
from accelerate import Accelerator
from sampling import load_actor
from torch import Tensor

from hfppo import PPOConfig
from hfppo.generation import make_sampler
from hfppo.generation.sampler import Sampler, Sampling


class Clock:
    """Sums the processor seconds of a module's forward passes that read several positions."""

    def __init__(self, module: torch.nn.Module):
        self.seconds = 0.0
        module.register_forward_pre_hook(self.start, with_kwargs=True)
        module.register_forward_hook(self.stop, with_kwargs=True)

    def start(self, module, args, kwargs) -> None:
        self.begin = time.process_time()

    def stop(self, module, args, kwargs, output) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        if ids.shape[1] > 1:
            self.seconds += time.process_time() - self.begin


def play(sampler: Sampler, options: argparse.Namespace, vocab: int) -> Tensor:
    """Return the tokens of all episodes."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocab, (options.rows // options.group, options.prompt), generator=generator)
    instruction = torch.randint(3, vocab, (1, options.instruction), generator=generator).expand(options.rows, -1)
    ids = torch.cat([instruction, prompts.repeat_interleave(options.group, dim=0)], dim=1)
    for turn in range(options.turns):
        seeds = [options.rows * turn + row for row in range(options.rows)]
        turns = sampler(ids.tolist(), seeds, [options.sampled] * options.rows)
        answers = torch.randint(3, vocab, (options.rows, options.answer), generator=generator)
        ids = torch.cat([ids, torch.tensor([one.ids for one in turns]), answers], dim=1)
    return ids


def main(options: argparse.Namespace) -> None:
    if options.rows % options.group:
        raise SystemExit(f"--rows {options.rows} cannot be divided into groups of --group {options.group}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = load_actor(options.model)
    size = options.rows
    args = PPOConfig("out", max_completion_length=options.sampled, use_cpu=True, local_rollout_forward_batch_size=size)
    sampler = make_sampler(model, args, Accelerator(cpu=True), Sampling(args.temperature, options.sampled, [], 0))
    vocab, clock = model.causal_lm.config.vocab_size, Clock(model.causal_lm)
    play(sampler, argparse.Namespace(**{**vars(options), "turns": 1}), vocab)  # warms up
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(options.rounds):
        played = {}
        for keep in (False, True):
            sampler.may_reuse = keep
            clock.seconds, begin = 0.0, time.process_time()
            with sampler.ready() if keep else nullcontext():
                played[keep] = play(sampler, options, vocab)
            seconds[keep].append((time.process_time() - begin, clock.seconds))
    (before, reading_before), (after, reading_after) = (
        map(median, zip(*seconds[keep], strict=True)) for keep in seconds
    )
    same = (played[True] == played[False]).all(dim=1).float().mean()
    ratios = [new / old for (old, _), (new, _) in zip(*seconds.values(), strict=True)]
    print(
        "| turns | tokens at the end | anew, s | of it reading, s | kept, s | of it reading, s | ratio | same rows |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {options.turns} | {played[True].shape[1]} | {before:.2f} | {reading_before:.2f} | {after:.2f} | "
        f"{reading_after:.2f} | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {same:.2f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="id or folder")
    parser.add_argument("--rounds", type=int, default=5, help="each way, by turns")
    parser.add_argument("--group", type=int, default=1, help="rows that share a prompt")
    parser.add_argument(
        "--instruction", type=int, default=0, help="tokens that all prompts begin with, before --prompt"
    )
    for name, meaning in (
        ("rows", "of a batch"),
        ("prompt", "tokens before the first turn"),
        ("turns", "of each row"),
        ("sampled", "tokens of a turn"),
        ("answer", "tokens of the context after a turn"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    main(parser.parse_args())
