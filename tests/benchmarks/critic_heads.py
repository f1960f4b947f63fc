"""Four kinds of critic on the same recorded rollouts of the scripted chain: their error to the exact values.

    python tests/benchmarks/critic_heads.py     # writes docs/notes/critic_heads.jsonl, in a minute

A small net sees whether the last digit is right, how far the completion is, and noise. It predicts each batch of eight
completions and then learns from its outcomes, with the package's links and losses.
"""

import json
import math
from itertools import product

import torch
from critic_tasks import REPOSITORY, chain_values
from torch import Tensor, nn

from hfppo.functional import ValueRange, bce_value_loss, value_loss

RESULTS = REPOSITORY / "docs" / "notes" / "critic_heads.jsonl"
LENGTH, SLIPS, BATCH, STEPS, NOISE, RATE = 200, 0.01, 8, 160, 29, 1e-3
# The link of a head, and whether it learns by cross-entropy.
HEADS = {"linear": (None, False), "arctan": ("arctan", False), "sigmoid": ("sigmoid", False), "bce": ("sigmoid", True)}
BIASES = {  # that make the first value 0.19, the mean outcome
    None: 0.19,
    "arctan": math.tan(math.pi * (0.19 - 0.5)),
    "sigmoid": math.log(0.19 / 0.81),
}


def record(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the net sees, (B, T, F), the outcomes and the exact values, (B, T) each, of a batch."""
    slipped = torch.rand(BATCH, LENGTH, generator=generator) < SLIPS
    slip = torch.randint(1, 10, slipped.shape, generator=generator).where(slipped, torch.tensor(0))
    offset = slip.cumsum(dim=1) % 10
    on_track = torch.cat([torch.zeros(BATCH, 1, dtype=torch.long), offset[:, :-1]], dim=1) == 0
    time = (torch.arange(LENGTH) / LENGTH).expand(BATCH, LENGTH)
    noise = torch.randn(BATCH, LENGTH, NOISE, generator=generator)
    seen = torch.cat([torch.stack([on_track.float(), time, on_track * time], dim=-1), noise], dim=-1)
    return seen, (offset[:, -1:] == 0).float().expand(BATCH, LENGTH), chain_values(on_track, SLIPS).float()


def measure(head: str, rate: float, seed: int, start: str) -> dict[str, float]:
    """Predict each batch, then learn from it; return means over the last quarter of the batches and over all."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    link, by_entropy = HEADS[head]
    bounds = ValueRange(0.0, 1.0, link or "arctan")
    net = nn.Sequential(nn.Linear(3 + NOISE, 32), nn.Tanh(), nn.Linear(32, 1))
    nn.init.zeros_(net[2].weight)
    nn.init.constant_(net[2].bias, BIASES[link] if start == "mean" else 0.0)
    optimizer, errors, outside = torch.optim.Adam(net.parameters(), rate * RATE), [], []
    for _ in range(STEPS):
        seen, outcomes, exact = record(generator)
        logits = net(seen).squeeze(-1)
        values = logits if link is None else bounds.values(logits)
        errors.append((values.detach() - exact).square().mean())
        outside.append(((values < 0) | (values > 1)).float().mean())
        loss = bce_value_loss(logits, outcomes, bounds) if by_entropy else value_loss(values, outcomes)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    errors, outside = torch.stack(errors), torch.stack(outside)
    late = slice(-STEPS // 4, None)
    found = {"error": errors[late].mean(), "error_of_all": errors.mean(), "outside": outside[late].mean()}
    return {name: float(f"{float(x):.3g}") for name, x in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    with RESULTS.open("w") as file:
        for start, head, rate, seed in product(("package", "mean"), HEADS, (1, 3, 10, 30), range(5)):
            key = {"start": start, "head": head, "rate": rate, "seed": seed}
            file.write(json.dumps(key | measure(head, rate, seed, start)) + "\n")


if __name__ == "__main__":
    main()
