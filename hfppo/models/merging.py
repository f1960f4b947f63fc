"""`merge_adapters`: copies of the weights with the adapters merged in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from hfppo.config import PPOConfig
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.lora import FusedLoraLinear

EXACT = (torch.float32, torch.float64)  # in bfloat16 a sum of weight and adapter would lose most of the adapter
EXACT_PRODUCTS = ("none", "ieee")  # torch's names for products of float32 that are not rounded to less


class MergedWeights:
    """W + s B A of the layers whose adapters are trained, beside base and adapter, which stay as they are.

    A layer's output is one product of matrices then in place of three, and so is its input's gradient. The sums hold
    from `refresh` to `release`, and no weight may change in between.

    Args:
        layers: from `layers_to_merge`; without any, nothing here does anything.
    """

    def __init__(self, layers: list[FusedLoraLinear]):
        self._layers = layers
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Have the layers compute with the sums of their present weights, unless they do. arXiv:2106.09685, eq. 3."""
        if any(layer.merged_weight is not None for layer in self._layers):
            return
        if not self._sums:  # not before the model is on its device; then kept, so that compiled layers stay valid
            self._sums = [torch.empty_like(cast(Tensor, layer.base_layer.weight)) for layer in self._layers]
        for layer, out in zip(self._layers, self._sums, strict=True):
            weight, down, up, scale = operands(layer)
            layer.merged_weight = torch.addmm(weight, up, down, alpha=scale, out=out)

    def release(self) -> None:
        """Have the layers compute with base and adapter again, before a weight changes."""
        for layer in self._layers:
            layer.merged_weight = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the layers compute with the sums."""
        self.refresh()
        try:
            yield
        finally:
            self.release()

    def free(self) -> None:
        """Give the memory back; the next `refresh` takes it again."""
        self.release()
        self._sums = []


def operands(layer: FusedLoraLinear) -> tuple[Tensor, Tensor, Tensor, float]:
    """W (out, in), A (r, in), B (out, r) and s of a layer."""
    name = layer.fused_adapter
    tensors = (layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
    weight, down, up = (cast(Tensor, tensor) for tensor in tensors)
    return weight, down, up, layer.scaling[name]


def layers_to_merge(model: ActorCritic, accelerator: Accelerator, args: PPOConfig) -> list[FusedLoraLinear]:
    """The layers whose adapters are trained and can be summed without a loss; none if nobody asks.

    Raises:
        ValueError: the actor has none, or they would not compute with the sums; says what would do.
    """
    if not args.merge_adapters:
        return []
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"merge_adapters=True sums weights in float32, and mixed precision, {accelerator.mixed_precision} here, "
            "rounds the sums; turn one of them off"
        )
    backend = torch.backends.cuda if accelerator.device.type == "cuda" else torch.backends.mkldnn
    if backend.matmul.fp32_precision not in EXACT_PRODUCTS:
        raise ValueError(
            f"merge_adapters=True needs products in float32, and those of this process round to "
            f"{backend.matmul.fp32_precision}, so that small steps of the adapters were lost; set tf32=False, or "
            "merge_adapters=False"
        )
    actor, everything = (
        [layer for layer in tree.modules() if isinstance(layer, FusedLoraLinear) and can_merge(layer)]
        for tree in (model.base_model, model)
    )
    if not actor:
        raise ValueError(
            "merge_adapters=True finds no layer of the actor to merge: it takes LoRA, without DoRA or a bias of its "
            "own, on linear layers in float32; set merge_adapters=False"
        )
    return everything


def can_merge(layer: FusedLoraLinear) -> bool:
    """Whether the adapter is trained, and both weights are of a type that the sum is not much coarser than."""
    weight, down, up, _ = operands(layer)
    return down.requires_grad and weight.dtype == down.dtype == up.dtype and weight.dtype in EXACT
