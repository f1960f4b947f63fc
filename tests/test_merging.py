"""`merge_adapters` changes the time that a run takes, and nothing else."""

import pytest
import torch
from conftest import LORA, tiny_model, untimed_logs
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


@pytest.mark.parametrize("critic", ["adapter", "shared"])
@pytest.mark.parametrize("policy_mode", ["decoupled", "bypass"])
def test_a_merged_run_has_the_numbers_of_one_that_is_not(make_trainer, critic, policy_mode):
    runs = {}
    for merge in (False, True):
        trainer = make_trainer({"merge_adapters": merge, "policy_mode": policy_mode}, critic=critic)
        trainer.train()
        runs[merge] = untimed_logs(trainer)
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
    with trainer._merged.in_use():
        merged = gradients(trainer, rollout, 2)
    assert any(not torch.equal(merged[name], plain[name]) for name in plain), "the sums were not used"
    for name, gradient in merged.items():
        assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)


def sums_in_use(model: torch.nn.Module) -> list[bool]:
    return [layer.merged_weight is not None for layer in fused_layers(model)]


class SumsOfEachStep(PPOCallback):
    """Compares the sums with the weights while they are used, and asks that nobody uses them otherwise."""

    def __init__(self):
        self.compared, self.steps, self.moved = 0, 0, False

    def watch(self, trainer) -> None:
        for name in ("compute_loss", "collector.sampler._sample"):
            *path, last = name.split(".")
            owner = trainer
            for part in path:
                owner = getattr(owner, part)
            setattr(owner, last, self.comparing(trainer.model, getattr(owner, last)))
        self.model = trainer.model

    def comparing(self, model, function):
        def watched(*args, **kwargs):
            layers = fused_layers(model)
            for layer, expected in zip(layers, own_sums(model), strict=True):
                assert_close(layer.merged_weight, expected, rtol=1e-6, atol=1e-6)
                self.moved = self.moved or not torch.equal(layer.merged_weight, layer.base_layer.weight)
            self.compared += 1
            return function(*args, **kwargs)

        return watched

    def before_step(self, *_):
        self.steps += 1
        assert not any(sums_in_use(self.model))

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        assert not any(sums_in_use(self.model))
        if state.global_step == 0:
            optimizer.optimizer.register_step_pre_hook(self.before_step)

    def on_rollout_end(self, args, state, control, **kwargs):
        assert not any(sums_in_use(self.model))


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_the_sums_are_those_of_the_present_weights_and_gone_before_a_step(make_trainer, critic):
    watching = SumsOfEachStep()
    trainer = make_trainer({"merge_adapters": True}, critic=critic, callbacks=[watching])
    watching.watch(trainer)
    trainer.train()
    assert (watching.compared, watching.steps) == (8 + 2, 8)
    assert watching.moved
    assert len(fused_layers(trainer.model)) == {"adapter": 28, "shared": 14}[critic]


def test_a_callback_may_change_the_weights_before_a_step(make_trainer):
    class Halving(PPOCallback):
        def on_rollout_end(self, args, state, control, **kwargs):
            self.halve()

        def on_step_begin(self, args, state, control, **kwargs):
            self.halve()

        def halve(self):
            for layer in fused_layers(self.model):
                layer.lora_B[layer.fused_adapter].weight.data.mul_(0.5)

    runs = []
    for merge in (False, True):
        callback = Halving()
        trainer = make_trainer({"merge_adapters": merge}, callbacks=[callback])
        callback.model = trainer.model
        trainer.train()
        runs.append(untimed_logs(trainer))
    assert runs[0][4]["policy/first_ratio_deviation"] > 1e-3
    for merged, plain in zip(*runs, strict=True):
        assert merged == pytest.approx(plain, rel=1e-3, abs=1e-5)


def test_a_run_that_breaks_off_leaves_no_sums_behind(make_trainer):
    def breaks_off(completions, **kwargs):
        raise RuntimeError("no more")

    trainer = make_trainer({"merge_adapters": True}, reward_funcs=breaks_off)
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert not any(sums_in_use(trainer.model))
    with pytest.raises(RuntimeError, match="no more"), trainer._merged.in_use():
        breaks_off([])
    assert not any(sums_in_use(trainer.model))


