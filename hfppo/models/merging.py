"""`merge_adapters`: copies of the weights with the adapters merged in."""

from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hfppo.config import PPOConfig
from hfppo.models.lora import FusedLoraLinear

EXACT = (torch.float32, torch.float64)  # in bfloat16 a sum of weight and adapter would lose most of the adapter


class MergedWeights:
    """W + s B A of the layers whose adapters are trained, beside base and adapter, which stay as they are.

    It is one product of matrices then in place of three, forward and, for the input's gradient, backward. The sums
    hold from `refresh` to `release`, and no weight may change in between.

    Args:
        layers: from `layers_to_merge`; without any, both calls do nothing.
    """

    def __init__(self, layers: list[FusedLoraLinear]):
        self._layers = layers
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Have the layers compute with the sums of their present weights. arXiv:2106.09685, equation 3."""
        if not self._sums:  # not before the model is on its device; then kept, so that compiled layers stay valid
            self._sums = [torch.empty_like(cast(Tensor, layer.base_layer.weight)) for layer in self._layers]
        for layer, out in zip(self._layers, self._sums, strict=True):
            weight, down, up, scale = operands(layer)
            layer.merged_weight = torch.addmm(weight, up, down, alpha=scale, out=out)

    def release(self) -> None:
        """Have the layers compute with base and adapter again, before a weight changes."""
        for layer in self._layers:
            layer.merged_weight = None


def operands(layer: FusedLoraLinear) -> tuple[Tensor, Tensor, Tensor, float]:
    """W (out, in), A (r, in), B (out, r) and s of a layer."""
    name = layer.fused_adapter
    tensors = (layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
    weight, down, up = (cast(Tensor, tensor) for tensor in tensors)
    return weight, down, up, layer.scaling[name]


def layers_to_merge(model: nn.Module, accelerator: Accelerator, args: PPOConfig) -> list[FusedLoraLinear]:
    """The layers whose adapters are trained and whose sum of weights is as exact as the weights; none if not asked.

    Raises:
        ValueError: there are none, or they would not compute with the sum; says what would do.
    """
    if not args.merge_adapters:
        return []
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"merge_adapters=True sums weights in float32, and {accelerator.mixed_precision} computes in half "
            "precision; set one of them to False"
        )
    layers = [layer for layer in model.modules() if isinstance(layer, FusedLoraLinear) and can_merge(layer)]
    if not layers:
        raise ValueError(
            "merge_adapters=True finds no layer to merge: it takes LoRA without dropout, bias or DoRA on linear "
            "layers in float32; set merge_adapters=False"
        )
    return layers


def can_merge(layer: FusedLoraLinear) -> bool:
    """Whether the adapter is trained, and the sum as exact as its parts."""
    weight, down, up, _ = operands(layer)
    return down.requires_grad and weight.dtype == down.dtype == up.dtype and weight.dtype in EXACT
