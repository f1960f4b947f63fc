"""`torch_compile`: what is compiled, and when."""

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# Graphs of a layer: with gradient and without, adapter on and off, actor's and critic's, one length and any length.
GRAPHS = 32


def compile_layers(model: nn.Module, accelerator: Accelerator) -> None:
    """Compile the layers of actor, critic and reference in place, where accelerate is asked to compile a model.

    It would wrap the whole model, which the passes of a rollout do not go through, and whose output head, which takes
    its gradient in the forward already, is no graph. Layers share their graphs, and compile in less time.
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return
    options = {**plugin.to_kwargs(), "dynamic": True}  # graphs that do not depend on the order in which lengths come
    plugin.backend = DynamoBackend.NO
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):  # transformers' class of a layer
            module.compile(**options)
