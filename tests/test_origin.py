"""Models that are not what their names say: whoever loads what was trained on them would get another one."""

import logging
from pathlib import Path

import pytest
import torch
from conftest import LORA, tiny_model
from peft import AutoPeftModelForCausalLM, FourierFTConfig, LoraConfig, get_peft_model
from test_reward_model import scorer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hfppo.models.origin import files_in, warn_of_origin


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
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_model_as_it_was_saved_is_not_warned_of(tmp_path, seen, dtype, shard):
    """Nor one that was cast, or lies beside a variant."""
    tiny_model().save_pretrained(tmp_path, max_shard_size=shard)
    tiny_model(seed=7).save_pretrained(tmp_path, variant="fp16")
    assert len(files_in(tmp_path)) == (1 if shard == "5GB" else len(list(tmp_path.glob("model-*")))) > 0
    for model in (load(str(tmp_path), dtype=dtype), load(str(tmp_path)).to(dtype)):
        warn_of_origin("model", model)
        warn_of_origin("model", model.float())
        warn_of_origin("model", model.bfloat16())
        warn_of_origin("model", model.to("meta"))
    assert seen.messages == []


def test_a_file_that_cannot_be_read_is_no_error(saved, seen):
    model = load(saved)
    (Path(saved) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    warn_of_origin("model", model)
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
    critic = scorer()
    critic.save_pretrained(tmp_path / "critic")
    critic = type(critic).from_pretrained(tmp_path / "critic")
    with torch.no_grad():
        critic.model.layers[0].mlp.up_proj.weight += 1.0
    make_trainer(model=tiny_model(), critic=critic)
    assert any(message.startswith("model has no name_or_path") for message in seen.messages)
    assert any("critic is called" in message and "up_proj" in message for message in seen.messages)


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
