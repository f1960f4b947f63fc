"""A critic that adapts the top layers only: exact wherever it starts, and the layers below are computed once."""

import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import TrainerCallback

from helpers.runs import assert_same_end, disturb, logged, trainable, trained_state, untimed_logs
from helpers.tiny import tiny_gpt2, tiny_model, tiny_of_type, tiny_opt, tiny_qwen3
from hfppo import ActorCritic, PPOConfig
from hfppo.models import layout
from hfppo.models.actor_critic import Want
from hfppo.models.critic import CriticSource
from hfppo.models.loading import default_peft_config
from hfppo.models.lower_layers import find_layers

# Four rows, of which three share a prompt; the second column of the last completions is context.
PROMPTS = torch.tensor([[0, 5, 6, 7, 8], [0, 5, 6, 7, 8], [4, 5, 6, 7, 9], [0, 5, 6, 7, 8]])
COMPLETIONS = torch.tensor([[8, 9, 1, 0], [9, 8, 10, 11], [8, 12, 1, 0], [9, 12, 13, 1]])
REAL = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
SAMPLED = REAL & torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 1, 1]]).bool()
ROWS = torch.cat([PROMPTS, COMPLETIONS], dim=1), torch.cat([PROMPTS != 0, REAL], dim=1), SAMPLED
OF_CRITIC = Want(policy=False, base_states=True)


deep = partial(tiny_model, num_hidden_layers=4)
tiny_bloom = partial(tiny_of_type, "bloom", num_hidden_layers=3)  # whose layers return tuples
KINDS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
tiny_gemma3 = partial(tiny_of_type, "gemma3_text", num_hidden_layers=3, head_dim=16, **KINDS)  # scales its embeddings


def actor(base, layers: int | None = 1) -> ActorCritic:
    return disturb(ActorCritic(base, default_peft_config(), CriticSource("adapter", layers=layers)))


def reference_states(model: ActorCritic) -> torch.Tensor:
    with model.reference(), torch.no_grad():
        return model(*ROWS, Want(values=False, base_states=True)).base_states


def count_calls(layers, counts: Callable[[], bool]) -> list[int]:
    """Return the calls of each layer for which `counts`, which go on counting."""
    calls = [0] * len(layers)

    def count(i: int, *_) -> None:
        calls[i] += counts()

    for i, layer in enumerate(layers):
        layer.register_forward_hook(partial(count, i))
    return calls


# Exactness


