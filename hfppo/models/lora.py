"""PEFT's LoRA layers, with the adapter's product added inside the matrix products of forward and backward."""

from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn


def fuse_lora(model: nn.Module) -> None:
    """Give the plain LoRA layers of a model a faster forward, in place; they stay PEFT's in all else.

    PEFT multiplies the adapter's output by its scale and adds it to the base's, which is a pass over memory each.
    Where something is cast, under autocast or with float32 adapters on a bfloat16 base, PEFT's forward stays.
    """
    for module in model.modules():
        if type(module) is LoraLinear and len(module.lora_A) == 1 and adds_a_product_only(module):
            module.__class__ = FusedLoraLinear
            (cast(FusedLoraLinear, module).fused_adapter,) = module.lora_A


def adds_a_product_only(layer: LoraLinear) -> bool:
    """Whether a layer is a frozen, unquantised linear one, and its adapters add s B A x and nothing else."""
    base = layer.base_layer
    frozen = type(base) is nn.Linear and not any(p.requires_grad for p in base.parameters())
    dropouts = (getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values())
    offloaded = any(hasattr(module, "_hf_hook") for module in layer.modules())  # accelerate's, called with the module
    more = layer.lora_variant or any(layer.lora_bias.values()) or any(dropouts) or offloaded
    return frozen and not more


class FusedLoraLinear(LoraLinear):
    """A LoRA layer over a plain linear one; what has to be cast, gathered, merged or mixed takes PEFT's way."""

    fused_adapter: str  # the one that was checked; others may come later
    merged_weight: Tensor | None = None  # (out, in) W + s B A, as long as `MergedWeights` answers for it

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(…, in) → (…, out): W x + bias + s B A x."""
        name = self.fused_adapter
        if args or kwargs or self.disable_adapters or self.merged or self.active_adapters != [name]:
            return super().forward(x, *args, **kwargs)
        base: Any = self.base_layer
        if self.merged_weight is not None and not torch.is_grad_enabled():
            # The checks below were made for it; for each token that is sampled they would take 5 % of the time.
            return nn.functional.linear(x, self.merged_weight, base.bias)
        weight, down, up = base.weight, cast(Tensor, self.lora_A[name].weight), cast(Tensor, self.lora_B[name].weight)
        to_cast = torch.is_autocast_enabled(x.device.type) or not x.dtype == weight.dtype == down.dtype
        if to_cast or hasattr(weight, "ds_id"):  # DeepSpeed gathers weights for the layers that it sees called
            return super().forward(x)
        inputs = (x.flatten(0, -2), weight, base.bias, down, up, self.scaling[name])
        y = FusedProduct.apply(*inputs, self.merged_weight) if torch.is_grad_enabled() else product(*inputs)[0]
        return y.view(*x.shape[:-1], y.shape[-1])


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """x Wᵀ + bias + s (x Aᵀ) Bᵀ, (n, out), and x Aᵀ, (n, r); arXiv:2106.09685, equation 3."""
    inner = x @ down.T
    return nn.functional.linear(x, weight, bias).addmm_(inner, up.T, alpha=scale), inner


class FusedProduct(torch.autograd.Function):
    """`product` of frozen W and bias, with its gradients.

    With `merged`, which is W + s B A, the output and the gradient of x are one product of matrices each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        merged: Tensor | None = None,
    ) -> Tensor:
        if merged is None:
            y, inner = product(x, weight, bias, down, up, scale)
        else:
            y, inner, weight = nn.functional.linear(x, merged, bias), x @ down.T, merged
        ctx.save_for_backward(x, inner, weight, down, up)
        ctx.scale, ctx.is_merged = scale, merged is not None
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None, None]:
        x, inner, weight, down, up = ctx.saved_tensors
        of_inner = (grad @ up) * ctx.scale
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ weight if ctx.is_merged else (grad @ weight).addmm_(of_inner, down)
        # xᵀ first: on a CPU its product with a narrow matrix takes two thirds of the time of the other way round.
        return of_x, None, None, (x.T @ of_inner).T, (grad.T @ inner) * ctx.scale, None, None
