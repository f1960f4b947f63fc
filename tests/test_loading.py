"""Models as users name them: what is loaded, and what is warned of."""

import logging

import pytest
import torch
from conftest import LORA, tiny_model
from peft import AutoPeftModelForCausalLM, FourierFTConfig, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


@pytest.fixture(autouse=True)
def seen(caplog):
    """The package's log reaches pytest's."""
    caplog.set_level(logging.WARNING, logger="hfppo")
    return caplog


def test_a_merged_and_saved_model_is_what_plain_peft_loads(make_trainer, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapter = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapter.merge_and_unload().save_pretrained(tmp_path / "merged")
    trainer = make_trainer({"max_steps": 1}, model=str(tmp_path / "merged"))
    trainer.train()
    trainer.save_model()
    plain = AutoPeftModelForCausalLM.from_pretrained(trainer.args.output_dir).eval()
    trainer.model.eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, trainer.model(input_ids=ids).logits)


def test_arguments_for_loading_are_for_models_given_by_name(seen, make_trainer):
    make_trainer({"model_init_kwargs": {"token": "secret"}})
    assert "model_init_kwargs is for models given by name; those given are loaded already" in seen.messages
    assert "secret" not in seen.text


@pytest.mark.parametrize(
    ("peft_config", "dtype", "changes"),
    [
        (LORA, torch.float32, False),
        (LoraConfig(r=4, use_dora=True, target_modules="all-linear"), torch.bfloat16, False),
        (LoraConfig(r=4, init_lora_weights=False), torch.float32, True),
        (LoraConfig(r=4, init_lora_weights=False), torch.bfloat16, True),
        (FourierFTConfig(n_frequency=100, target_modules=["q_proj"]), torch.float32, True),
    ],
)
def test_an_adapter_that_does_not_begin_at_the_base_is_warned_of(seen, make_trainer, peft_config, dtype, changes):
    trainer = make_trainer({"kl_estimator": "k3"}, model=tiny_model().to(dtype), peft_config=peft_config)
    assert any("begins with weights that change the model" in m for m in seen.messages) == changes
    rollout = trainer.rollout(["1+1="])
    assert ((rollout.old_logprobs - rollout.ref_logprobs).abs().max() > 0.2) == changes
