"""The decoder layers below those that a critic adapts: their states are the base's, and need computing once only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_tuples: dict[type, bool] = {}  # whether decoder layers return tuples, by their class


def find_layers(trunk: Any) -> tuple[str, nn.ModuleList]:
    """Return the list of a trunk's decoder layers, with its name.

    Raises:
        ValueError: there is no such list.
    """
    count = trunk.config.get_text_config().num_hidden_layers
    for name, module in trunk.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ValueError(
        f"critic_layers cannot be used with {type(trunk).__name__}, which has no list of its {count} decoder layers; "
        "leave critic_layers out"
    )


def names_in_top_layers(names: list[str], trunk: Any, count: int) -> list[str]:
    """Return those names of a trunk's modules or parameters that lie in its top `count` layers."""
    of_list, layers = find_layers(trunk)
    top = tuple(f"{of_list}.{i}." for i in range(len(layers) - count, len(layers)))
    return [name for name in names if name.startswith(top)]


class StandIn(nn.Module):
    """Takes a layer's place in the list, with its attributes: a trunk may ask each layer for its kind of attention."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class RecordedLayer(StandIn):
    """Computes the layer, and keeps the hidden states that it returns."""

    states: Tensor  # (B, L, H)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's outputs."""
        outputs = self.layer(*args, **kwargs)
        _tuples[type(self.layer)] = isinstance(outputs, tuple)
        self.states = outputs[0] if isinstance(outputs, tuple) else outputs
        return outputs


class SkippedLayer(StandIn):
    """Returns given hidden states instead of computing the layer."""

    def __init__(self, layer: nn.Module, states: Tensor, as_tuple: bool):
        super().__init__(layer)
        self.states, self.as_tuple = states, as_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        """Return the states, with a gradient where reentrant checkpointing asks for one."""
        states = self.states.detach().requires_grad_(hidden_states.requires_grad)
        return (states,) if self.as_tuple else states


@contextmanager
def stand_in(layers: nn.ModuleList, others: dict[int, nn.Module]) -> Iterator[None]:
    """Put other modules into a list of layers for the block."""
    before = {i: layers[i] for i in others}
    try:
        for i, module in others.items():
            layers[i] = module
        yield
    finally:
        for i, module in before.items():
            layers[i] = module


@contextmanager
def record_states(trunk: nn.Module, top: int) -> Iterator[RecordedLayer]:
    """Keep the hidden states below the top layers of a trunk's forward in the block."""
    layers = find_layers(trunk)[1]
    last = len(layers) - top - 1
    recorded = RecordedLayer(layers[last])
    with stand_in(layers, {last: recorded}):
        yield recorded


@contextmanager
def start_from(trunk: nn.Module, top: int, states: Tensor) -> Iterator[None]:
    """Let a trunk's forward in the block start from (B, L, H) hidden states below its top layers.

    The trunk computes embeddings, masks and positions as always, and each layer keeps its number.
    """
    layers = find_layers(trunk)[1]
    last = len(layers) - top - 1
    as_tuple = _tuples.get(type(layers[last]), False)
    with stand_in(layers, {i: SkippedLayer(layers[i], states, as_tuple) for i in range(last + 1)}):
        yield
