"""Copies between devices."""

import torch
from torch import Tensor


def copy_to(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy on the device, without waiting for it where that is safe."""
    # A GPU copy need not wait. MPS may copy memory that is freed by then: https://github.com/pytorch/pytorch/issues/189690
    blocking = torch.device(device).type in ("cpu", "mps")
    return tensor.to(device, non_blocking=not blocking)
