"""Passes of actor, critic and reference over a rollout's completions, without gradient."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from hfppo.config import PPOConfig
from hfppo.models.actor_critic import ActorCritic, TokenOutputs, Want
from hfppo.models.batch_size import ROWS, pass_rows
from hfppo.models.layout import order_rows
from hfppo.models.modes import eval_mode, is_sharded
from hfppo.rollout import Sequences, select_packed

Inputs = dict[str, Tensor]  # of a batch, by the names of `ActorCritic.forward`


@dataclass(frozen=True)
class Passes:
    """Outputs of the models for B completions of T tokens, on the CPU; None where nothing needs them."""

    old_logprobs: Tensor | None  # (B, T) log π_old; None: the sampler's log-probs are used
    ref_logprobs: Tensor | None  # (B, T) log π_ref
    values: Tensor | None  # (B, T) V(s_t) before token t
    final_value: Tensor | None  # (B,) V after the last real token, for bootstrapping
    base_states: Tensor | None  # (N, H) of all real tokens, row after row, which the critic starts from


def forward_passes(
    model: ActorCritic, sequences: Sequences, accelerator: Accelerator, args: PPOConfig, needs_reference: bool
) -> Passes:
    """Run the passes that something needs, some rows at a time, without gradient.

    Args:
        needs_reference: whether log π_ref is needed.
    """
    order, batches = batches_of(model, sequences, accelerator, args)
    needs_policy, keeps = args.policy_mode != "bypass", model.keeps_base_states
    references = outputs = [TokenOutputs()] * len(batches)
    with autocast(accelerator):  # not around the reward functions, which choose their own dtypes
        if needs_reference:
            want = Want(args.temperature, values=False, base_states=keeps and model.reference_is_base)
            with model.reference():
                references = run_batches(model, batches, want)
        base_states = [reference.base_states for reference in references]  # which the critic starts from
        if needs_policy or model.critic is not None:
            final = args.bootstrap_truncated and args.needs_critic
            states = keeps and base_states[0] is None
            want = Want(args.temperature, needs_policy, final_value=final, base_states=states)
            outputs = run_batches(model, batches, want, base_states)
    reference, output = (join_in_order(parts, order, sequences) for parts in (references, outputs))
    return Passes(
        old_logprobs=output.logprobs,
        ref_logprobs=reference.logprobs,
        values=output.values,
        final_value=output.final_value,
        base_states=output.base_states if reference.base_states is None else reference.base_states,
    )


@torch.no_grad()
def single_pass(
    model: ActorCritic, sequences: Sequences, accelerator: Accelerator, args: PPOConfig, want: Want
) -> TokenOutputs:
    """Return what is wanted of the present models, on the CPU, some rows at a time, without gradient."""
    order, batches = batches_of(model, sequences, accelerator, args)
    with eval_mode(model), autocast(accelerator):
        outputs = [model(**batch, want=want) for batch in batches]
    return join_in_order(outputs, order, sequences)


def batches_of(
    model: ActorCritic, sequences: Sequences, accelerator: Accelerator, args: PPOConfig
) -> tuple[Tensor, list[Inputs]]:
    """Return the conversations in the order of the passes, (B,), and their batches on the device."""
    read = sequences.by_conversation()
    inputs = {**read.joined(), "completion_mask": read.mask}
    order, shared = order_rows(model.causal_lm, **read.after(*read.read_by_critic))
    size = args.local_rollout_forward_batch_size
    if is_sharded(model):  # equally many forwards on every process
        size = size or ROWS
    else:
        size = pass_rows(model, size, read.lengths, accelerator.device, shared)
    return order, [{name: x[rows].to(accelerator.device) for name, x in inputs.items()} for rows in order.split(size)]


def run_batches(
    model: ActorCritic, batches: list[Inputs], want: Want, base_states: list[Tensor | None] | None = None
) -> list[TokenOutputs]:
    """Return the outputs for each batch, with the base states, by far the largest, on the CPU in their layer's dtype.

    Args:
        base_states: states of each batch that the critic starts from; None computes them.
    """
    outputs = []
    for batch, states in zip(batches, base_states or [None] * len(batches), strict=True):
        output = model(**batch, want=want, base_states=states)
        if output.base_states is not None:
            output = output._replace(base_states=output.base_states.to("cpu", model.base_states_dtype))
        outputs.append(output)
    return outputs


def join_in_order(parts: list[TokenOutputs], order: Tensor, sequences: Sequences) -> TokenOutputs:
    """Join parts into outputs for all sequences, on the CPU.

    Args:
        order: (B,) the numbers of the parts' conversations.
    """
    back, tape = order.argsort(), sequences.tape
    whole = TokenOutputs(*(None if xs[0] is None else torch.cat(xs).cpu() for xs in zip(*parts, strict=True)))
    joined = {name: x[back] for name, x in whole._asdict().items() if x is not None and name != "base_states"}
    if tape is not None:
        joined = {name: tape.collect(x) for name, x in joined.items()}
    if whole.base_states is not None:
        lengths = sequences.by_conversation().lengths
        joined["base_states"] = select_packed(whole.base_states, lengths[order], back)
    return TokenOutputs(**joined)


def autocast(accelerator: Accelerator) -> AbstractContextManager:
    """Return the update's mixed precision, for passes outside Trainer's loop.

    FSDP2 casts inside each layer; autocast on top gives other numbers than the update.
    """
    return nullcontext() if accelerator.is_fsdp2 else accelerator.autocast()


def any_active(model: ActorCritic, accelerator: Accelerator, own: bool) -> bool:
    """Return whether a row is active here; on any process if the model is sharded, because all compute together."""
    if accelerator.num_processes == 1 or not is_sharded(model):
        return own
    active = torch.tensor([float(own)], dtype=torch.float32, device=accelerator.device)
    return bool(accelerator.reduce(active, "sum") > 0)
