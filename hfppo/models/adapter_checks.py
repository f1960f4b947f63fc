"""Raise if an adapter writes into the base when it is made.

PEFT has some forty methods and adds more with each release, so they are tried, not listed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SAMPLED = 4096  # numbers compared per weight; an adapter that writes into a weight changes nearly all of them


@contextmanager
def unchanged(base: nn.Module, name: str) -> Iterator[None]:
    """Compare the base's weights before and after the block, in which the adapter is put on it.

    Args:
        name: the configuration's name in the error.
    Raises:
        ValueError: making the adapter changes the base, or it fits no layer.
    """
    before = [
        (module, weight, sample(tensor))
        for module in base.modules()
        for weight, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if not tensor.is_meta
    ]
    try:
        yield
    except NoMatchingPeftModuleError as error:
        layers = {path.rpartition(".")[2] for path, x in base.named_modules() if isinstance(x, nn.Linear | Conv1D)}
        raise ValueError(
            f"{name}: {error} The base's linear layers are {', '.join(sorted(layers))}; give a list of such names as "
            "target_modules, since a string is a regular expression for whole paths"
        ) from error
    if not all(torch.equal(numbers, sample(getattr(module, weight))) for module, weight, numbers in before):
        raise ValueError(
            f"{name} changes the base when its adapter is made, so the disabled adapter is not the reference policy; "
            "use init_lora_weights=True, 'gaussian' or 'orthogonal', and no variant that rewrites weights"
        )


def sample(weight: Tensor) -> Tensor:
    """Return the bytes of up to `SAMPLED` numbers of a tensor, evenly spread."""
    numbers = weight.detach().flatten()
    return numbers[:: max(1, numbers.numel() // SAMPLED)].clone().view(torch.uint8)
