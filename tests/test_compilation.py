"""`torch_compile` reaches every pass and changes no number.

The backend `aot_eager` traces and cuts, but needs no compiler of C++.
"""

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.runs import count_digits, untimed_logs
from helpers.tiny import LORA, tiny_model
from hfppo import PPOTrainer

CONFIG = {"max_steps": 4}


@pytest.fixture(autouse=True)
def new_graphs():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def logged(make_trainer, **config) -> list[dict[str, float]]:
    trainer = make_trainer({**CONFIG, **config}, model=tiny_model(num_hidden_layers=1))
    trainer.train()
    assert trainer.model_wrapped is trainer.model
    return untimed_logs(trainer)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_layers_give_the_same_run(make_trainer):
    eager = logged(make_trainer)
    assert not counters["stats"]
    compiled = logged(make_trainer, torch_compile_backend="aot_eager")
    # The actor's with gradient and without, and with the adapter off; the critic's with gradient and without.
    assert counters["stats"]["unique_graphs"] == 5
    assert not counters["graph_break"]
    assert len(compiled) == len(eager)
    for one, other in zip(compiled, eager, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert compiled[0]["policy/first_ratio_deviation"] < 1e-5


def test_a_second_trainer_of_the_same_arguments_is_compiled_too(make_trainer, dataset, tokenizer):
    first = make_trainer({"torch_compile_backend": "aot_eager"})
    second = PPOTrainer(tiny_model(), count_digits, first.args, dataset, processing_class=tokenizer, peft_config=LORA)
    for trainer in (first, second):
        layers = trainer.model.causal_lm.model.layers
        assert all(layer._compiled_call_impl is not None for layer in layers)
