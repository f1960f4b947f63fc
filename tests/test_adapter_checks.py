"""Adapters that write into the base or draw noise are refused; all others of PEFT are let through."""

import copy

import pytest
import torch
from peft import (
    IA3Config,
    LNTuningConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PveraConfig,
    VeraConfig,
    get_peft_model,
)
from peft.tuners.lora.config import KasaConfig, MontecloraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.runs import digest
from helpers.tiny import LORA, tiny_model
from hfppo.models.actor_critic import ActorCritic

TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
WRITES = {
    "KaSA": LoraConfig(kasa_config=KasaConfig(), **TARGETS),
    "PiSSA": LoraConfig(init_lora_weights="pissa", **TARGETS),
    "OLoRA": LoraConfig(init_lora_weights="olora", **TARGETS),
}
NOISY = [LoraConfig(monteclora_config=MontecloraConfig(), **TARGETS), PveraConfig(**TARGETS)]
QUIET = {
    "LoRA": LORA,
    "dropout": LoraConfig(lora_dropout=0.5, **TARGETS),
    "DoRA": LoraConfig(use_dora=True, **TARGETS),
    "embeddings": LoraConfig(target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM"),
    "parameters": LoraConfig(target_modules=[], target_parameters=["q_proj.weight"], task_type="CAUSAL_LM"),
    "LoKr with dropouts": LoKrConfig(rank_dropout=0.5, module_dropout=0.5, **TARGETS),
    "OFT with dropout": OFTConfig(module_dropout=0.5, oft_block_size=8, **TARGETS),
    "IA3": IA3Config(feedforward_modules=["down_proj"], **TARGETS),
    "VeRA": VeraConfig(**TARGETS),
    "norms": LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", WRITES)
def test_an_adapter_that_writes_into_the_base(kind):
    with pytest.raises(ValueError, match=r"peft_config changes the base .* use init_lora_weights=True"):
        ActorCritic(tiny_model().bfloat16(), copy.deepcopy(WRITES[kind]))


@pytest.mark.parametrize("targets", [["q_prj"], "q_proj"], ids=["a typo", "a text"])
def test_an_adapter_that_fits_no_layer(targets):
    layers = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ValueError, match=f"^peft_config: Target modules .* linear layers are {layers}; give a list"):
        ActorCritic(tiny_model(), LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))


def test_a_trained_adapter_that_wrote_into_its_base(make_trainer, tmp_path, base_path):
    """Loading it writes again, so its disabled state is no base of anybody."""
    base = AutoModelForCausalLM.from_pretrained(base_path)
    get_peft_model(base, copy.deepcopy(WRITES["KaSA"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="peft_config changes the base"):
        make_trainer(model=str(tmp_path / "adapter"), peft_config=None)


def test_a_reward_adapter_that_writes_into_the_actors_base(make_trainer, tmp_path, base_path, tokenizer):
    config = LoraConfig(kasa_config=KasaConfig(), target_modules=["q_proj"], task_type="SEQ_CLS")
    classifier = AutoModelForSequenceClassification.from_pretrained(base_path, num_labels=1)
    get_peft_model(classifier, config).save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    with pytest.raises(ValueError, match=r"the reward adapter '.*reward' changes the base"):
        make_trainer(model=base_path, reward_funcs=str(tmp_path / "reward"))


@pytest.mark.parametrize("config", NOISY, ids=["MonteCLoRA", "PVeRA"])
def test_an_adapter_that_draws_noise(config):
    with pytest.raises(ValueError, match="draws noise, so two passes over one token disagree"):
        ActorCritic(tiny_model(), config)


@pytest.mark.parametrize("kind", QUIET)
def test_other_adapters_train_and_leave_the_base_as_it_is(make_trainer, kind):
    model = tiny_model()
    tensors = list(model.parameters())
    before = digest(tensors)
    trainer = make_trainer({"max_steps": 2}, model=model, peft_config=copy.deepcopy(QUIET[kind]))
    start = [p.detach().clone() for p in trainer.model.actor_parameters()]
    random = torch.get_rng_state()
    trainer._prepare_model()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, start, trainer.model.actor_parameters()))
    trainer.train()
    assert digest(tensors) == before
    assert not all(map(torch.equal, start, trainer.model.actor_parameters()))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        first, second = (trainer.model.train()(input_ids=ids).logits for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "fields", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["embed_tokens", "q_proj"]}], ids=str
)
def test_tied_weights_that_are_trained(make_trainer, fields, tied):
    config = LoraConfig(**{**TARGETS, **fields}, ensure_weight_tying=True)
    trainer = make_trainer({"max_steps": 2}, model=tiny_model(tie_word_embeddings=tied), peft_config=config)
    trainer.train()
    trainer.save_model()
    plain = PeftModel.from_pretrained(tiny_model(tie_word_embeddings=tied), trainer.args.output_dir)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(plain.eval()(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)
