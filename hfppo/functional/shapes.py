"""The check every function here makes first."""

from torch import Tensor


def require_same_shape(**tensors: Tensor) -> None:
    """Raise a ValueError that names each tensor and its shape unless all shapes are equal."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must be equal, got {shapes}")
