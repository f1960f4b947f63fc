"""Passes of actor, critic and reference over a rollout's completions, without gradient."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from hfppo.config import PPOConfig
from hfppo.generation.sampler import Completions
from hfppo.models.actor_critic import ActorCritic, TokenOutputs, Want
from hfppo.models.layout import rows_at_once
from hfppo.models.modes import is_sharded
from hfppo.rollout import select_packed


@dataclass(frozen=True)
class Passes:
    """Outputs of the models for B completions of T tokens, on the CPU; None where nothing needs them."""

    old_logprobs: Tensor | None  # (B, T) log π_old; None: the sampler's log-probs are used
    ref_logprobs: Tensor | None  # (B, T) log π_ref
    values: Tensor | None  # (B, T) V(s_t) before token t
    final_value: Tensor | None  # (B,) V after the last real token, for bootstrapping
    base_states: Tensor | None  # (N, H) of all real tokens, row after row, which the critic starts from


def forward_passes(
    model: ActorCritic,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completions: Completions,
    accelerator: Accelerator,
    args: PPOConfig,
) -> Passes:
    """Run the passes that something needs, some rows at a time, without gradient.

    Args:
        prompt_ids, prompt_mask: (B, P), padded on the left.
    """
    device = accelerator.device
    attention_mask = torch.cat([prompt_mask, completions.real], dim=1)
    input_ids = torch.cat([prompt_ids, completions.ids], dim=1)
    needs_old = args.policy_mode != "bypass"
    lengths = attention_mask.sum(dim=1)
    # Rows of similar length need little padding; those of one prompt, which stand together, share it.
    order = (lengths if args.num_generations == 1 else prompt_mask.sum(dim=1)).argsort(descending=True, stable=True)
    size = args.local_rollout_forward_batch_size
    if not is_sharded(model):  # a sharded model needs equally many forwards on every process
        size = rows_at_once(size, int(lengths.max()), device)
        size = max(size - size % args.num_generations, min(size, args.num_generations))
    batches = [
        {
            "input_ids": input_ids[rows].to(device),
            "attention_mask": attention_mask[rows].to(device),
            "completion_mask": completions.mask[rows].to(device),
        }
        for rows in order.split(size)
    ]
    outputs = references = TokenOutputs()
    base_states: list[Tensor | None] = [None] * len(batches)
    with autocast(accelerator):  # not around the reward functions, which choose their own dtypes
        if args.needs_reference:
            keep = model.keeps_base_states and model.ref_model is None
            want = Want(args.temperature, values=False, base_states=keep)
            with model.reference():  # once, since PEFT visits all modules to disable an adapter
                parts = [model(**batch, want=want) for batch in batches]
            references = join_in_order(parts, order, lengths)
            base_states = [part.base_states for part in parts]
        if needs_old or model.critic is not None:
            final, keep = args.bootstrap_truncated and args.needs_critic, base_states[0] is None
            want = Want(args.temperature, needs_old, final_value=final, base_states=model.keeps_base_states and keep)
            parts = [
                model(**batch, want=want, base_states=states)
                for batch, states in zip(batches, base_states, strict=True)
            ]
            outputs = join_in_order(parts, order, lengths)
    return Passes(
        old_logprobs=outputs.logprobs,
        ref_logprobs=references.logprobs,
        values=outputs.values,
        final_value=outputs.final_value,
        base_states=outputs.base_states if references.base_states is None else references.base_states,
    )


def join_in_order(parts: list[TokenOutputs], order: Tensor, lengths: Tensor) -> TokenOutputs:
    """Join parts into outputs for all rows, on the CPU.

    Args:
        order: (B,) the row numbers of the parts.
        lengths: (B,) real tokens of each row.
    """
    back = order.argsort()
    whole = TokenOutputs(*(None if xs[0] is None else torch.cat(xs).cpu() for xs in zip(*parts, strict=True)))
    joined = {name: x[back] for name, x in whole._asdict().items() if x is not None and name != "base_states"}
    if whole.base_states is not None:
        joined["base_states"] = select_packed(whole.base_states, lengths[order], back)
    return TokenOutputs(**joined)


def autocast(accelerator: Accelerator) -> AbstractContextManager:
    """Return the update's mixed precision, for passes outside Trainer's loop.

    FSDP2 casts inside each layer; autocast on top would give other numbers than the update.
    """
    return nullcontext() if accelerator.is_fsdp2 else accelerator.autocast()
