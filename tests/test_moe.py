"""Mixtures of experts: LoRA on fused experts, in actor, critic and reference, saved, merged and loaded."""

import warnings

import pytest
import torch
from peft import LoHaConfig, PeftModel
from torch.testing import assert_close
from transformers import Qwen3MoeForSequenceClassification

from helpers.runs import critic_values, disturb, small_trainer
from helpers.tiny import lora, tiny_experts
from hfppo import ActorCritic
from hfppo.models.actor_critic import Want
from hfppo.models.adapter_switch import CRITIC

KINDS = ("qwen3_moe", "gpt_oss")  # PEFT finds the experts of the first; its "all-linear" leaves out the other's
IDS = torch.arange(12).reshape(2, 6) + 3
SAMPLED = torch.ones(2, 5, dtype=torch.bool)


def built(kind: str = "qwen3_moe", critic="adapter", config=None, **more) -> ActorCritic:
    return ActorCritic(tiny_experts(kind, **more), config or lora(lora_dropout=0.1), critic).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["actor", "critic", "another critic"])
def test_every_used_expert_has_a_gradient(kind, of):
    other = Qwen3MoeForSequenceClassification(tiny_experts("qwen3_moe", num_labels=1).config)
    model = built(kind, other if of == "another critic" else "adapter")
    disturb(model)
    name, trunk = ("default", model.causal_lm) if of == "actor" else (CRITIC, model.critic_trunk)
    used: dict[str, set[int]] = {}
    for path, module in trunk.named_modules():
        if type(module).__name__.endswith("Experts"):
            of_layer = used.setdefault(path.replace(".base_layer", ""), set())
            module.register_forward_pre_hook(lambda _, args, x=of_layer: x.update(args[1].flatten().tolist()))
    outputs = model(IDS, torch.ones_like(IDS), SAMPLED, Want(policy=of == "actor", values=of != "actor"))
    (outputs.logprobs if of == "actor" else outputs.values.square()).sum().backward()
    assert len(used) == 2
    found = 0
    for path, parameter in trunk.named_parameters():
        path, _, rest = path.replace(".base_layer", "").partition(".lora_B.")
        if path in used and rest == f"{name}.weight":
            found += 1
            of_experts = parameter.grad.unflatten(1, (-1, 4)).abs().sum((0, 1))  # columns go by rank, then expert
            assert set(of_experts.nonzero().flatten().tolist()) == used[path] != set()
    assert found == 4, "two parameters in each of two layers"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_the_disabled_adapter_is_the_base_to_the_bit(kind, critic):
    model = built(kind, critic)
    disturb(model)
    expected = tiny_experts(kind).eval()(IDS).logits
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, expected)
    assert not torch.allclose(model(input_ids=IDS).logits, expected, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [None, 1])
def test_peft_and_the_next_run_load_it_and_it_can_be_merged(tmp_path, kind, layers):
    tiny_experts(kind).save_pretrained(tmp_path / "base")
    trainer = small_trainer(tmp_path, {"critic_layers": layers}, model=str(tmp_path / "base"))
    disturb(trainer.model)
    out = str(tmp_path / "out")
    trainer.save_model(out)
    model = trainer.model.eval()
    with torch.no_grad():
        expected, values = model(input_ids=IDS).logits, critic_values(model, IDS[:1])
        plain = PeftModel.from_pretrained(tiny_experts(kind), out).eval()
        assert torch.equal(plain(IDS).logits, expected)
        assert_close(plain.merge_and_unload()(IDS).logits, expected, atol=1e-5, rtol=1e-5)
        config = {"critic_layers": layers, "max_steps": 2, "activation_checkpointing": True}
        again = small_trainer(tmp_path, config, model=out, peft_config=None, critic=out)
        with again.model.eval().reference():
            assert torch.equal(again.model.causal_lm(IDS).logits, expected)
        assert torch.equal(critic_values(again.model, IDS[:1]), values)
    again.train()
    assert again.state.log_history[0]["policy/first_ratio_deviation_mean"] == pytest.approx(0, abs=1e-5)


ATTENTION = lora(target_modules=["q_proj", "v_proj"])
LOHA = LoHaConfig(target_modules="all-linear", task_type="CAUSAL_LM")
FUSED = "mlp.experts.down_proj, mlp.experts.gate_up_proj"
DENSE = {"mlp_only_layers": [0]}  # a layer whose modules have the names that PEFT converts to those of experts


@pytest.mark.parametrize(
    ("kind", "config", "changes", "left_out"),
    [
        *((kind, lora(), {}, None) for kind in KINDS),
        *((kind, ATTENTION, {}, FUSED) for kind in KINDS),
        ("gpt_oss", lora(target_modules=["q_proj"], target_parameters=[]), {}, None),
        ("gpt_oss", LOHA, {}, FUSED),
        ("qwen3_moe", lora(), DENSE, "mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight"),
    ],
)
def test_weights_that_an_adapter_leaves_out_are_named(kind, config, changes, left_out):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built(kind, "shared", config, **changes)
    found = [str(x.message) for x in caught if "mixture of experts" in str(x.message)]
    assert [f"but not its {left_out}; name them in target_parameters" in x for x in found] == [True] * bool(left_out)
