"""NaN and infinity: found where they arise, and kept out of weights and β."""

import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

import hfppo.collect.collector
import hfppo.trainer
from helpers.runs import assert_same_run, critic_state, final_state, small_trainer
from hfppo import TokenTraceCallback
from hfppo.collect.check_finite import NonFiniteError, NonFiniteGuard
from hfppo.reporting.traces import list_trace_files

NAN = float("nan")
# 4 steps to a rollout of 8 completions, 2 micro-batches of 2 to a step.
CONFIG = {"max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CONFIG |= {"save_strategy": "steps", "save_steps": 5}


def break_passes(monkeypatch, name: str, rollouts: set[int]) -> None:
    """NaN in row 3 of a tensor of the given rollouts, by the order of their collection."""
    passes, number = hfppo.collect.collector.forward_passes, iter(range(100))

    def broken(*args):
        found = passes(*args)
        if next(number) in rollouts:
            getattr(found, name)[3] = NAN
        return found

    monkeypatch.setattr(hfppo.collect.collector, "forward_passes", broken)


def break_loss(monkeypatch, name: str, calls: set[int], row: int = 1) -> None:
    """NaN in a term of the loss of the given micro-batches, by the order of the passes that compute it."""
    terms_of, number = hfppo.trainer.ppo_terms, iter(range(100))

    def broken(*args):
        terms = terms_of(*args)
        if name not in {term.name for term in terms} or next(number) not in calls:
            return terms
        for i, term in enumerate(terms):
            if term.name == name:
                bad = torch.arange(len(term.per_token))[:, None] == row
                terms[i] = replace(term, per_token=torch.where(bad, NAN, term.per_token))
        return terms

    monkeypatch.setattr(hfppo.trainer, "ppo_terms", broken)


def break_gradient(trainer, name: str, calls: set[int], by: float = math.inf) -> None:
    """Infinity in the gradient of the parameters with this in their name, by the order of the backward passes."""
    for parameter_name, p in trainer.model.named_parameters():
        if name in parameter_name and p.requires_grad:
            number = iter(range(100))
            p.register_hook(lambda grad, number=number: grad + (by if next(number) in calls else 0.0))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The undisturbed run."""
    trainer = small_trainer(tmp_path_factory.mktemp("straight"), CONFIG)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("breaks", "name", "calls", "message", "steps"),
    [
        (break_passes, "old_logprobs", {2}, "old_logprobs is not finite in row 3 of rollout 3 on process 0", 8),
        (
            break_loss,
            "value/loss",
            {11},  # the second micro-batch of step 6
            "in step 6, on process 0, value/loss in row 1 of micro-batch 1 is not finite; the step was not made",
            5,
        ),
    ],
    ids=["a rollout", "a loss"],
)
def test_it_ends_the_run_and_the_resumed_one_is_the_undisturbed(
    make_trainer, tmp_path, monkeypatch, straight, breaks, name, calls, message, steps
):
    with monkeypatch.context() as patched:
        breaks(patched, name, calls)
        trainer = make_trainer(CONFIG)
        with pytest.raises(NonFiniteError, match=message) as error:
            trainer.train()
    assert f"The last checkpoint is {tmp_path}/out/checkpoint-5: resume" in error.value.__notes__[0]
    assert (trainer.state.global_step, trainer.ppo_state.rollouts) == (steps, 2)
    if steps == 5:  # no weight has moved since the checkpoint
        before = load_file(tmp_path / "out/checkpoint-5/critic/critic.safetensors")
        assert all(torch.equal(p, before[name]) for name, p in critic_state(trainer.model).items())
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(straight, resumed)


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "values"])
def test_the_tensor_closest_to_the_cause_is_named(make_trainer, monkeypatch, name):
    """Whitening and GAE make NaN of every row's advantage."""
    break_passes(monkeypatch, name, {0})
    with pytest.raises(NonFiniteError, match=f"{name} is not finite in row 3 of rollout 1"):
        make_trainer({"save_strategy": "no"}).train()


def test_weights_that_are_nan_are_seen_by_the_sampler_first(make_trainer):
    trainer = make_trainer()
    trainer.model.causal_lm.model.norm.weight.data.fill_(NAN)
    with pytest.raises(NonFiniteError, match="rollout_logprobs is not finite in row 0"):
        trainer.train()


def test_scores_that_overflow_are_found(make_trainer):
    trainer = make_trainer({"reward_weights": [1e38]}, reward_funcs=lambda completions, **_: [9.0] * len(completions))
    with pytest.raises(NonFiniteError, match="scores is not finite in row 0 of rollout 1"):
        trainer.train()


@pytest.mark.parametrize(
    ("config", "by", "message"),
    [
        ({"max_grad_norm": 1.0}, math.inf, r"the gradient of .*layers\.1\.mlp.* is not finite"),
        ({"max_grad_norm": 0.0}, math.inf, r"the gradient of .*layers\.1\.mlp.* is not finite"),
        ({"max_steps": 3}, 1e30, r"the norm of the (actor|critic)'s gradient is not finite"),  # over finite gradients
    ],
    ids=["clipped", "not clipped", "the norm overflows"],
)
def test_a_gradient_that_is_not_finite_is_named(make_trainer, config, by, message):
    trainer = make_trainer({**CONFIG, **config})
    break_gradient(trainer, "layers.1.mlp.up_proj.lora_B.default", {2}, by)
    with pytest.raises(NonFiniteError, match=f"in step 2, .*{message}"):
        trainer.train()
    assert all(x.isfinite().all() for x in final_state(trainer).values())


@pytest.mark.parametrize(
    "scaler",
    [
        {"scaler": object(), "distributed_type": DistributedType.MULTI_GPU},
        {"scaler": None, "distributed_type": DistributedType.DEEPSPEED},  # which has one of its own
    ],
    ids=["accelerate", "deepspeed"],
)
def test_float16_overflows_are_left_to_the_scaler_and_losses_are_not(make_trainer, scaler):
    """Its scaler lowers the scale and skips by itself, as long as it sees the gradients."""
    trainer = make_trainer()
    model, rollout = trainer.model, trainer.rollout(["1+1="])
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.full_like(p, math.inf)
    accelerator = SimpleNamespace(**scaler, mixed_precision="fp16", reduce=lambda x, _: x)
    guard = NonFiniteGuard(accelerator)
    terms = {"policy/loss": torch.zeros(rollout.mask.shape)}
    guard.record(rollout, torch.tensor(0.0), terms)
    guard.check({"actor": torch.tensor(math.inf)}, model, 1)
    assert all(p.grad is not None for p in trained)
    for norm in (math.inf, 1.0):  # gradients that are finite, and so the scaler, show nothing
        guard.record(rollout, torch.tensor(NAN), terms)
        with pytest.raises(NonFiniteError, match=r"in step 1, .*the loss of micro-batch 0 is not finite"):
            guard.check({"actor": torch.tensor(norm)}, model, 1)


def test_the_guard_keeps_no_batch_until_the_step(make_trainer):
    """Of a step's micro-batches, only the one that is computed is on the device."""
    guard, rollout = NonFiniteGuard(SimpleNamespace()), make_trainer().rollout(["1+1="])
    batch = replace(rollout, loss_mask=rollout.loss_mask.clone())
    loss = torch.ones(batch.mask.shape, requires_grad=True) * 2.0
    kept = [weakref.ref(batch), weakref.ref(batch.loss_mask), weakref.ref(loss)]
    guard.record(batch, loss.sum(), {"policy/loss": loss})
    del batch, loss
    assert [ref() for ref in kept] == [None] * 3
    assert len(guard.micro_batches) == 1


def test_a_guard_is_not_confused_by_terms_without_weight(make_trainer, monkeypatch):
    """The entropy of a distribution with an impossible token is NaN; with weight 0 it is only logged."""
    break_loss(monkeypatch, "policy/entropy", {0})
    trainer = make_trainer({"max_steps": 1})
    trainer.train()
    assert math.isnan(trainer.state.log_history[0]["policy/entropy"])
    assert trainer.ppo_state.rollouts == 1


def test_traced_prompts_that_are_not_finite_end_no_run(make_trainer, tmp_path, monkeypatch, caplog):
    trainer = make_trainer({"max_steps": 8})  # two rollouts, each followed by that of the prompts
    trainer.add_callback(TokenTraceCallback(every=1, trainer=trainer, prompts=["1+1="] * 4))
    break_passes(monkeypatch, "values", {1})
    trainer.train()
    assert trainer.state.global_step == 8
    assert "not traced at rollout 1: values is not finite in row 3 of the completions on process 0" in caplog.text
    assert [path.name for path in list_trace_files(tmp_path / "out")] == ["prompts-000002.jsonl"]
