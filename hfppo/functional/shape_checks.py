"""Shape checks: the first lines of every function in this folder."""

from torch import Tensor


def require_same_shape(**tensors: Tensor) -> None:
    """Raise a ValueError that names each tensor and its shape unless all shapes are equal."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must be equal, got {shapes}")


def require_rows(of: Tensor, **tensors: Tensor) -> None:
    """Raise a ValueError that names the tensor unless each is (B,): one number per row of the (B, T) tensor `of`."""
    for name, tensor in tensors.items():
        if tensor.shape != of.shape[:1]:
            raise ValueError(f"{name} must have shape {tuple(of.shape[:1])}, one per row, got {tuple(tensor.shape)}")
