"""What actor, critic and reference say about the completions of a rollout, before the update."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from hfppo.config import PPOConfig
from hfppo.generation import Completions
from hfppo.models.actor_critic import ActorCritic, TokenOutputs
from hfppo.models.layout import rows_at_once
from hfppo.models.output_head import is_sharded


@dataclass(frozen=True)
class Passes:
    """What the models say about B completions of T tokens, on the CPU; None where nothing needs it."""

    old_logprobs: Tensor | None  # (B, T) log π_old; None: the sampler's are taken
    ref_logprobs: Tensor | None  # (B, T) log π_ref
    values: Tensor | None  # (B, T) V(s_t) before token t
    final_value: Tensor | None  # (B,) V after the last real token, for bootstrapping


def forward_passes(
    model: ActorCritic,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completions: Completions,
    accelerator: Accelerator,
    args: PPOConfig,
) -> Passes:
    """The passes without gradient, some rows at a time; those that nothing needs are left out.

    Args:
        prompt_ids, prompt_mask: (B, P), padded on the left.
    """
    device = accelerator.device
    attention_mask = torch.cat([prompt_mask, completions.mask], dim=1)
    input_ids = torch.cat([prompt_ids, completions.ids], dim=1)
    needs_old = args.policy_mode != "bypass"
    sampled_values = None if needs_old else completions.values
    lengths = attention_mask.sum(dim=1)
    order = lengths.argsort(descending=True, stable=True)  # of one length, little padding
    size = args.local_rollout_forward_batch_size
    if not is_sharded(model):  # which wants as many forwards from every process
        size = rows_at_once(size, int(lengths.max()), device)
    batches = [
        {
            "input_ids": input_ids[rows].to(device),
            "attention_mask": attention_mask[rows].to(device),
            "completion_mask": completions.mask[rows].to(device),
            "temperature": args.temperature,
        }
        for rows in order.split(size)
    ]
    outputs = references = TokenOutputs()
    with autocast(accelerator):  # not around the reward functions, which have types of their own
        if needs_old or sampled_values is None:
            wanted = {"policy": needs_old, "final_value": args.bootstrap_truncated and args.needs_critic}
            outputs = in_order([model(**batch, **wanted) for batch in batches], order)
        if args.needs_reference:
            with model.reference():  # once, since PEFT looks at all its modules to disable an adapter
                references = in_order([model(**batch, values=False) for batch in batches], order)
    return Passes(
        old_logprobs=outputs.logprobs,
        ref_logprobs=references.logprobs,
        values=outputs.values if sampled_values is None else sampled_values,
        final_value=outputs.final_value,
    )


def in_order(parts: list[TokenOutputs], order: Tensor) -> TokenOutputs:
    """The outputs for all rows, on the CPU, of parts whose rows were taken in some order."""
    back = order.argsort()
    return TokenOutputs(*(None if xs[0] is None else torch.cat(xs).cpu()[back] for xs in zip(*parts, strict=True)))


def autocast(accelerator: Accelerator) -> AbstractContextManager:
    """Mixed precision as in the update, for passes that are not Trainer's.

    FSDP2 casts by itself, where a layer begins; with autocast on top the numbers would not be the update's.
    """
    return nullcontext() if accelerator.is_fsdp2 else accelerator.autocast()
