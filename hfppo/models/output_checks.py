"""Check a model's outputs on the training device, in the precision of training.

These checks need a forward, and none runs while a model is built: an attention kernel may need the GPU, and may need
half precision. Every forward is one of `ActorCritic`, where FSDP2 and ZeRO-3 gather the weights.
"""

from typing import cast

import torch
from peft import PeftModel
from torch import Tensor

from hfppo.models.actor_critic import ActorCritic, Want
from hfppo.models.modes import eval_mode

LENGTH = 8  # tokens of a row


@torch.no_grad()
def check_outputs(model: ActorCritic, device: torch.device) -> None:
    """Raise if this package reads a model's outputs wrongly.

    A collective call where the weights are sharded.

    Raises:
        ValueError: logits that are not the output head's on the hidden states, or a critic that is not a decoder.
    """
    eager = torch.compiler.set_stance("force_eager")  # no graphs for a few tokens
    with eval_mode(model), eager:
        check_logits(model, device)
        try_layouts(model, device)
        if model.critic is not None and model.critic.kind == "model":
            check_causal(model, device)
        if model.keeps_base_states:
            check_start(model, device)


def ids_of(model: ActorCritic, device: torch.device) -> Tensor:
    """Return (2, LENGTH) token ids; the rows differ in the last one."""
    ids = torch.arange(LENGTH, device=device).repeat(2, 1)
    ids[1, -1] += 1
    return ids % model.config.get_text_config().vocab_size


def rows_of(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of a forward whose rows are completions after their first token."""
    everything = torch.ones_like(ids)
    return ids, everything, everything[:, 1:].bool()


def logits_of_forward(model: ActorCritic, device: torch.device) -> Tensor:
    """Return the (LENGTH, V) float32 logits of transformers' own forward."""
    ids = ids_of(model, device)[:1]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()


def check_logits(model: ActorCritic, device: torch.device) -> None:
    """Raise if an architecture's log-probs differ from its own logits' log-softmax by more than rounding.

    Raises:
        ValueError: the logits do not come from the output head on the trunk's states, or are changed after it.
    """
    ids = ids_of(model, device)[:1]
    expected = logits_of_forward(model, device)
    wanted = expected.log_softmax(dim=-1)[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    try:
        got = model(*rows_of(ids), Want(values=False, router_loss=True)).logprobs[0]
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(model.causal_lm).__name__} needs more than its output head to compute logits from its trunk's "
            f"last hidden states, but this package uses only the head ({error}); use another architecture"
        ) from error
    tolerance = max(1e-3, 4 * torch.finfo(precision(expected)).eps * float(expected.abs().max()))
    if not expected.isfinite().all():
        return  # the sampler and the checks of a rollout name what is not finite
    if not torch.allclose(got, wanted, rtol=1e-3, atol=tolerance):
        raise ValueError(
            f"{type(model.causal_lm).__name__} changes its logits after the output head in a way this package does "
            f"not know (log-probs differ by up to {(wanted - got).abs().max():.3g}); use another architecture"
        )


def try_layouts(model: ActorCritic, device: torch.device) -> None:
    """Let each model try the layouts of several rows.

    Without this, a process that later has several rows waits for the other processes' part of sharded weights.
    """
    rows = rows_of(ids_of(model, device))
    model(*rows)
    if model.ref_model is not None:
        with model.reference():
            model(*rows, Want(values=False))


def precision(values: Tensor) -> torch.dtype:
    """Return the dtype that float32 values were rounded to before."""
    halves = (torch.bfloat16, torch.float16)
    return next((dtype for dtype in halves if torch.equal(values, values.to(dtype).float())), torch.float32)


def check_causal(model: ActorCritic, device: torch.device) -> None:
    """Raise if a critic is bidirectional, so that V(s_t) depends on later tokens."""
    # Row by row, since together they might share their beginning.
    states = [critic_states(model, ids) for ids in ids_of(model, device).split(1)]
    first, second = (x.reshape(LENGTH, -1)[:-1].float() for x in states)
    if not torch.allclose(first, second, rtol=0.0, atol=1e-3 * float(first.abs().max())):
        name = type(cast(PeftModel, model.critic.trunk).get_base_model()).__name__
        raise ValueError(
            f"critic is built on {name}, whose hidden states depend on later tokens; give a decoder, or "
            "critic='adapter'"
        )


def check_start(model: ActorCritic, device: torch.device) -> None:
    """Raise if an architecture's upper layers need more of the lower ones than their hidden states."""
    ids = ids_of(model, device)
    kept = model(*rows_of(ids), Want(policy=False, base_states=True)).base_states
    whole = critic_states(model, ids)
    try:
        started = critic_states(model, ids, kept)
        same = torch.allclose(started, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().mean()))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"critic_layers={model.critic.layers} cannot be used with {type(model.causal_lm).__name__}, whose upper "
            "layers need more from the lower layers than hidden states; leave critic_layers out"
        )


def critic_states(model: ActorCritic, ids: Tensor, base_states: Tensor | None = None) -> Tensor:
    """Return the last hidden states that the critic reads, float32, for rows of completions after one token."""
    found: list[Tensor] = []
    hook = model.critic_trunk.register_forward_hook(lambda _, __, outputs: found.append(outputs.last_hidden_state))
    try:
        model(*rows_of(ids), Want(policy=False, final_value=True), base_states)
    finally:
        hook.remove()
    return found[-1].float()
