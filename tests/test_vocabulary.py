"""Tokens that are added to a base: every way back in from a saved folder gives the logits that were saved."""

import copy
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.runs import assert_same_tensors, critic_state, digest, small_trainer
from helpers.tiny import scorer, tiny_model
from hfppo import PPOTrainer, TokenTable
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.loading import load_model
from hfppo.rewards.model import RewardModel

ADDED = ["<think>", "</think>"]  # ids 25 and 26
PROMPT = "请问1+2=<think>"
IDS = torch.tensor([[5, 25, 6, 26, 7]])
CAUSAL = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "plain": {},
    "trainable tokens": {"trainable_token_indices": [25, 26]},
    "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


def adding_tokenizer():
    made = character_tokenizer()
    assert len(made) == 25
    made.add_tokens(ADDED)
    return made


def resized(base: str, size: int, seed: int = 1):
    """The base with rows of its own for the added tokens: random, and far from the mean of the others."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(size)
    torch.manual_seed(seed)
    for layer in (model.get_output_embeddings(), model.get_input_embeddings()):
        torch.nn.init.normal_(layer.weight.data[25:], std=0.5)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


class Run:
    """A short run of a resized base, saved, with the logits and the token table of its end."""

    def __init__(self, folder: Path, size: int, tied: bool, adapter: dict):
        self.base, self.size, self.folder = str(folder / "base"), size, str(folder / "out")
        tiny_model(vocab_size=25, tie_word_embeddings=tied).save_pretrained(self.base)
        self.adapter = adapter
        self.trainer = self.make(resized(self.base, size), peft_config=self.config)
        self.trainer.train()
        self.trainer.save_model()
        self.wanted, self.reference = logits(self.trainer.model), logits(resized(self.base, size))
        rollout = self.trainer.rollout([PROMPT])
        self.table = TokenTable.from_rollout(rollout, 0, self.trainer.processing_class, "k1")

    @property
    def config(self) -> LoraConfig:
        return LoraConfig(**CAUSAL, **copy.deepcopy(self.adapter))

    def make(self, model, fields: dict | None = None, **kwargs) -> PPOTrainer:
        config = {"save_strategy": "steps", "save_steps": 2, "num_ppo_epochs": 1, "max_steps": 4, **(fields or {})}
        given = {"train_dataset": Dataset.from_list([{"prompt": PROMPT}, {"prompt": "2+2="}]), "peft_config": None}
        return small_trainer(self.folder, config, model=model, processing_class=adding_tokenizer(), **given | kwargs)


@pytest.fixture(scope="module", params=[("plain", False), ("trainable tokens", True), ("modules_to_save", False)])
def run(request, tmp_path_factory) -> Run:
    """Its embeddings are padded beyond the tokenizer's 27 tokens."""
    name, tied = request.param
    return Run(tmp_path_factory.mktemp("run"), 32, tied, ADAPTERS[name])


def assert_is_the_run(run: Run, model) -> None:
    assert torch.equal(logits(model), run.wanted)
    with model.disable_adapter():
        assert torch.equal(logits(model), run.reference)


def test_the_folder_as_model(run, tmp_path):
    assert (run.wanted - run.reference).abs().max() > 0.01
    assert run.wanted.shape[-1] == 32
    again = run.make(run.folder, {"output_dir": str(tmp_path)})
    assert_is_the_run(run, again.model)
    with again.model.reference():
        assert torch.equal(logits(again.model), run.wanted)
    again.save_model()
    shutil.rmtree(tmp_path / "critic")
    assert_is_the_run(run, run.make(str(tmp_path), {"output_dir": str(tmp_path / "third")}).model)


def test_the_folder_as_reference(run, tmp_path):
    trainer = run.make(
        resized(run.base, run.size), {"output_dir": str(tmp_path)}, peft_config=run.config, ref_model=run.folder
    )
    assert torch.equal(logits(trainer.model.ref_model), run.wanted)
    assert torch.equal(logits(trainer.model), run.reference)


