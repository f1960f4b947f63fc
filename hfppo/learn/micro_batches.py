"""Cut a mini-batch into the micro-batches of an optimizer step, and count its tokens and completions."""

from itertools import pairwise
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from hfppo.models.actor_critic import ActorCritic
from hfppo.models.layout import order_rows
from hfppo.rollout import Rollout, sizes_within


class Counts(NamedTuple):
    """What a loss is divided by."""

    tokens: float = 0  # that the loss counts
    completions: float = 0  # with at least one such token


class MiniBatchSize(NamedTuple):
    """Counts over all micro-batches and processes of a mini-batch, so that no cut changes the loss."""

    actor: Counts = Counts()
    critic: Counts = Counts()

    @classmethod
    def of(cls, mini_batch: Rollout, accelerator: Accelerator) -> "MiniBatchSize":
        """Count this process's rows and add up all processes. A collective call."""
        masks = (mini_batch.loss_mask, mini_batch.fitted)
        own = torch.stack([count for mask in masks for count in (mask.sum(), mask.any(dim=1).sum())])
        counts = accelerator.reduce(own.to(accelerator.device), "sum").tolist()
        return cls(Counts(*counts[:2]), Counts(*counts[2:]))


def cut_mini_batch(
    model: ActorCritic, mini_batch: Rollout, num_micro_batches: int, max_tokens: int | None, accelerator: Accelerator
) -> list[dict[str, Tensor | list[Rollout]]]:
    """Return Trainer's inputs for each micro-batch. A collective call.

    "pieces" has the micro-batch, in several pieces if it has more than `max_tokens` tokens in a forward.
    The other entries are flat token ids and masks, by which Trainer counts tokens and floating-point operations.
    """
    rows = mini_batch.by_conversation()
    order, shared = order_rows(model.causal_lm, **rows.after(*rows.read_by_critic))
    # A piece has no more conversations on average than a micro-batch has episodes, so that memory suffices.
    num_pieces = -(-len(rows) * num_micro_batches // len(mini_batch))
    if max_tokens is not None:  # the same number on all processes: sharded models compute together
        sizes = sizes_within(rows.lengths[order].tolist(), shared.tolist(), max_tokens)
        own = torch.tensor([len(sizes)], device=accelerator.device)
        num_pieces = max(num_pieces, min(len(rows), int(accelerator.gather(own).max())))
    pieces = rows.micro_batches(num_pieces, order, shared)
    cuts = [i * len(pieces) // num_micro_batches for i in range(num_micro_batches + 1)]
    return [{**flatten_sequences(some), "pieces": some} for some in (pieces[a:b] for a, b in pairwise(cuts))]


def flatten_sequences(batches: list[Rollout]) -> dict[str, Tensor]:
    """Return the joined sequences of several batches, (N,) each."""
    each = [batch.joined() for batch in batches]
    return {name: torch.cat([tensors[name].flatten() for tensors in each]) for name in each[0]}
