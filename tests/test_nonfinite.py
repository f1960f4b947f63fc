"""NaN and infinity: found where they arise, kept for inspection, and kept out of weights, β and moments."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

import hfppo.collect.collector
import hfppo.trainer
from helpers.runs import count_digits, final_state, logs, trained_state
from hfppo import AdaptiveKLCallback, PPOCallback, TokenTraceCallback
from hfppo.collect.check_finite import NonFiniteError
from hfppo.learn.nonfinite_guard import MAX_IN_A_ROW, NonFiniteGuard
from hfppo.rollout import Rollout
from hfppo.token_trace.record import list_trace_files

NAN = float("nan")
# 4 steps to a rollout of 8 completions, 2 micro-batches of 2 to a step.
CONFIG = {
    "max_steps": 12,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 5,
    "normalize_scores": True,
}


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
    """NaN in a term of the loss of the given micro-batches, by the order of their passes."""
    terms_of, number = hfppo.trainer.ppo_terms, iter(range(100))

    def broken(*args):
        terms = terms_of(*args)
        if next(number) not in calls:
            return terms
        bad = torch.arange(len(terms[0].per_token))[:, None] == row
        return [
            replace(term, per_token=torch.where(bad, NAN, term.per_token)) if term.name == name else term
            for term in terms
        ]

    monkeypatch.setattr(hfppo.trainer, "ppo_terms", broken)


def break_gradient(trainer, name: str, calls: set[int], by: float = math.inf) -> None:
    """Infinity in the gradient of the parameters with this in their name, by the order of the backward passes."""
    for parameter_name, p in trainer.model.named_parameters():
        if name in parameter_name and p.requires_grad:
            number = iter(range(100))
            p.register_hook(lambda grad, number=number: grad + (by if next(number) in calls else 0.0))


def kept(tmp_path: Path, name: str) -> tuple[dict, dict[str, Rollout]]:
    """What was found, and the batches that were written down."""
    folder = tmp_path / "out/_nonfinite" / name / "process_0"
    batches = {path.stem: Rollout(**load_file(path)) for path in folder.glob("*.safetensors")}
    return json.loads((folder / "found.json").read_text()), batches


def assert_same(straight, resumed) -> None:
    expected, got = final_state(straight), final_state(resumed)
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert straight.ppo_state == resumed.ppo_state
    assert logs(straight) == logs(resumed)


@pytest.fixture(scope="module")
def straight_factory():
    return {}


@pytest.fixture
def straight(make_trainer, tmp_path, straight_factory):
    """The undisturbed run; made once."""
    if not straight_factory:
        trainer = make_trainer({**CONFIG, "output_dir": str(tmp_path / "straight")})
        trainer.train()
        straight_factory["trainer"] = trainer
    return straight_factory["trainer"]


def test_a_rollout_that_is_not_finite_ends_the_run_and_the_resumed_one_is_the_undisturbed(
    make_trainer, tmp_path, monkeypatch, straight
):
    with monkeypatch.context() as patched:
        break_passes(patched, "old_logprobs", {2})
        trainer = make_trainer(CONFIG)
        with pytest.raises(NonFiniteError, match="old_logprobs is not finite in row 3 of rollout 3 on process 0") as e:
            trainer.train()
    assert f"saved in {tmp_path}/out/_nonfinite/rollout-3" in str(e.value)
    assert "on_nonfinite='skip' continues without" in str(e.value)
    assert f"The last checkpoint is {tmp_path}/out/checkpoint-5: resume" in e.value.__notes__[0]
    assert trainer.state.global_step == 8
    assert trainer.ppo_state.score_moments.count == 16  # of the first two rollouts
    found, batches = kept(tmp_path, "rollout-3")
    assert found["found"] == "old_logprobs is not finite in row 3 of rollout 3 on process 0"
    assert batches["rollout"].old_logprobs.isnan().any(dim=1).tolist() == [False] * 3 + [True] + [False] * 4
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=True)
    assert_same(straight, resumed)


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


def test_looking_at_a_rollout_finds_it_as_well(make_trainer, monkeypatch):
    break_passes(monkeypatch, "values", {0})
    with pytest.raises(NonFiniteError, match="values is not finite in row 3"):
        make_trainer().rollout(["1+1="] * 4)


def test_a_rollout_is_skipped_as_if_its_prompts_had_not_been(make_trainer, monkeypatch):
    """Neither moments nor β nor a log takes anything of it."""
    seen, prompts = [], []

    class Keep(PPOCallback):
        def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state):
            seen.append(metrics)
            prompts.append(transcript.prompts)

    def run(broken: set[int]):
        with monkeypatch.context() as patched:
            break_passes(patched, "ref_logprobs", broken)
            config = {**CONFIG, "save_strategy": "no", "max_steps": 8, "on_nonfinite": "skip", "kl_coef": 0.1}
            callbacks = [AdaptiveKLCallback(target=1e-6, horizon=100), Keep()]
            trainer = make_trainer(config, callbacks=callbacks)
            trainer.train()
        return trainer

    trainer = run({1, 2})
    assert trainer.state.global_step == 8
    assert trainer.ppo_state.rollouts == 4
    assert len(seen) == 2
    rows = trainer.collector.training_rows(trainer._train_prompts, 3)
    assert prompts[1] == [row.columns["prompt"] for row in rows]
    assert trainer.ppo_state.score_moments.count == 16
    assert trainer.ppo_state.kl_coef == pytest.approx(0.1 * (1 - 0.2 * 8 / 100) * (1 + 0.2 * 8 / 100))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(math.isfinite(x) for entry in logged for x in entry.values())
    assert [e["nonfinite/rollout_frac"] for e in logged if "nonfinite/rollout_frac" in e] == pytest.approx([0, 2 / 3])
    assert (Path(trainer.args.output_dir) / "_nonfinite/rollout-3/process_0/rollout.safetensors").is_file()


def test_a_rollout_left_out_is_none_of_the_critics_warmup(make_trainer, monkeypatch):
    moved = []

    class Keep(PPOCallback):
        def on_rollout_end(self, args, state, control, **kwargs):
            self.before = {name: x.clone() for name, x in trained_state(trainer.model.base_model).items()}

        def on_update_end(self, args, state, control, *, model, rollout, ppo_state):
            now = trained_state(model.base_model)
            moved.append(any(not torch.equal(now[name], x) for name, x in self.before.items()))

    break_passes(monkeypatch, "ref_logprobs", {0})
    config = {**CONFIG, "save_strategy": "no", "max_steps": 8, "on_nonfinite": "skip", "critic_warmup": 1}
    trainer = make_trainer(config, callbacks=[Keep()])
    trainer.train()
    assert moved == [False, True]


def test_a_loss_that_is_not_finite_ends_the_run_and_the_resumed_one_is_the_undisturbed(
    make_trainer, tmp_path, monkeypatch, straight
):
    with monkeypatch.context() as patched:
        break_loss(patched, "value/loss", {11})  # the second micro-batch of step 6
        trainer = make_trainer(CONFIG)
        message = "value/loss in row 1 of micro-batch 1 of step 6 on process 0 is not finite; it was left out"
        with pytest.raises(NonFiniteError, match=message) as error:
            trainer.train()
    assert f"{tmp_path}/out/checkpoint-5: resume" in error.value.__notes__[0]
    found, batches = kept(tmp_path, "step-6")
    assert [math.isfinite(float(loss)) for loss in found["losses"]] == [True, False]
    assert math.isfinite(float(found["critic"])), "the gradients alone would have shown nothing"
    assert {name: len(batch) for name, batch in batches.items()} == {"micro_batch_0": 2, "micro_batch_1": 2}
    before = load_file(tmp_path / "out/checkpoint-5/critic/critic.safetensors")
    assert all(torch.equal(p, before[name]) for name, p in trained_state(trainer.model.critic).items())
    resumed = make_trainer(CONFIG)
    resumed.train(resume_from_checkpoint=True)
    assert_same(straight, resumed)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_a_gradient_that_is_not_finite_is_named(make_trainer, tmp_path, max_grad_norm):
    trainer = make_trainer({**CONFIG, "max_grad_norm": max_grad_norm})
    break_gradient(trainer, "layers.1.mlp.up_proj.lora_B.default", {2})
    with pytest.raises(NonFiniteError, match=r"the gradient of .*layers\.1\.mlp.* in step 2 is not finite"):
        trainer.train()
    found, _ = kept(tmp_path, "step-2")
    assert found["actor"] in ("inf", "nan")
    assert math.isfinite(float(found["critic"]))
    assert all(math.isfinite(float(loss)) for loss in found["losses"])


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_norm_that_overflows_over_finite_gradients_is_named(make_trainer, tmp_path, on_nonfinite):
    trainer = make_trainer({**CONFIG, "max_steps": 3, "on_nonfinite": on_nonfinite})
    break_gradient(trainer, "layers.1.mlp.up_proj.lora_B.default", {2}, by=1e30)
    if on_nonfinite == "raise":
        with pytest.raises(NonFiniteError, match=r"the norm of the (actor|critic)'s gradient in step 2 is not finite"):
            trainer.train()
    else:
        trainer.train()
    found, _ = kept(tmp_path, "step-2")
    assert {found["actor"], found["critic"]} & {"inf", "nan"}
    assert all(x.isfinite().all() for x in final_state(trainer).values())


class Before(PPOCallback):
    """Copies of the state before the given step, and learning rates after each."""

    def __init__(self, step: int):
        self.step, self.rates = step, []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            self.state = {name: x.clone() for name, x in final_state(self.trainer).items()}
        if state.global_step == self.step:
            self.after = {name: x.clone() for name, x in final_state(self.trainer).items()}

    def on_step_end(self, args, state, control, lr_scheduler, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])


@pytest.mark.parametrize("cause", ["loss", "gradient of the actor", "gradient of the critic"])
def test_a_skipped_step_changes_nothing(make_trainer, monkeypatch, cause):
    """Weights, moments, step counts and schedule; with weight decay, which acts without any gradient."""
    before = Before(3)
    config = {**CONFIG, "save_strategy": "no", "max_steps": 6, "on_nonfinite": "skip", "weight_decay": 0.1}
    trainer = before.trainer = make_trainer(config, callbacks=[before])
    if cause == "loss":
        break_loss(monkeypatch, "policy/loss", {4})
    else:
        name = "critic" if "critic" in cause else "base_model.model.model.layers.0"
        break_gradient(trainer, name, {4})
    trainer.train()
    assert before.state.keys() == before.after.keys()
    assert [name for name, x in before.state.items() if not torch.equal(x, before.after[name])] == []
    steps = [x for name, x in final_state(trainer).items() if name.endswith(".step")]
    assert len(steps) > 0
    assert all(x == 5 for x in steps)
    assert trainer.state.global_step == 6
    assert before.rates == pytest.approx([1e-2 * (1 - n / 6) for n in (1, 2, 2, 3, 4, 5)])
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["nonfinite/step_frac"] for entry in logged] == [0, 0, 1, 0, 0, 0]
    # It shows in the log, and in that of its step alone.
    shown = "loss" if cause == "loss" else "value/grad_norm" if "critic" in cause else "grad_norm"
    assert [math.isfinite(entry[shown]) for entry in logged] == [True, True, False, True, True, True]


def test_a_step_in_pieces_is_skipped_whole(make_trainer, monkeypatch, tmp_path):
    before = Before(3)
    pieces = {"max_tokens_per_micro_batch": 1}  # a row each
    config = {**CONFIG, **pieces, "save_strategy": "no", "max_steps": 4, "on_nonfinite": "skip"}
    trainer = before.trainer = make_trainer(config, callbacks=[before])
    break_loss(monkeypatch, "policy/loss", {9}, row=0)  # the second of four pieces of step 3
    trainer.train()
    assert [name for name, x in before.state.items() if not torch.equal(x, before.after[name])] == []
    found, batches = kept(tmp_path, "step-3")
    assert [math.isfinite(float(loss)) for loss in found["losses"]] == [True, False, True, True]
    assert [len(batch) for batch in batches.values()] == [1] * 4


def test_skipping_goes_on_the_same_after_a_resume(make_trainer, monkeypatch, tmp_path):
    config = {**CONFIG, "save_steps": 3, "max_steps": 8, "on_nonfinite": "skip"}
    with monkeypatch.context() as patched:
        break_loss(patched, "policy/loss", {4})
        skipping = make_trainer({**config, "output_dir": str(tmp_path / "skipping")})
        skipping.train()
    resumed = make_trainer(config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "skipping/checkpoint-3"))
    expected, got = final_state(skipping), final_state(resumed)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_too_many_in_a_row_end_the_run_all_the_same(make_trainer, monkeypatch):
    break_loss(monkeypatch, "policy/loss", set(range(4, 100)))
    trainer = make_trainer({**CONFIG, "save_strategy": "no", "on_nonfinite": "skip"})
    with pytest.raises(NonFiniteError, match=f"{MAX_IN_A_ROW} in a row were left out before"):
        trainer.train()
    assert trainer.state.global_step == 2 + MAX_IN_A_ROW


def test_a_dump_that_cannot_be_written_does_not_hide_the_error(make_trainer, monkeypatch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/_nonfinite").write_text("in the way")
    break_loss(monkeypatch, "policy/loss", {0})
    with pytest.raises(NonFiniteError, match=r"policy/loss in row 1 .* could not be saved: .*Not a directory"):
        make_trainer().train()


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
    accelerator = SimpleNamespace(**scaler, mixed_precision="fp16", process_index=0, reduce=lambda x, _: x)
    guard = NonFiniteGuard(replace(trainer.args, on_nonfinite="skip"), accelerator)
    terms = {"policy/loss": torch.zeros(rollout.mask.shape)}
    optimizer = SimpleNamespace(step_was_skipped=False)
    norms = {"actor": torch.tensor(math.inf)}
    guard.record(rollout, torch.tensor(0.0), terms)
    assert guard.allows_step(norms, model, optimizer, 1, trainer._meter)
    guard.record(rollout, torch.tensor(NAN), terms)
    assert not guard.allows_step(norms, model, optimizer, 1, trainer._meter)
    assert all(p.grad is not None for p in trained)
    guard.record(rollout, torch.tensor(NAN), terms)  # of which gradients, and so the scaler, show nothing
    assert not guard.allows_step({"actor": torch.tensor(1.0)}, model, optimizer, 1, trainer._meter)
    assert all(p.grad is None for p in trained)


def test_a_guard_is_not_confused_by_terms_without_weight(make_trainer, monkeypatch):
    """The entropy of a distribution with an impossible token is NaN; with weight 0 it is only logged."""
    break_loss(monkeypatch, "policy/entropy", {0})
    trainer = make_trainer({"max_steps": 1})
    trainer.train()
    assert math.isnan(trainer.state.log_history[0]["policy/entropy"])
    assert asdict(trainer.ppo_state)["rollouts"] == 1


def test_rewards_that_are_nan_for_every_function_are_no_fault(make_trainer):
    trainer = make_trainer({"max_steps": 1}, reward_funcs=lambda completions, **_: [None] * len(completions))
    trainer.train()
    assert trainer.state.log_history[0]["unscorable_frac"] == 1.0
    assert count_digits(["1"]) == [1.0]


def test_only_those_in_a_row_are_too_many(make_trainer, monkeypatch):
    break_loss(monkeypatch, "policy/loss", set(range(0, 24, 2)))  # every other step
    trainer = make_trainer({"max_steps": 14, "on_nonfinite": "skip"})
    trainer.train()
    assert trainer.state.global_step == 14


def test_traced_prompts_that_are_not_finite_end_no_run(make_trainer, tmp_path, monkeypatch, caplog):
    trainer = make_trainer({"max_steps": 8})  # two rollouts, each followed by that of the prompts
    trainer.add_callback(TokenTraceCallback(every=1, trainer=trainer, prompts=["1+1="] * 4))
    break_passes(monkeypatch, "values", {1})
    trainer.train()
    assert trainer.state.global_step == 8
    assert "not traced at rollout 1: values is not finite in row 3 of the completions on process 0" in caplog.text
    assert [path.name for path in list_trace_files(tmp_path / "out")] == ["prompts-000002.jsonl"]
