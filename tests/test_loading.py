"""Models as users name them: what is loaded, and what is warned of."""

import importlib
import logging
import warnings
from pathlib import Path

import peft.config
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

import hfppo.models
import hfppo.models.critic
from helpers.tiny import lora, scorer, tiny_model, tiny_of_type
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.loading import default_peft_config


@pytest.fixture(autouse=True)
def seen(caplog):
    """The package's log reaches pytest's."""
    caplog.set_level(logging.WARNING, logger="hfppo")
    return caplog


def test_a_critic_by_its_path_is_loaded_with_the_arguments_of_models(seen, make_trainer, tmp_path):
    scorer().save_pretrained(tmp_path / "scorer")
    fields = {"model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager"}, "max_steps": 1}
    trainer = make_trainer(fields, critic=str(tmp_path / "scorer"))
    base = trainer.model.critic.trunk.get_base_model()
    assert (base.dtype, base.config._attn_implementation) == (torch.bfloat16, "eager")
    assert trainer.model.causal_lm.dtype == torch.float32  # it was loaded before
    assert "are not used" not in seen.text
    trainer.train()
    trainer.save_model()
    again = make_trainer(fields, critic=trainer.args.output_dir)  # a saved critic, whose base is the scorer
    assert again.model.critic.trunk.get_base_model().dtype == torch.bfloat16
    assert torch.equal(again.model.critic.value_head.weight, trainer.model.critic.value_head.weight)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Folders that are called like repositories, and what the Hub is asked for."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(*args, **kwargs):
        asked.append(args)
        raise OSError("the Hub was asked")

    monkeypatch.setattr(peft.config, "hf_hub_download", download)
    monkeypatch.setattr(hfppo.models.critic, "hf_hub_download", download)
    return asked


@pytest.mark.parametrize("spell", [lambda name: f"~/{name}", lambda name: Path("~") / name], ids=["~", "Path of ~"])
def test_folders_are_found_by_every_spelling(make_trainer, hub, tokenizer, tmp_path, monkeypatch, spell):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_model().save_pretrained("base")
    for name in ("critic", "reward"):
        scorer().save_pretrained(name)
    tokenizer.save_pretrained("reward")
    tokenizer.save_pretrained("base")
    save = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    given = {"model": spell("base"), "ref_model": spell("base"), "critic": spell("critic")}
    given |= {"reward_funcs": spell("reward"), "processing_class": None}
    trainer = make_trainer(save, **given)
    assert trainer.model.reference_is_base  # the model is its own reference
    trainer.train()
    make_trainer({**save, "max_steps": 2}, **given).train(resume_from_checkpoint=spell("out/checkpoint-1"))
    adapter = spell("out/checkpoint-2")
    again = make_trainer(model=adapter, reward_funcs=[spell("reward")], critic=adapter, peft_config=None)
    assert not again.model.reference_is_base
    with pytest.raises(ValueError, match="output_dir"):
        again.train()