def test_the_best_weights_of_a_run_that_stopped_within_a_step_are_used_as_they_are(make_trainer, dataset):
    class Stops(PPOCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            assert all(sums_in_use(model))
            control.should_training_stop = state.global_step == 2

        def on_train_end(self, args, state, control, model=None, **kwargs):
            self.at_end = sums_in_use(model)

    config = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
    config |= {"eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    stops = Stops()
    trainer = make_trainer({"merge_adapters": True, **config}, eval_dataset=dataset, callbacks=[stops])
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(stops.at_end) == 28
    assert not any(stops.at_end)


def test_the_sums_are_in_no_state_dict_and_gone_after_training(make_trainer):
    trainer = make_trainer({"merge_adapters": True, "max_steps": 1})
    before = list(trainer.model.state_dict())
    with trainer._merged.in_use():
        assert all(sums_in_use(trainer.model))
        assert list(trainer.model.state_dict()) == before
        sums = {layer.merged_weight.data_ptr() for layer in fused_layers(trainer.model)}
        assert sums.isdisjoint(buffer.data_ptr() for buffer in trainer.model.buffers())
    trainer.train()
    assert trainer._merged._sums == []


def test_the_sums_stay_in_their_place(make_trainer):
    """What is compiled holds on to them."""
    merged = MergedWeights(layers := fused_layers(make_trainer().model))
    merged.refresh()
    places = [layer.merged_weight.data_ptr() for layer in layers]
    merged.release()
    with torch.no_grad():
        layers[0].lora_B[layers[0].fused_adapter].weight.fill_(1.0)
    merged.refresh()
    assert [layer.merged_weight.data_ptr() for layer in layers] == places
    assert not torch.equal(layers[0].merged_weight, layers[0].base_layer.weight)


def test_a_frozen_copy_of_the_start_adapter_is_not_merged(make_trainer, tmp_path):
    """It is the reference, and its sums would be one more copy of the base's weights for a single pass."""
    make_trainer().model.save_pretrained(str(tmp_path / "start"))
    start = PeftModel.from_pretrained(tiny_model(), tmp_path / "start", is_trainable=True)
    trainer = make_trainer({"merge_adapters": True}, model=start, peft_config=None, critic="shared")
    trainer._merged.refresh()
    assert all(layer.merged_weight is None for layer in fused_layers(trainer.model.ref_model))
    assert any(layer.merged_weight is not None for layer in fused_layers(trainer.model))


@pytest.mark.parametrize(
    ("config", "peft_config", "dtype", "message"),
    [
        ({"bf16": True}, LORA, torch.float32, "mixed precision, bf16 here, rounds the sums; turn one of them off"),
        ({}, LoraConfig(use_dora=True, target_modules="all-linear"), torch.float32, "finds no layer of the actor"),
        ({}, LORA, torch.bfloat16, "finds no layer of the actor to merge: .* in float32; set merge_adapters=False"),
    ],
    ids=["autocast", "DoRA", "bfloat16"],
)
def test_what_would_not_compute_with_the_sums_is_refused(make_trainer, config, peft_config, dtype, message):
    with pytest.raises(ValueError, match=message):
        make_trainer({"merge_adapters": True, **config}, model=tiny_model().to(dtype), peft_config=peft_config)
    make_trainer(config, model=tiny_model().to(dtype), peft_config=peft_config)


def test_a_critic_with_layers_to_merge_does_not_make_up_for_an_actor_without(make_trainer):
    model, critic = tiny_model().to(torch.bfloat16), tiny_model(seed=2)
    with pytest.raises(ValueError, match="finds no layer of the actor to merge"):
        make_trainer({"merge_adapters": True}, model=model, critic=critic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_half_precision_is_not_summed_though_the_adapter_has_it_too(make_trainer, dtype):
    layer = fused_layers(make_trainer().model)[0].to(dtype)
    assert can_merge(layer) == (dtype in (torch.float32, torch.float64))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_that_round_are_refused(make_trainer, precision):
    torch.set_float32_matmul_precision(precision)
    try:
        with pytest.raises(ValueError, match=r"those of this process round to .*; set tf32=False, or"):
            make_trainer({"merge_adapters": True})
        make_trainer()
    finally:
        torch.set_float32_matmul_precision("highest")
    make_trainer({"merge_adapters": True})
