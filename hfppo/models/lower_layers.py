"""The decoder layers below the critic's adapted layers: they equal the base's, so a rollout computes them once."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from hfppo.models.modes import attributes

_tuples: dict[type, bool] = {}  # whether decoder layers return tuples, by their class


def find_layers(trunk: nn.Module) -> nn.ModuleList:
    """Return the list of a trunk's decoder layers.

    Raises:
        ValueError: there is no such list.
    """
    count = cast(PreTrainedModel, trunk).config.get_text_config().num_hidden_layers
    for module in trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"critic_layers cannot be used with {type(trunk).__name__}, which has no list of its {count} decoder layers; "
        "leave critic_layers out"
    )


def replace_lowest(layers: nn.ModuleList, count: int, other: nn.Module) -> AbstractContextManager[None]:
    """Put another module in the place of the first layers for the block."""
    return attributes(layers, **{str(number): other for number in range(count)})


@dataclass
class Recording:
    """Hidden states that a layer returned."""

    states: Tensor | None = None  # (B, L, H)


class GivenStates(nn.Module):
    """Returns given hidden states in the place of a layer."""

    def __init__(self, states: Tensor, as_tuple: bool):
        super().__init__()
        self.states, self.as_tuple = states, as_tuple

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        """Return the states, with a gradient where reentrant checkpointing asks for one."""
        states = self.states.detach().requires_grad_(hidden_states.requires_grad)
        return (states,) if self.as_tuple else states


@contextmanager
def record_states(trunk: nn.Module, top: int) -> Iterator[Recording]:
    """Keep the hidden states below the top layers of a trunk's last forward in the block."""
    recording = Recording()

    def record(layer: nn.Module, _: object, outputs: Tensor | tuple[Tensor, ...]) -> None:
        _tuples[type(layer)] = isinstance(outputs, tuple)
        recording.states = outputs[0] if isinstance(outputs, tuple) else outputs

    hook = find_layers(trunk)[-top - 1].register_forward_hook(record)
    try:
        yield recording
    finally:
        hook.remove()


def start_from(trunk: nn.Module, top: int, states: Tensor) -> AbstractContextManager[None]:
    """Let a trunk's forward in the block run its top layers only, from (B, L, H) hidden states below them.

    The trunk computes embeddings, masks and positions as always, and each layer keeps its number.
    """
    layers = find_layers(trunk)
    given = GivenStates(states, _tuples.get(type(layers[-top - 1]), False))
    return replace_lowest(layers, len(layers) - top, given)
