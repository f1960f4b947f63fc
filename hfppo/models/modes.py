"""Eval mode and other temporary attributes, sharding, placement and compilation of a model."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from hfppo.config import PPOConfig


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode for the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object for the block; those of its class are its class's again afterwards."""
    before = {name: getattr(owner, name) for name in values}
    inherited = {name for name in values if hasattr(type(owner), name) and name not in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if name in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 or DeepSpeed shards the weights, so that a forward needs every process."""
    return isinstance(module, FSDPModule) or any(hasattr(p, "ds_id") for p in module.parameters())


def copy_whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole copies of sharded tensors on the CPU; a collective call."""
    gathering: AbstractContextManager = nullcontext()
    if of_zero := [x for x in tensors.values() if hasattr(x, "ds_id")]:
        import deepspeed

        gathering = deepspeed.zero.GatheredParameters(of_zero)
    with gathering, torch.no_grad():
        return {name: whole(x).detach().to("cpu", copy=True) for name, x in tensors.items()}


def whole(x: Tensor) -> Tensor:
    """Return a tensor of FSDP2 whole, on its device; a collective call. Other tensors are returned as they are."""
    return cast(DTensor, x.to(x.device_mesh.device_type)).full_tensor() if isinstance(x, DTensor) else x


def place_model(model: nn.Module, device: torch.device) -> None:
    """Move the whole model to the device now; Trainer moves some of it only when training begins."""
    if is_sharded(model):
        return
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.device != device for tensor in own):  # a quantized base is there, and must not be moved
            module.to(device)


# Graphs of a layer: with gradient and without, adapter on and off, actor's and critic's.
GRAPHS = 32
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


def compile_layers(model: nn.Module, accelerator: Accelerator, args: PPOConfig) -> None:
    """Compile the layers of actor, critic and reference in place, if Trainer or accelerate is asked to compile.

    Without this, accelerate wraps the whole model. The passes of a rollout do not go through that wrapper, and the
    output head, which computes its gradient in the forward pass, cannot be traced. Layers share their graphs and
    compile in less time.

    Raises:
        ValueError: the architecture does not build its layers on GradientCheckpointingLayer; a mode with CUDA graphs,
            which are for fixed shapes; sampling in a second thread.
    """
    plugin = accelerator.state.dynamo_plugin
    if args.torch_compile:  # all trainers of a process share the plugin, which is turned off below
        options: dict[str, object] = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    elif plugin.backend != DynamoBackend.NO:  # accelerate launch --dynamo_backend
        options = plugin.to_kwargs()
    else:
        return
    if (mode := options.get("mode")) in WITH_CUDA_GRAPHS:
        raise ValueError(
            f"torch_compile_mode={mode!r} records a CUDA graph for each shape, but the shapes of rollouts vary; "
            "leave torch_compile_mode out, or set 'max-autotune-no-cudagraphs'"
        )
    if args.rollouts_ahead:
        raise ValueError(
            "rollouts_ahead=1 samples in a thread of its own without compiled layers, but torch_compile=True compiles "
            "for all threads; turn one of them off"
        )
    plugin.backend = DynamoBackend.NO
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            "torch_compile finds no layers: the architecture does not build them on transformers' "
            "GradientCheckpointingLayer; set torch_compile=False"
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for layer in layers:
        # Dynamic graphs do not depend on the order of the lengths, which differs in a resumed run.
        layer.compile(**{**options, "dynamic": True})