@pytest.mark.parametrize("name", ["{}/base", "../{}/base"])
def test_a_reward_adapter_knows_its_base_by_every_spelling(make_trainer, tokenizer, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("base")
    name = name.format(tmp_path.name if name[0] == "." else tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
    get_peft_model(classifier, LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")).save_pretrained("reward")
    tokenizer.save_pretrained("reward")
    make_trainer(model="base", reward_funcs="reward")
    tiny_model().save_pretrained("other")
    with pytest.raises(ValueError, match="trained on"):
        make_trainer(model="other", reward_funcs="reward")


def test_folders_of_parts_are_not_looked_for_on_the_hub(make_trainer, hub, tokenizer):
    tiny_model().save_pretrained("org/base")
    for name in ("critic", "reward"):
        scorer().save_pretrained(f"org/{name}")
    tokenizer.save_pretrained("org/reward")
    make_trainer(model="org/base", critic="org/critic", reward_funcs="org/reward")
    with pytest.raises(ValueError, match=r"tokenizer of model='org/base' cannot be loaded; .* in processing_class: "):
        make_trainer(model="org/base", processing_class=None)
    assert hub == []


@pytest.mark.parametrize(("model", "revision"), [("org/base", None), ("org/absent", "v2")])
def test_a_critic_is_looked_for_on_the_hub_at_the_models_revision_if_it_has_its_id(
    make_trainer, monkeypatch, model, revision
):
    asked = []

    def download(name, file, **options):
        asked.append((name, file, options.get("revision"), options["cache_dir"]))
        raise OSError("no such repository")

    monkeypatch.setattr(hfppo.models.critic, "hf_hub_download", download)
    monkeypatch.setattr(hfppo.parts, "load_model", lambda name, **options: tiny_model())
    fields = {"model_init_kwargs": {"cache_dir": "kept", "revision": "v2", "dtype": "bfloat16"}}
    with pytest.raises(ValueError, match=r"critic='org/absent' is not 'adapter', .* a folder"):
        make_trainer(fields, model=model, critic="org/absent")
    assert asked == [("org/absent", "critic/critic_config.json", revision, "kept")]


def test_a_critic_whose_vocabulary_is_padded_less_than_the_actors_reads_the_completions(make_trainer):
    """As Qwen2.5's 7B (152,064) and 1.5B (151,936) with one tokenizer of 151,665; the actor may sample padding."""
    trainer = make_trainer({"max_steps": 1}, model=tiny_model(vocab_size=60), critic=scorer(vocab_size=30))
    rollout = trainer.rollout(["1+2="] * 8)
    assert (rollout.completion_ids >= 30).any()
    assert rollout.values.isfinite().all()


@pytest.mark.parametrize("kind", ["a base", "an adapter"])
def test_the_model_as_its_own_reference_is_the_model_before_training(make_trainer, kind):
    def rollout(**given):
        model = tiny_model()
        if kind == "an adapter":
            torch.manual_seed(1)
            model, given = get_peft_model(model, lora(init_lora_weights=False)), {"peft_config": None, **given}
        if "ref_model" in given:
            given["ref_model"] = model
        trainer = make_trainer({"learning_rate": 0.1}, model=model, **given)
        trainer.train()
        return trainer.rollout(["1+1="])

    own, left_out = rollout(ref_model=None), rollout()
    assert own.ref_logprobs.ne(own.old_logprobs).any()
    assert torch.equal(own.ref_logprobs, left_out.ref_logprobs)


def test_a_critic_needs_the_tokenizers_ids_and_a_reference_all_of_the_actors(make_trainer, tokenizer):
    needed = max(tokenizer.get_vocab().values()) + 1
    make_trainer(critic=scorer(vocab_size=needed))
    with pytest.raises(ValueError, match=f"critic has a vocabulary of {needed - 1} tokens, but .* need {needed}"):
        make_trainer(critic=scorer(vocab_size=needed - 1))
    with pytest.raises(ValueError, match="ref_model has a vocabulary of 26 tokens, but the completions need 30"):
        make_trainer(model=tiny_model(vocab_size=30), ref_model=tiny_model(vocab_size=26))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("mamba", {"in_proj"}),
        ("nemotron_h", {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"}),
        ("falcon_h1", {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (  # no router; two fused weights of the experts, one adapter around the other
            "llama4_text",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts", "base_layer"},
        ),
        ("falcon", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),  # linear layers of its own class
    ],
)
def test_the_default_adapter_is_on_every_layer_that_an_adapter_can_act_on(name, targets):
    model = ActorCritic(tiny_of_type(name), default_peft_config())
    for adapter in ("default", "critic"):
        ends = [f".lora_{part}.{adapter}.weight" for part in "AB"]
        names = [name.removesuffix(end) for end in ends for name, _ in model.named_parameters() if name.endswith(end)]
        assert {name.rpartition(".")[2] for name in names} == targets


def test_own_exclusions_are_kept_beside_those_of_the_architecture():
    config = LoraConfig(target_modules="all-linear", exclude_modules=["o_proj"], task_type="CAUSAL_LM")
    model = ActorCritic(tiny_of_type("nemotron_h"), config)
    targets = {name.rpartition(".")[2] for name in model.base_model.targeted_module_names}
    assert targets == {"in_proj", "q_proj", "k_proj", "v_proj"}
    assert config.exclude_modules == {"o_proj"}


def test_the_warning_that_every_wrapped_model_would_give_is_not_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        importlib.reload(hfppo.models)  # pytest has replaced the filters of its first import
        get_peft_model(tiny_model(), lora())
    assert [str(each.message) for each in shown if each.category is FutureWarning] == []
