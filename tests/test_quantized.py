"""A base in four or eight bits: one copy of it serves every role, and training does not touch it."""

from pathlib import Path

import arithmetic
import pytest
import torch
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

from helpers.runs import digest, frozen_tensors, small_trainer
from hfppo import PPOConfig, PPOTrainer
from hfppo.models.critic import shared_copy
from hfppo.models.loading import keep_four_bits

pytest.importorskip("bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
BITS = {"four": NF4, "eight": {"load_in_8bit": True}}


def quantized(bits: str):
    return AutoModelForCausalLM.from_pretrained(
        arithmetic.FOLDER / "base", quantization_config=BitsAndBytesConfig(**BITS[bits])
    )


def trainer_of(model, tmp_path: Path, reward_funcs=arithmetic.right_answer, **roles) -> PPOTrainer:
    config = {"max_steps": 4, "per_device_train_batch_size": 8, "max_completion_length": 12}
    rows = load_dataset("json", data_files=str(arithmetic.FOLDER / "train.jsonl"), split="train[:16]")
    given = {"model": model, "processing_class": None, "peft_config": None, "reward_funcs": reward_funcs, **roles}
    return small_trainer(tmp_path, config, train_dataset=rows, **given)


@pytest.mark.slow
@pytest.mark.parametrize(("critic", "bits"), [("adapter", "four"), ("adapter", "eight"), ("shared", "four")])
def test_one_copy_serves_all_and_does_not_change(tmp_path, bits, critic):
    model = quantized(bits)
    size = model.get_memory_footprint()
    trainer = trainer_of(model, tmp_path, critic=critic)
    tensors = frozen_tensors(trainer.model)
    # Actor, reference and critic together hold no frozen byte more than the base alone.
    assert sum(t.untyped_storage().nbytes() for t in tensors) <= size
    before = digest(tensors)
    start = [p.detach().clone() for p in trainer.model.actor_parameters()]
    trainer.train()
    assert digest(tensors) == before
    assert any(not torch.equal(p, q) for p, q in zip(trainer.model.actor_parameters(), start, strict=True))
    # LLM.int8() rounds activations too, with the scale of the batch they are in; NF4 computes in float32.
    assert trainer.state.log_history[0]["policy/first_ratio_deviation"] < {"four": 1e-4, "eight": 0.1}[bits]


def test_a_second_tree_shares_the_scales():
    """Which are kept beside the weights."""
    model = quantized("four")
    copied = shared_copy(model)
    layers = [(a, b) for a, b in zip(model.modules(), copied.modules(), strict=True) if hasattr(a, "quant_state")]
    assert layers
    for one, other in layers:
        assert other is not one
        assert other.weight.quant_state.absmax is one.weight.quant_state.absmax
        assert other.quant_state is one.quant_state


@pytest.mark.slow
@pytest.mark.parametrize("role", ["reward adapter", "ref_model", "critic"])
def test_no_role_has_its_bytes_rewritten(tmp_path, role):
    """By bitsandbytes, on CPUs with AVX512-BF16; those of the actor's base are the reward adapter's as well."""
    if role == "reward adapter":
        base = AutoModelForSequenceClassification.from_pretrained(arithmetic.FOLDER / "base", num_labels=1)
        adapter = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")
        get_peft_model(base, adapter).save_pretrained(tmp_path / "reward")
        AutoTokenizer.from_pretrained(arithmetic.FOLDER / "base").save_pretrained(tmp_path / "reward")
        trainer = trainer_of(quantized("four"), tmp_path / "out", str(tmp_path / "reward"))
    else:
        trainer = trainer_of(quantized("four"), tmp_path / "out", **{role: quantized("four")})
    tensors = frozen_tensors(trainer.model)
    before = digest(tensors)
    trainer.train()
    assert digest(tensors) == before
    first = trainer.state.log_history[0]
    assert first["mismatch/max"] < 1e-3
    assert abs(first["kl"]) < 1e-4


def test_the_saved_adapter_loads_on_the_quantised_base(tmp_path):
    trainer = trainer_of(quantized("four"), tmp_path)
    trainer.train()
    trainer.save_model()
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(**NF4))
    keep_four_bits(loaded)  # so that both compute in float32
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


def test_the_config_as_an_argument(tmp_path):
    """As in GRPOTrainer: for models given by name, and not in model_init_kwargs as well."""
    base, config = str(arithmetic.FOLDER / "base"), BitsAndBytesConfig(**NF4)
    trainer = trainer_of(base, tmp_path, quantization_config=config, ref_model=f"{base}/")
    wanted = digest(frozen_tensors(trainer_of(quantized("four"), tmp_path, ref_model=quantized("four")).model))
    assert digest(frozen_tensors(trainer.model)) == wanted
    assert trainer.model.causal_lm.is_loaded_in_4bit
    assert trainer.model.ref_model.is_loaded_in_4bit
    twice = {"args": PPOConfig(output_dir=str(tmp_path), model_init_kwargs={"quantization_config": config})}
    with pytest.raises(TypeError, match=r"multiple values for keyword argument .quantization_config."):
        PPOTrainer(base, arithmetic.right_answer, **twice, quantization_config=config)
