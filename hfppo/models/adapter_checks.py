"""Raise if an adapter writes into the base or draws noise.

PEFT has some forty methods and adds more with each release, so they are tried, not listed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SAMPLED = 4096  # numbers of a weight that are compared; what writes into a weight changes nearly all of them


@contextmanager
def unchanged(base: nn.Module, name: str) -> Iterator[None]:
    """Compare the base's weights before and after the block, in which the adapter is put on it.

    Args:
        name: the configuration's name in the error.
    Raises:
        ValueError: making the adapter changes the base, or it fits no layer.
    """
    before = sample_weights(base)
    try:
        yield
    except NoMatchingPeftModuleError as error:
        layers = {path.rpartition(".")[2] for path, x in base.named_modules() if isinstance(x, nn.Linear | Conv1D)}
        raise ValueError(
            f"{name}: {error} The base's linear layers are {', '.join(sorted(layers))}; give a list of such names as "
            "target_modules, since a text is a regular expression for whole paths"
        ) from error
    for module, weights in before.items():
        for weight, numbers in weights.items():
            if not torch.equal(numbers, sample(getattr(module, weight))):
                raise ValueError(
                    f"{name} changes the base when its adapter is made, so the disabled adapter is not the reference "
                    "policy; use init_lora_weights=True, 'gaussian' or 'orthogonal', "
                    "and no variant that rewrites weights"
                )


def sample_weights(base: nn.Module) -> dict[nn.Module, dict[str, Tensor]]:
    """Return some numbers of each of a model's weights, by the module and name that has it."""
    sampled: dict[nn.Module, dict[str, Tensor]] = {}
    for module in base.modules():
        weights = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        sampled[module] = {name: sample(weight) for name, weight in weights if not weight.is_meta}
    return sampled


def sample(weight: Tensor) -> Tensor:
    """Return the bytes of up to `SAMPLED` numbers of a tensor, evenly spread."""
    numbers = weight.detach().flatten()
    return numbers[:: max(1, numbers.numel() // SAMPLED)].clone().view(torch.uint8)


def check_noise(model: nn.Module, forward: Callable[[], Tensor]) -> None:
    """Raise if an adapter's layer gives two outputs for one input.

    Each layer is called twice more within the forward, in train and in eval mode. Its trainable weights are moved
    meanwhile, because many new layers multiply their noise by zero.

    Args:
        forward: any forward of the model, which is in eval mode.
    Raises:
        ValueError: an adapter's layer draws noise.
    """
    noisy: list[str] = []

    def compare(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _: object) -> None:
        if not noisy and draws_noise(layer, args, kwargs):
            noisy.append(type(layer).__name__)

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    dense = [x for x in layers if isinstance(x.get_base_layer(), nn.Linear | nn.Embedding | Conv1D)]
    handles = [layer.register_forward_hook(compare, with_kwargs=True) for layer in dense]  # type: ignore[attr-defined]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if noisy:
        raise ValueError(
            f"peft_config draws noise in its layers ({noisy[0]}), so two passes over one token disagree and the ratio "
            "of new and old policy is off; leave the noise out, or use plain LoRA"
        )


def draws_noise(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether an adapter's layer gives two outputs for one input."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    devices = {parameter.device for parameter in trained if parameter.is_cuda}
    try:
        for parameter in trained:
            parameter.add_(0.1)
        with torch.random.fork_rng(devices):  # some layers draw numbers that change nothing
            for mode in (True, False):
                layer.train(mode)
                first, second = (layer.forward(*args, **kwargs) for _ in range(2))
                if not torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True):
                    return True
        return False
    finally:
        layer.eval()
        for parameter, values in zip(trained, before, strict=True):
            parameter.copy_(values)
