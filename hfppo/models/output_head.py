"""Log-probs and entropies from hidden states, without keeping logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hfppo.models.modes import attributes, is_sharded

Entropy = Literal["none", "constant", "differentiable"]
Head = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # log-probs, and entropies, of tokens after hidden states
FLOAT32_PRODUCTS = () if torch.version.hip else ("cuda",)  # devices with `product_in_float32`; untried on ROCm
HALVES = (torch.bfloat16, torch.float16)


def tokens_at_once(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens whose float32 logits are computed at once, at least 128.

    On a CPU they fit into its cache, with 4 MiB. Elsewhere it is the power of two whose logits take 128 to 256 MiB:
    larger matrix products and fewer kernels.
    """
    if device.type == "cpu":
        return max(128, 2**20 // vocab_size)
    return max(128, 2 ** ((2**26 // vocab_size).bit_length() - 1))


def logits_of(model: PreTrainedModel | PeftModel, hidden: Tensor) -> Tensor:
    """Return (…, V) float32 logits of (…, H) hidden states, with the architecture's own scaling or capping."""
    head = model.get_output_embeddings()
    logits = outputs_in_float32(head, hidden)
    return adjust_logits(model, head(hidden).float() if logits is None else logits)


@contextmanager
def float32_logits(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's own forward compute the logits of `logits_of` inside the block, as for `generate`.

    A mixture of experts computes no load-balancing loss: with a KV cache, the mask and the router's tokens differ.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    forward = head.forward

    def in_float32(hidden: Tensor) -> Tensor:
        logits = outputs_in_float32(head, hidden)
        return forward(hidden) if logits is None else logits

    unrouted = {"output_router_logits": False} if hasattr(config, "output_router_logits") else {}
    with attributes(head, forward=in_float32), attributes(config, **unrouted):
        yield


def outputs_in_float32(head: nn.Module, hidden: Tensor) -> Tensor | None:
    """Return (…, V) float32 outputs of a frozen head in half precision, or None where that is not supported."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    plain = type(head) is nn.Linear and is_constant(head) and head.weight.device == hidden.device
    if not plain or device not in FLOAT32_PRODUCTS or dtype not in HALVES:
        return None
    with torch.autocast(device, enabled=False):
        rows = hidden.to(dtype).flatten(0, -2)
        outputs = Float32Product.apply(rows, head.weight.to(dtype)).unflatten(0, hidden.shape[:-1])
        return outputs if head.bias is None else outputs + head.bias.float()


class Float32Product(torch.autograd.Function):
    """Y = X·Wᵀ in float32 for X and W in half precision: the sums are float32 anyway, and are not rounded.

    In bfloat16, logits of 16 to 32 are multiples of 1/8. ∂/∂X = G·W, with G rounded as without this function.
    """

    @staticmethod
    def forward(ctx: torch.autograd.Function, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return product_in_float32(states, weight.t())

    @staticmethod
    def backward(ctx: torch.autograd.Function, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad.to(weight.dtype) @ weight, None


def product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in float32, with factors in half precision; only CUDA's kernels can."""
    return torch.mm(a, b, out_dtype=torch.float32)


def adjust_logits(model: PreTrainedModel | PeftModel, logits: Tensor) -> Tensor:
    """Cap or scale the output head's logits as Gemma 2, Granite, Cohere and Falcon-H1 do, in their own dtype."""
    config = model.config.get_text_config()
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
        logits = torch.tanh(logits / cap) * cap
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if (factor := getattr(config, name, None)) is not None:
            logits = logits * factor
    return logits


def token_logprobs(
    model: PreTrainedModel | PeftModel, hidden: Tensor, tokens: Tensor, temperature: float, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities and entropies of tokens in chunks; memory hardly grows with the vocabulary.

    Args:
        hidden: (N, H), the state before each token.
        tokens: (N,) int64.
        temperature: divides the logits.
        entropy: "differentiable" costs as much again as the gradient of the log-probs.
    Returns:
        logprobs, entropy: (N,) float32, nats; entropy is None for "none".
    """
    has_bias = getattr(model.get_output_embeddings(), "bias", None) is not None

    def head(states: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = logits_of(model, states)
        if temperature != 1.0:  # saves a pass over the logits
            logits = logits / temperature
        distribution = logits.log_softmax(dim=-1)
        logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
        if entropy == "none":
            return (logprobs,)
        if has_bias:
            distribution = distribution.clamp(min=torch.finfo(torch.float32).min)  # 0·(−∞) is not a number
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "differentiable"):
            return logprobs, -(distribution.exp() * distribution).sum(dim=-1)

    size = tokens_at_once(model.config.get_text_config().vocab_size, hidden.device)
    if not torch.is_grad_enabled():
        hidden = hidden.detach()  # no gradient is to be taken
    if is_constant(model.get_output_embeddings()):
        logprobs, *rest = cast(tuple[Tensor, ...], GradientAhead.apply(head, size, entropy, hidden, tokens))
    else:
        num = torch.tensor(max(1, -(-len(hidden) // size)), device=hidden.device)
        if is_sharded(model.get_output_embeddings()):  # every call gathers its weights, from all processes
            distributed.all_reduce(num, distributed.ReduceOp.MAX)
        pieces = zip(hidden.tensor_split(int(num)), tokens.tensor_split(int(num)), strict=True)
        parts = [checkpoint(head, *piece, use_reentrant=False) for piece in pieces]
        logprobs, *rest = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, rest[0] if rest else None


def is_constant(head: nn.Module) -> bool:
    """Return whether the head has neither trainable nor sharded weights, as `GradientAhead` needs."""
    return not is_sharded(head) and not any(p.requires_grad for p in head.parameters())


class GradientAhead(torch.autograd.Function):
    """Apply a frozen head to chunks of rows, and compute the gradient in the forward pass.

    Each output depends on one row of states, so its gradient is a row that the backward only scales. The forward keeps
    (N, H) gradients and computes the logits once. Buffers that outlive a chunk are allocated first; allocating them
    between chunks fragments the heap.
    """

    @staticmethod
    def forward(
        ctx: Any, head: Head, size: int, entropy: Entropy, states: Tensor, targets: Tensor
    ) -> tuple[Tensor, ...]:
        kinds = 1 if entropy == "none" else 2
        differentiable = (2 if entropy == "differentiable" else 1) if ctx.needs_input_grad[3] else 0
        outputs = tuple(states.new_empty(len(states), dtype=torch.float32) for _ in range(kinds))
        gradients = tuple(torch.empty_like(states) for _ in range(differentiable))
        for start in range(0, len(states), size):
            rows = slice(start, start + size)
            with torch.set_grad_enabled(differentiable > 0):
                leaf = states[rows].detach().requires_grad_(differentiable > 0)
                found = head(leaf, targets[rows])
                for gradient, output in zip(gradients, found, strict=False):
                    gradient[rows] = torch.autograd.grad(output.sum(), leaf, retain_graph=differentiable > 1)[0]
            for whole, output in zip(outputs, found, strict=True):
                whole[rows] = output.detach()
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*outputs[differentiable:])
        return outputs

    @staticmethod
    def backward(ctx: torch.autograd.Function, *grads: Tensor) -> tuple[None, None, None, Tensor, None]:
        gradients = ctx.saved_tensors
        total = sum(grad[:, None].to(own.dtype) * own for grad, own in zip(grads, gradients, strict=False))
        return None, None, None, cast(Tensor, total), None
