"""Models that are not what their names say: whoever loads what was trained on them would get another one."""

import logging

import pytest
import torch
from conftest import LORA, tiny_model
from peft import AutoPeftModelForCausalLM, FourierFTConfig, LoraConfig, get_peft_model
from test_reward_model import scorer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hfppo.origin import check_origin


@pytest.fixture(autouse=True)
def seen(caplog):
    """The package's log reaches pytest's."""
    caplog.set_level(logging.WARNING, logger="hfppo")
    return caplog


@pytest.fixture
def saved(tmp_path) -> str:
    tiny_model().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def load(path: str, **options) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_as_it_was_saved_is_not_warned_of(saved, seen, dtype):
    check_origin("model", load(saved, dtype=dtype))
    check_origin("model", load(saved).to(dtype))
    assert seen.messages == []


def test_a_merged_model_is_warned_of(saved, seen, make_trainer):
    adapter = get_peft_model(load(saved), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    merged = adapter.merge_and_unload()
    make_trainer(model=merged)
    (message,) = [message for message in seen.messages if "is called" in message]
    assert message.startswith(
        f"model is called {saved!r}, by which it will be loaded again, but that has another model."
    )
    assert "q_proj.weight; save it by save_pretrained, and give that folder" in message


def test_a_merged_and_saved_model_is_what_plain_peft_loads(saved, seen, make_trainer, tmp_path):
    """The way out that the warning names."""
    adapter = get_peft_model(load(saved), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapter.merge_and_unload().save_pretrained(tmp_path / "merged")
    trainer = make_trainer({"max_steps": 1}, model=str(tmp_path / "merged"))
    trainer.train()
    trainer.save_model()
    assert not any("is called" in message for message in seen.messages)
    plain = AutoPeftModelForCausalLM.from_pretrained(trainer.args.output_dir).eval()
    trainer.model.eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, trainer.model(input_ids=ids).logits)


def test_a_changed_critic_and_a_model_from_scratch_are_warned_of(saved, seen, make_trainer, tmp_path):
    critic = scorer(0)
    critic.save_pretrained(tmp_path / "critic")
    critic = type(critic).from_pretrained(tmp_path / "critic")
    with torch.no_grad():
        critic.model.layers[0].mlp.up_proj.weight += 1.0
    make_trainer(model=tiny_model(), critic=critic)
    assert any(message.startswith("model has no name_or_path") for message in seen.messages)
    assert any("critic is called" in message and "up_proj" in message for message in seen.messages)


def test_arguments_for_loading_are_for_models_given_by_name(seen, make_trainer):
    make_trainer({"model_init_kwargs": {"dtype": "bfloat16"}})
    assert any("model_init_kwargs={'dtype': 'bfloat16'} is for models given by name" in m for m in seen.messages)


@pytest.mark.parametrize(
    ("peft_config", "changes"),
    [
        (LORA, False),
        (LoraConfig(r=4, init_lora_weights=False), True),
        (FourierFTConfig(n_frequency=100, target_modules=["q_proj"]), True),
    ],
)
def test_an_adapter_that_does_not_begin_at_the_base_is_warned_of(seen, make_trainer, peft_config, changes):
    trainer = make_trainer({"kl_estimator": "k3"}, peft_config=peft_config)
    assert any("begins with weights that change the model" in m for m in seen.messages) == changes
    rollout = trainer.rollout(["1+1="])
    assert ((rollout.old_logprobs - rollout.ref_logprobs).abs().max() > 1e-3) == changes
