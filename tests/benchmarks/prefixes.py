"""How much of `generate`'s time goes into reading again what earlier turns have read, in processor seconds.

    PYTHONPATH=tests/benchmarks python tests/benchmarks/prefixes.py --model recipes/lake/base --rows 32 \\
        --prompt 4 --turns 32 --sampled 2 --answer 3

Rows of random tokens are played turn by turn, each with the whole episode before it as its prompt, as `EpisodePlayer`
does. The forward pass of more than one position in each turn reads the prompt; the others sample. A cache kept between
turns would read only the answer: "saved" is the time of the same reading minus that of a pass over the answers alone.
"""

import argparse
import time

import torch
from accelerate import Accelerator
from sampling import load_actor

from hfppo import PPOConfig
from hfppo.generation import make_sampler


class Clock:
    """Sums the processor seconds of a module's forward passes, by whether they read several positions."""

    def __init__(self, module: torch.nn.Module):
        self.seconds = {True: 0.0, False: 0.0}
        module.register_forward_pre_hook(self.start, with_kwargs=True)
        module.register_forward_hook(self.stop, with_kwargs=True)

    def start(self, module, args, kwargs) -> None:
        self.begin = time.process_time()

    def stop(self, module, args, kwargs, output) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.seconds[ids.shape[1] > 1] += time.process_time() - self.begin


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = load_actor(options.model)
    args = PPOConfig("out", max_completion_length=options.sampled, use_cpu=True, local_rollout_forward_batch_size=64)
    sampler = make_sampler(model, [], 0, args, Accelerator(cpu=True))
    vocab = model.causal_lm.config.vocab_size
    ids = torch.randint(3, vocab, (options.rows, options.prompt))
    sampler(ids, torch.ones_like(ids, dtype=torch.bool), list(range(options.rows)))  # warms up
    clock, begin, first = Clock(model.causal_lm), time.process_time(), 0.0
    for turn in range(options.turns):
        seeds = [options.rows * turn + row for row in range(options.rows)]
        completions = sampler(ids, torch.ones_like(ids, dtype=torch.bool), seeds)
        ids = torch.cat([ids, completions.ids, torch.randint(3, vocab, (options.rows, options.answer))], dim=1)
        first = first or clock.seconds[True]
    whole, read, again = time.process_time() - begin, clock.seconds[True], clock.seconds[True] - first
    begin = time.process_time()
    with torch.no_grad():
        for _ in range(options.turns - 1):
            model.causal_lm(ids[:, : options.answer + 1], use_cache=True, logits_to_keep=1)
    answers = time.process_time() - begin
    print("| turns | tokens at the end | all, s | reading, s | reading again, s | saved by a cache | of all |")
    print("|---|---|---|---|---|---|---|")
    saved = again - answers
    print(
        f"| {options.turns} | {ids.shape[1]} | {whole:.2f} | {read:.2f} | {again:.2f} | {saved:.2f} | "
        f"{saved / whole:.2f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="id or folder")
    for name, meaning in (
        ("rows", "of a batch"),
        ("prompt", "tokens before the first turn"),
        ("turns", "of each row"),
        ("sampled", "tokens of a turn"),
        ("answer", "tokens of the context after a turn"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    main(parser.parse_args())