@pytest.mark.parametrize(
    "architecture",
    [deep, tiny_gpt2, tiny_qwen3, tiny_opt, tiny_bloom, tiny_gemma3],
    ids=["llama", "gpt2", "qwen3", "opt", "bloom", "gemma3"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_are_those_of_the_whole_forward(monkeypatch, architecture, packed):
    if packed:
        monkeypatch.setattr(layout, "PACKING_ATTENTION", "sdpa")
        monkeypatch.setattr(layout, "_tried", {})
    model = actor(architecture()).eval()
    of_reference = reference_states(model)
    with torch.no_grad():
        of_critic = model(*ROWS, OF_CRITIC).base_states
    assert len(of_reference) == int(ROWS[1].sum())
    assert_close(of_critic, of_reference)

    def outputs(base_states):
        model.zero_grad()
        out = model(*ROWS, Want(final_value=True), base_states)
        (out.values * torch.arange(4.0)).sum().add(out.final_value.square().sum()).backward()
        return out.values, out.final_value, *(p.grad.clone() for p in model.critic_parameters())

    for a, b in zip(outputs(of_reference), outputs(None), strict=True):
        assert b.detach().abs().max() > 0
        assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.skipif("activation_checkpointing" not in PPOConfig.__dataclass_fields__, reason="transformers < 5.20")
def test_checkpointing_changes_no_gradient():
    model = actor(deep(), 2)
    states = reference_states(model)

    def gradients():
        model.zero_grad()
        model(*ROWS, base_states=states).values.square().sum().backward()
        return [p.grad.clone() for p in model.critic_parameters()]

    plain = gradients()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    for a, b in zip(gradients(), plain, strict=True):
        assert b.abs().max() > 0
        assert_close(a, b)


def test_whatever_of_peft_switches_adapters_the_same_weights_are_trained():
    """A weight that is frozen between forward and backward would silently get no gradient."""
    model = actor(deep(), None)
    names = set(trained_state(model))
    states = []
    for adapter in ("critic", None, "default"):
        with model.adapters.use(adapter):
            states.append(model(input_ids=ROWS[0]).logits)
            assert set(trained_state(model)) == names
    with model.disable_adapter():
        assert torch.equal(model(input_ids=ROWS[0]).logits, states[1])
    model.set_adapter("default")
    model.base_model.disable_adapter_layers()
    model.enable_adapter_layers()
    assert set(trained_state(model)) == names
    assert torch.equal(model(input_ids=ROWS[0]).logits, states[2])
    assert len({float(x.sum()) for x in states}) == 3


def test_a_run_in_half_precision_starts_from_the_numbers_of_the_base(make_trainer):
    """The trained model's forward returns float32; enough layers that a start in float32 ends elsewhere."""
    trainer = half_precision_trainer(make_trainer)
    rollout = trainer.rollout(["1+2=", "请问3+4="])
    assert rollout.base_states.dtype == torch.bfloat16
    with torch.no_grad():
        started = trainer.model(**whole(rollout), base_states=rollout.base_states).values
        assert_close(started, trainer.model(**whole(rollout)).values)


def half_precision_trainer(make_trainer):
    base = deep(num_hidden_layers=8).bfloat16()
    trainer = make_trainer({"critic_layers": 4, "bf16": True, "max_steps": 1}, model=base)
    trainer.train()
    return trainer


def test_passes_keep_no_states_where_they_are_computed(make_trainer):
    """Here a copy in float32 stands for the device's memory."""
    trainer = half_precision_trainer(make_trainer)
    trainer.args.local_rollout_forward_batch_size = 1
    forward, returned, alive = trainer.model.forward, [], []

    def noting(*args, **kwargs):
        alive.append(sum(ref() is not None for ref in returned))
        out = forward(*args, **kwargs)
        if getattr(out, "base_states", None) is not None:
            returned.append(weakref.ref(out.base_states))
        return out

    trainer.model.forward = noting
    assert trainer.rollout(["1+2="] * 4).base_states.dtype == torch.bfloat16
    assert len(returned) == 4
    assert max(alive) == 0


RUNS = {
    "no reference, cut finely": {"kl_coef": 0.0, "max_tokens_per_micro_batch": 24, "gradient_accumulation_steps": 2},
    "pretraining": {"critic_pretraining_completions": 16, "num_critic_epochs": 3},
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_ends_where_one_with_whole_forwards_ends(make_trainer, run):
    config = {"critic_layers": 2, "learning_rate": 1e-3, "max_steps": 3, "num_ppo_epochs": 1, **RUNS[run]}
    started = make_trainer(config, model=deep(seed=1))
    started.train()
    whole = make_trainer(config, model=deep(seed=1))
    forward = whole.model.forward
    whole.model.forward = lambda *args, base_states=None, **kwargs: forward(*args, **kwargs)
    whole.train()
    assert any(name.startswith("critic.") for name in trainable(started))
    assert_close(trainable(started), trainable(whole), rtol=1e-3, atol=1e-5)
    assert logged(started, "reward") == logged(whole, "reward")


def whole(rollout) -> dict[str, torch.Tensor]:
    return {**rollout.joined(), "completion_mask": rollout.mask}


# Cost


class Calls(TrainerCallback):
    """Counts the calls of the critic's layers in the first rollout's passes, and in its updates."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.calls = count_calls(find_layers(model.critic_trunk), lambda: model.adapters.acting == "critic")

    def on_step_begin(self, args, state, control, **kwargs):
        self.before = list(self.calls)

    def on_step_end(self, args, state, control, **kwargs):
        self.in_step = [now - then for now, then in zip(self.calls, self.before, strict=True)]


@pytest.mark.parametrize(("kl_coef", "passes"), [(0.05, [0, 0, 1, 1]), (0.0, [1, 1, 1, 1])])
def test_the_layers_below_are_computed_once_per_rollout(make_trainer, kl_coef, passes):
    """By the reference; or, where no pass of it is needed, by the critic's first pass."""
    fields = {"critic_layers": 2, "kl_coef": kl_coef, "per_device_train_batch_size": 2, "num_mini_batches": 1}
    trainer = make_trainer({**fields, "num_ppo_epochs": 3, "max_steps": 3}, model=deep())
    trainer._prepare_model()  # its checks call the layers as well
    calls = Calls()
    trainer.add_callback(calls)
    trainer.train()
    assert calls.in_step == [0, 0, 1, 1]
    assert [now - 3 * step for now, step in zip(calls.calls, calls.in_step, strict=True)] == passes


# What is adapted, saved and loaded


def test_only_the_top_layers_are_adapted():
    model = actor(deep(), 2)
    adapted = {int(name.split("layers.")[1].split(".")[0]) for name in trainable_of_trunk(model)}
    assert adapted == {2, 3}
    everything = {name for name in trainable_of_trunk(actor(deep(), None)) if "layers.0." not in name}
    assert trainable_of_trunk(model) == {name for name in everything if "layers.1." not in name}


def trainable_of_trunk(model: ActorCritic) -> set[str]:
    return {name for name in trained_state(model.critic_trunk) if ".critic." in name}


def test_a_run_resumes_within_a_rollout_and_after_pretraining(make_trainer, tmp_path):
    config = {"critic_layers": 2, "critic_pretraining_completions": 16}
    config |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    straight = make_trainer(config, model=deep())
    straight.train()
    for step in (0, 1):
        resumed = make_trainer({**config, "output_dir": str(tmp_path / f"from-{step}")}, model=deep())
        resumed.train(resume_from_checkpoint=str(tmp_path / f"out/checkpoint-{step}"))
        assert_same_end(resumed, straight)
        assert untimed_logs(straight)[:-1] == untimed_logs(resumed)[:-1]
    with pytest.raises(ValueError, match="was written with critic_layers=2, this run has 1"):
        make_trainer({**config, "critic_layers": 1}, model=deep()).train(resume_from_checkpoint=True)


def test_a_saved_critic_tells_its_layers(make_trainer, tmp_path):
    deep().save_pretrained(tmp_path / "base")
    trainer = make_trainer({"critic_layers": 1, "max_steps": 2}, model=str(tmp_path / "base"))
    trainer.train()
    trainer.save_model()
    folder = trainer.args.output_dir
    rollout = trainer.rollout(["1+2="])
    again = make_trainer({"critic_layers": 1, "output_dir": str(tmp_path / "next")}, model=deep(), critic=folder)
    values = again.model(rollout.prompt_ids.new_ones(1, 9), torch.ones(1, 9), torch.ones(1, 4).bool()).values
    assert values.abs().max() > 0
    with pytest.raises(ValueError, match=r"contains a critic with .*layers"):
        make_trainer({"output_dir": str(tmp_path / "other")}, model=deep(), critic=folder)


# Refusals


def test_upper_layers_that_need_the_lower_ones_are_refused(make_trainer):
    """As where keys and values of a lower layer are used again."""
    trainer = make_trainer({"critic_layers": 1})
    layers = find_layers(trainer.model.critic_trunk)
    notes = []
    layers[0].register_forward_hook(lambda *_: notes.append(1))
    layers[1].register_forward_pre_hook(lambda *_: notes.clear() if notes.pop() else None)
    with pytest.raises(ValueError, match="critic_layers=1 cannot be used with LlamaForCausalLM, whose upper layers"):
        trainer.train()


def test_an_architecture_without_a_list_of_layers_is_refused():
    trunk = deep().model
    trunk.layers = torch.nn.Sequential(*trunk.layers)
    with pytest.raises(ValueError, match="LlamaModel, which has no list of its 4 decoder layers; leave critic_layers"):
        find_layers(trunk)
