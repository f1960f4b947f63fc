"""Choose which of a module tree's adapters acts: the actor's, the critic's, the reference's, or none.

PEFT's own switches also set `requires_grad`. Then a weight whose adapter rests between forward and backward silently
gets no gradient. Here only the layers' private choice changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

ACTOR, CRITIC, REFERENCE = "default", "critic", "reference"  # names of the adapters on the actor's base


class AdapterSwitch:
    """Makes one adapter of a module tree act; outside of `use` it is the actor's."""

    def __init__(self, tree: nn.Module):
        self.acting: str | None = ACTOR
        layers = [x for x in tree.modules() if isinstance(x, BaseTunerLayer | AuxiliaryTrainingWrapper)]
        self._layers = [(layer, layer._get_available_adapters()) for layer in layers]

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Make an adapter act in the block; None: the base alone."""
        if name == self.acting:
            yield
            return
        before = self.acting, [(layer._active_adapter, layer._disable_adapters) for layer, _ in self._layers]
        self.acting = name
        try:
            for layer, names in self._layers:
                layer._disable_adapters = name not in names
                if name in names:
                    layer._active_adapter = [name]
            yield
        finally:
            self.acting = before[0]
            for (layer, _), (active, disabled) in zip(self._layers, before[1], strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def follow_checkpointing(self, tree: nn.Module) -> None:
        """Make the adapter of a forward act again where activation checkpointing repeats the forward in backward."""
        for module in tree.modules():
            # The function that transformers gives each layer that it checkpoints.
            if (function := vars(module).get("_gradient_checkpointing_func")) is not None:
                vars(module)["_gradient_checkpointing_func"] = partial(self._checkpoint, function)

    def _checkpoint(self, checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call `checkpoint` with a function that `use`s the present adapter."""
        name = self.acting
        if name == ACTOR or torch.compiler.is_compiling():  # it acts in backward anyway; a graph repeats itself
            return checkpoint(function, *args, **kwargs)

        def as_now(*again: Any, **more: Any) -> Any:
            with self.use(name):
                return function(*again, **more)

        return checkpoint(as_now, *args, **kwargs)
