"""How much time passes and updates save by computing common beginnings once, in processor seconds.

    PYTHONPATH=tests/benchmarks python tests/benchmarks/trees.py --rows 16 --instruction 600 --prompt 60 --turns 4 \\
        --sampled 40 --answer 30
    PYTHONPATH=tests/benchmarks python tests/benchmarks/trees.py --rows 16 --instruction 35 --prompt 20 --turns 1 \\
        --sampled 12 --answer 0

A Llama of SmolLM2-135M's width with random weights reads rows of random tokens: without gradient, as many at once as a
rollout does, and with it, all at once. Rows apart and trees take turns. Prints a Markdown table: medians, with the
least and the most of the ratios, the largest differences, and the peak memory, for which each side needs a run of its
own with `--sides`.
"""

import argparse
import time
from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hfppo.models import layout
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.batch_size import pass_rows
from hfppo.models.loading import default_peft_config

SIDES = {"apart": "none", "trees": layout.SHARING_ATTENTION}
VOCAB = 49_152


def make_rows(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, attention mask and completion mask of episodes."""
    rows, turn = options.rows, options.sampled + options.answer
    instruction = torch.randint(VOCAB, (1, options.instruction)).expand(rows, -1)
    prompts = torch.randint(VOCAB, (rows // options.group, options.prompt)).repeat_interleave(options.group, dim=0)
    ids = torch.cat([instruction, prompts, torch.randint(VOCAB, (rows, options.turns * turn))], dim=1)
    sampled = (torch.arange(options.turns * turn) % turn < options.sampled).expand(rows, -1)
    return ids, torch.ones_like(ids), sampled


@torch.no_grad()
def passes(model: ActorCritic, rows: tuple[Tensor, ...]) -> Tensor:
    """Read the rows as `forward_passes` does."""
    order, shared = layout.order_rows(model.causal_lm, *rows[:2])
    size = pass_rows(model, None, rows[1].sum(dim=1), torch.device("cpu"), shared)
    return torch.cat([model(*(x[some] for x in rows)).logprobs for some in order.split(size)])[order.argsort()]


def update(model: ActorCritic, rows: tuple[Tensor, ...]) -> Tensor:
    """Return the gradient of a sum."""
    model.zero_grad()
    model(*rows).logprobs.sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.actor_parameters()])


def timed(function: Callable[..., Tensor], *args: object) -> tuple[float, Tensor]:
    """Return processor seconds and the result."""
    begin = time.process_time()
    result = function(*args)
    return time.process_time() - begin, result


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = ActorCritic(LlamaForCausalLM(config), default_peft_config(), critic=None).train()
    for parameter in model.actor_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = make_rows(options)
    print("| what | apart, s | trees, s | ratio | largest difference, of the largest number | peak, GB |")
    print("|---|---|---|---|---|---|")
    for work in (passes, update):
        seconds: dict[str, list[float]] = {side: [] for side in options.sides}
        results = {}
        for _ in range(options.rounds):
            for side in options.sides:
                with patch.object(layout, "SHARING_ATTENTION", SIDES[side]):
                    taken, results[side] = timed(work, model, rows)
                    seconds[side].append(taken)
        first, last = seconds[options.sides[0]], seconds[options.sides[-1]]
        ratios = [new / old for old, new in zip(first, last, strict=True)]
        one, other = results[options.sides[0]], results[options.sides[-1]]
        difference = float((one - other).abs().max() / one.abs().max())
        peak = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"| {work.__name__} | {median(first):.2f} | {median(last):.2f} | {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {difference:.1e} | {peak:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="each way, by turns")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--group", type=int, default=1, help="rows that share a prompt")
    parser.add_argument("--activation_checkpointing", action="store_true")
    for name, meaning in (
        ("rows", "of a micro-batch"),
        ("instruction", "tokens that all prompts begin with, before --prompt"),
        ("prompt", "tokens before the first turn"),
        ("turns", "of each row"),
        ("sampled", "tokens of a turn"),
        ("answer", "tokens of the context after a turn"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    main(parser.parse_args())
