"""`merge_adapters` changes the time that a run takes, and nothing else."""

import pytest
import torch
from conftest import LORA, tiny_model
from peft import LoraConfig, PeftModel
from test_invariants import gradients
from torch.testing import assert_close

from hfppo import PPOCallback
from hfppo.models.lora import FusedLoraLinear
from hfppo.models.merging import MergedWeights, can_merge, operands


def fused_layers(model: torch.nn.Module) -> list[FusedLoraLinear]:
    return [module for module in model.modules() if isinstance(module, FusedLoraLinear)]


def own_sums(model: torch.nn.Module) -> list[torch.Tensor]:
    """W + s B A of each layer, from its present weights."""
    return [(w + s * b @ a).detach() for w, a, b, s in map(operands, fused_layers(model))]


def logged(trainer) -> list[dict[str, float]]:
    return [
        {name: x for name, x in log.items() if not name.startswith(("time/", "train_"))}
        for log in trainer.state.log_history
    ]


@pytest.mark.parametrize("critic", ["adapter", "shared"])
@pytest.mark.parametrize("policy_mode", ["decoupled", "bypass"])
def test_a_merged_run_has_the_numbers_of_one_that_is_not(make_trainer, critic, policy_mode):
    runs = {}
    for merge in (False, True):
        trainer = make_trainer({"merge_adapters": merge, "policy_mode": policy_mode}, critic=critic)
        trainer.train()
        runs[merge] = logged(trainer)
        assert runs[merge][0]["policy/first_ratio_deviation"] < 1e-5
        assert runs[merge][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert len(runs[True]) == len(runs[False]) == 9
    for merged, plain in zip(runs[True], runs[False], strict=True):
        assert merged == pytest.approx(plain, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_merging_changes_no_gradient(make_trainer, dataset, critic):
    trainer = make_trainer({"merge_adapters": True}, model=tiny_model(seed=1), critic=critic)
    trainer.train()
    rollout = trainer.rollout(dataset["prompt"][:8])
    plain = gradients(trainer, rollout, 2)
    assert max(g.abs().max() for g in plain.values()) > 1e-3
    trainer._merged.refresh()
    merged = gradients(trainer, rollout, 2)
    assert any(not torch.equal(merged[name], plain[name]) for name in plain), "the sums were not used"
    for name, gradient in merged.items():
        assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)


class SumsOfEachStep(PPOCallback):
    """Compares the sums with the weights while they are used, and asks that nobody uses them afterwards."""

    def __init__(self):
        self.model, self.compared, self.moved = None, 0, False

    def watch(self, trainer) -> None:
        compute_loss = trainer.compute_loss

        def watched(model, *args, **kwargs):
            layers = fused_layers(self.model)
            for layer, expected in zip(layers, own_sums(self.model), strict=True):
                assert_close(layer.merged_weight, expected, rtol=1e-6, atol=1e-6)
                self.moved = self.moved or not torch.equal(layer.merged_weight, layer.base_layer.weight)
            self.compared += 1
            return compute_loss(model, *args, **kwargs)

        self.model, trainer.compute_loss = trainer.model, watched

    def on_optimizer_step(self, args, state, control, **kwargs):
        assert all(layer.merged_weight is None for layer in fused_layers(self.model))


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_the_sums_are_those_of_the_present_weights_at_each_step(make_trainer, critic):
    watching = SumsOfEachStep()
    trainer = make_trainer({"merge_adapters": True}, critic=critic, callbacks=[watching])
    watching.watch(trainer)
    trainer.train()
    assert watching.compared == 8
    assert watching.moved
    assert len(fused_layers(trainer.model)) == {"adapter": 28, "shared": 14}[critic]


def test_a_run_that_breaks_off_leaves_no_sums_behind(make_trainer):
    def breaks_off(completions, **kwargs):
        raise RuntimeError("no more")

    trainer = make_trainer({"merge_adapters": True}, reward_funcs=breaks_off)
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert all(layer.merged_weight is None for layer in fused_layers(trainer.model))


def test_the_sums_stay_in_their_place(make_trainer):
    """What is compiled holds on to them."""
    merged = MergedWeights(layers := fused_layers(make_trainer().model))
    merged.refresh()
    places = [layer.merged_weight.data_ptr() for layer in layers]
    merged.release()
    with torch.no_grad():
        layers[0].lora_B["default"].weight.fill_(1.0)
    merged.refresh()
    assert [layer.merged_weight.data_ptr() for layer in layers] == places
    assert not torch.equal(layers[0].merged_weight, layers[0].base_layer.weight)


def test_a_frozen_copy_of_the_start_adapter_is_not_merged(make_trainer, tmp_path):
    """It is the reference, whose passes alone would gain."""
    make_trainer().model.save_pretrained(str(tmp_path / "start"))
    start = PeftModel.from_pretrained(tiny_model(), tmp_path / "start", is_trainable=True)
    trainer = make_trainer({"merge_adapters": True}, model=start, peft_config=None, critic="shared")
    trainer._merged.refresh()
    assert all(layer.merged_weight is None for layer in fused_layers(trainer.model.ref_model))
    assert any(layer.merged_weight is not None for layer in fused_layers(trainer.model))


@pytest.mark.parametrize(
    ("config", "peft_config", "dtype", "message"),
    [
        ({"bf16": True}, LORA, torch.float32, "sums weights in float32, and bf16 computes in half precision; set one"),
        ({}, LoraConfig(use_dora=True, target_modules="all-linear"), torch.float32, "finds no layer to merge"),
        ({}, LORA, torch.bfloat16, "finds no layer to merge: it takes LoRA .* in float32; set merge_adapters=False"),
    ],
    ids=["autocast", "DoRA", "bfloat16"],
)
def test_what_would_not_compute_with_the_sums_is_refused(make_trainer, config, peft_config, dtype, message):
    with pytest.raises(ValueError, match=message):
        make_trainer({"merge_adapters": True, **config}, model=tiny_model().to(dtype), peft_config=peft_config)
    make_trainer(config, model=tiny_model().to(dtype), peft_config=peft_config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_half_precision_is_not_summed_though_the_adapter_has_it_too(make_trainer, dtype):
    layer = fused_layers(make_trainer().model)[0].to(dtype)
    assert can_merge(layer) == (dtype in (torch.float32, torch.float64))