def test_the_folder_as_critic(run, tmp_path):
    folder = {"output_dir": str(tmp_path)}
    again = run.make(resized(run.base, run.size), folder, peft_config=run.config, critic=run.folder)
    assert_same_tensors(critic_state(again.model), critic_state(run.trainer.model))


def test_a_resumed_run_whose_new_rows_begin_elsewhere(run, tmp_path):
    shutil.copytree(f"{run.folder}/checkpoint-2", tmp_path / "checkpoint-2")
    base = resized(run.base, run.size, seed=2)
    trainer = run.make(base, {"output_dir": str(tmp_path)}, peft_config=run.config)
    trainer.train(resume_from_checkpoint=True)
    assert_is_the_run(run, trainer.model)
    assert_same_tensors(critic_state(trainer.model), critic_state(run.trainer.model))


def test_rows_of_a_cached_base_are_saved_offline(tmp_path, monkeypatch):
    """PEFT takes such a vocabulary for unchanged, because it may not ask the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--base"
    tiny_model(vocab_size=25).save_pretrained(repository / "snapshots/1")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("1")
    model = ActorCritic(resized("org/base", 27), LoraConfig(**CAUSAL))
    assert model.causal_lm.config.name_or_path == "org/base"
    model.save_pretrained(str(tmp_path / "out"))
    assert load_file(tmp_path / "out/adapter_model.safetensors")["base_model.model.lm_head.weight"].shape == (27, 32)
    assert torch.equal(logits(load_model(str(tmp_path / "out"))), logits(model))


def test_a_reward_adapter_brings_its_own_embeddings(make_trainer, tmp_path):
    """They replace those of its own tree; the actor's base keeps its bytes, also where both know as many tokens."""
    base = str(tmp_path / "base")
    tiny_model(vocab_size=25).save_pretrained(base)
    adding_tokenizer().save_pretrained(tmp_path / "reward")
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    classifier.resize_token_embeddings(27)
    torch.nn.init.normal_(classifier.get_input_embeddings().weight.data[25:], std=2.0)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    get_peft_model(classifier, config).save_pretrained(tmp_path / "reward")
    plain = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "reward", num_labels=1)
    wanted = RewardModel(plain, adding_tokenizer()).score([PROMPT, "1</think>"])
    for actor in (AutoModelForCausalLM.from_pretrained(base), resized(base, 27), resized(base, 32)):
        tensors = list(actor.parameters())
        before = digest(tensors)
        trainer = make_trainer(model=actor, reward_funcs=str(tmp_path / "reward"), critic="shared")
        (reward,) = trainer.collector.rewards.funcs
        assert reward.score([PROMPT, "1</think>"]) == pytest.approx(wanted, rel=1e-5)
        assert digest(tensors) == before


def test_a_separate_critic_whose_embeddings_were_resized(make_trainer, tmp_path):
    scorer(vocab_size=25).save_pretrained(tmp_path / "critic")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", num_labels=1)
    critic.resize_token_embeddings(27)
    given = {"model": tiny_model(vocab_size=27), "processing_class": adding_tokenizer()}
    with pytest.raises(ValueError, match=r"critic has another vocabulary than .*critic'.*; save it with"):
        make_trainer(**given, critic=critic)
    critic.save_pretrained(tmp_path / "critic")
    make_trainer(**given, critic=str(tmp_path / "critic"))


def test_of_a_sharded_base_only_embeddings_of_another_size_are_gathered(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for size, gathered in ((26, set()), (28, {"embed_tokens.weight", "lm_head.weight"})):
            actor = ActorCritic(resized(str(tmp_path), size), LoraConfig(**CAUSAL), critic="shared")
            expected = {name: x.clone() for name, x in actor.state_dict().items()}
            trained = {name for name, p in actor.named_parameters() if p.requires_grad}
            weights = fully_shard(actor).weights_to_save()
            assert {".".join(name.split(".")[-2:]) for name in weights.keys() - trained} == gathered
            assert trained <= weights.keys()
            assert all(torch.equal(x, expected[name]) for name, x in weights.items())
    finally:
        torch.distributed.destroy_process_group()
