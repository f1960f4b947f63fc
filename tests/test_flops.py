"""Floating-point operations of the update, against those that torch counts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from helpers.tiny import tiny_model

MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)  # attention's own products are others


class MatrixProducts(TorchDispatchMode):
    """Counts the operations of matrix products. torch's FlopCounterMode has hooks that an inner backward refuses."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in MATRIX_PRODUCTS:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize(("critic", "layers"), [("adapter", None), ("adapter", 2), ("shared", None)])
def test_a_step_makes_as_many_operations_as_torch_counts(make_trainer, critic, layers):
    """Up to the gradients of the first layer's inputs, which are frozen embeddings, and the last token's state."""
    counter = MatrixProducts()
    model = tiny_model(num_hidden_layers=6, hidden_size=64, intermediate_size=128, vocab_size=512)
    fields = {"max_steps": 1, "kl_coef": 0.0, "critic_layers": layers}
    trainer = make_trainer(fields, model=model, critic=critic)

    def training_step(*args, **kwargs):
        with counter:
            return type(trainer).training_step(trainer, *args, **kwargs)

    trainer.training_step = training_step
    trainer.train()
    log = trainer.state.log_history[0]
    of_step = 1e12 * log["time/update_tflops"] * log["time/update"] / trainer.args.updates_per_rollout
    assert 0.85 * of_step < counter.flops <= of_step
