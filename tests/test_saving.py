"""What lies in the output folder, and what it can be loaded with."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close

from helpers.runs import assert_same_end, assert_same_tensors, critic_state, trained_state
from helpers.tiny import LORA, lora, scorer, tiny_model
from hfppo import ActorCritic
from hfppo.models.adapter_config import describe_adapter, find_differences
from hfppo.models.critic import ValueHead

PROMPT = torch.tensor([[14, 15, 2, 12, 5, 13]])


@pytest.fixture
def trained(make_trainer, base_path, tmp_path):
    trainer = make_trainer(model=base_path, processing_class=None)
    trainer.train()
    trainer.save_model()
    trainer.model.eval()
    return trainer


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=PROMPT).logits


@torch.no_grad()
def assert_is_the_reference(model, rollout) -> None:
    """A rollout of one completion has the model's log-probs as the reference's."""
    completion = rollout.completion_ids[rollout.mask]
    ids = torch.cat([rollout.prompt_ids[0], completion])[None]
    expected = model(input_ids=ids).logits[0].log_softmax(-1)[-len(completion) - 1 : -1]
    assert_close(rollout.ref_logprobs[0], expected.gather(1, completion[:, None]).squeeze(1))


def test_output_folder_is_a_plain_adapter_with_the_trained_logits(trained, tmp_path, base_path):
    out = tmp_path / "out"
    plain = AutoPeftModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(logits(plain), logits(trained.model))
    assert not torch.allclose(logits(plain), logits(tiny_model().eval()), atol=1e-3), "nothing was trained"
    get_peft_model(tiny_model(), copy.deepcopy(LORA)).save_pretrained(tmp_path / "plain")
    names = load_file(out / "adapter_model.safetensors").keys()
    assert names == load_file(tmp_path / "plain/adapter_model.safetensors").keys()
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base_path
    assert {p.name for p in (out / "critic").iterdir()} == {"critic.safetensors", "critic_config.json"}


def test_training_goes_on_from_a_saved_adapter_with_it_as_reference(trained, make_trainer, tmp_path):
    """As path and as loaded model; the reference is the adapter at the start, not the bare base."""
    out = str(tmp_path / "out")
    loaded = PeftModel.from_pretrained(tiny_model(), out, is_trainable=True)
    for model in (out, loaded):
        trainer = make_trainer(
            {"output_dir": str(tmp_path / "further")},
            model=model,
            peft_config=None,
            critic=out,
            processing_class=None if model is out else trained.processing_class,
        )
        trainer.model.eval()
        assert_close(logits(trainer.model), logits(trained.model))
        assert_same_tensors(critic_state(trainer.model), critic_state(trained.model))
        trainer.train()
        kl = [entry["kl_k3"] for entry in trainer.state.log_history if "kl_k3" in entry]
        assert kl[0] == 0.0
        assert kl[1] > 1e-5
        trainer.model.eval()
        assert_is_the_reference(trained.model, trainer.rollout(["1+2="]))
        assert set(load_file(Path(out) / "adapter_model.safetensors")) == set(saved_adapter(trainer, tmp_path))


def saved_adapter(trainer, tmp_path) -> dict[str, torch.Tensor]:
    trainer.save_model(str(tmp_path / "again"))
    assert not (tmp_path / "again" / "reference").exists()
    return load_file(tmp_path / "again" / "adapter_model.safetensors")


def test_a_separate_reference_model(make_trainer):
    reference = tiny_model(seed=7)
    trainer = make_trainer(ref_model=reference)
    assert_is_the_reference(reference, trainer.rollout(["1+2="]))
    trainer.train()
    assert all(not p.requires_grad for p in reference.parameters())


def test_a_reward_model_as_critic_starts_from_its_score(make_trainer, tmp_path):
    reward_model = scorer()
    head = reward_model.score.weight.detach().clone()
    trainer = make_trainer({"max_steps": 4}, critic=reward_model)
    assert torch.equal(trainer.model.critic.value_head.weight, head)
    trainer.train()
    assert not torch.equal(trainer.model.critic.value_head.weight, head)
    reward_model.save_pretrained(tmp_path / "scorer")
    by_path = make_trainer(critic=str(tmp_path / "scorer"))
    assert torch.equal(by_path.model.critic.value_head.weight, head)
    by_path.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved/critic/critic_config.json").read_text())["base"] == str(tmp_path / "scorer")


@pytest.mark.parametrize("detach", [True, False])
def test_detached_shared_critic_leaves_the_actor_to_the_policy_loss(make_trainer, detach):
    """With no policy gradient at all (advantages whitened to 0 by constant rewards, β 0), only the values pull."""
    trainer = make_trainer({"kl_coef": 0.0}, critic="shared_detached" if detach else "shared")
    rollout = trainer.rollout(["1+2=", "3="])
    with torch.no_grad():
        trainer.model.critic.value_head.weight.fill_(1.0)  # zero at the start, which would hide the path to the actor
    trainer.model(**rollout.joined(), completion_mask=rollout.mask).values.square().sum().backward()
    reached = any(p.grad is not None and p.grad.abs().sum() > 0 for p in trainer.model.actor_parameters())
    assert reached is not detach
    assert trainer.model.critic.value_head.weight.grad.abs().sum() > 0


def test_a_saved_critic_stays_detached(make_trainer, tmp_path):
    make_trainer(critic="shared_detached").save_model(str(tmp_path / "saved"))
    assert make_trainer(critic=str(tmp_path / "saved")).model.critic.kind == "shared_detached"


def test_critic_free_runs_have_no_critic_at_all(make_trainer, tmp_path):
    trainer = make_trainer({"advantage_estimator": "rloo", "num_generations": 2})
    assert trainer.model.critic is None
    trainer.train()
    trainer.save_model()
    assert not (tmp_path / "out/critic").exists()
    assert not any(name.startswith("value/") for entry in trainer.state.log_history for name in entry)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": "all-linear", "exclude_modules": ["model.layers.0.self_attn.q_proj", "down_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r"model\.layers\.0\..*"},
        {"target_modules": r"model\.layers\.1\..*_proj"},
        {"target_modules": "all-linear", "rank_pattern": {"model.layers.0.self_attn.q_proj": 2, "up_proj": 3}},
    ],
)
@pytest.mark.parametrize("critic", ["adapter", "model"])
def test_the_critics_adapter_is_where_the_actors_is(make_trainer, fields, critic):
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **fields)
    trainer = make_trainer(peft_config=config, critic=scorer() if critic == "model" else critic)
    assert ranks(trainer.model, "critic") == ranks(trainer.model, "default") != {}


def ranks(model: torch.nn.Module, adapter: str) -> dict[str, int]:
    """Where an adapter stands, and of which rank."""
    end = f".lora_A.{adapter}.weight"
    weights = {name.rpartition("layers.")[2]: x for name, x in model.named_parameters() if name.endswith(end)}
    return {name.removesuffix(end): len(x) for name, x in weights.items()}


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_entries_that_are_gone_differ_as_well(name):
    before, now = (describe_adapter(LoraConfig(r=4, **fields)) for fields in ({name: {"q_proj": 2}}, {}))
    assert find_differences(before, now) == ({name: {"q_proj": 2}}, {name: {"q_proj": None}})
    assert find_differences(now, before) == ({name: {"q_proj": None}}, {name: {"q_proj": 2}})
    assert find_differences({**now, "exclude_modules": None}, now) == ({}, {})


@pytest.mark.parametrize("goes_on", [False, True])
def test_trained_tokens_are_saved_and_go_on(make_trainer, tmp_path, goes_on):
    """Their weights lie in wrappers that the critic, and a frozen reference, have as well."""
    config = lora(trainable_token_indices=[3, 4])
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def trainer(output_dir: str):
        model = {"model": get_peft_model(tiny_model(), config), "peft_config": None}
        settings = steps | {"output_dir": str(tmp_path / output_dir)}
        return make_trainer(settings, **(model if goes_on else {"peft_config": config}))

    straight, resumed = trainer("straight"), trainer("resumed")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-2"))
    assert any("trainable_tokens_delta" in name for name in trained_state(straight.model))
    assert_same_end(resumed, straight)
    straight.save_model(str(tmp_path / "saved"))
    loaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "saved"))
    assert_close(logits(loaded), logits(straight.model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["embed_tokens", "norm", "mlp"])
def test_modules_that_are_saved_whole_go_on_beside_the_base(make_trainer, tmp_path, base_path, module):
    """The base keeps its own, which the critic reads through."""
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=[module])
    trained = make_trainer({"max_steps": 2}, model=base_path, peft_config=config)
    trained.train()
    trained.save_model()
    out = str(tmp_path / "out")
    further = make_trainer({"output_dir": str(tmp_path / "further")}, model=out, critic=out, peft_config=None)
    first, second = (trainer.rollout(["1+2="]) for trainer in (trained, further))
    assert torch.equal(first.old_logprobs, second.old_logprobs)
    assert torch.equal(first.values, second.values)
    assert not torch.equal(first.old_logprobs, first.ref_logprobs)


@pytest.mark.parametrize("layers", [3, 5])
def test_a_critic_of_another_depth_is_refused(tmp_path, layers):
    """With so many layers PEFT writes the adapter's targets without their numbers, and the configurations agree."""
    ActorCritic(tiny_model(num_hidden_layers=4), lora()).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"contains a critic of other layers: .* differ in trunk.*layers"):
        ActorCritic(tiny_model(num_hidden_layers=layers), LORA, critic=str(tmp_path / "saved"))


def test_a_language_model_as_critic_starts_from_zero(make_trainer, tmp_path):
    tiny_model(seed=2).save_pretrained(tmp_path / "model")
    assert not make_trainer(critic=str(tmp_path / "model")).model.critic.value_head.weight.any()


def test_values_are_float32_under_autocast():
    head = ValueHead(4)
    torch.nn.init.constant_(head.weight, 1.001)
    with torch.autocast("cpu", torch.bfloat16):
        values = head(torch.ones(2, 4))
    assert values.tolist() == pytest.approx([4.004] * 2)
    assert values.dtype == torch.float32
