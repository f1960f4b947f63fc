"""Traces that a run records: the trainer's own numbers, before and after the update, through any resume."""

import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.runs import Killed, assert_same_tensors, count_digits, stops_at_kl
from hfppo import AdaptiveKLCallback, PPOCallback, PPOConfig, TokenTraceCallback
from hfppo.models.actor_critic import Want
from hfppo.reporting.traces import Trace, list_trace_files, read_traces, trace_file, write_traces

CONFIG = {"max_steps": 12, "kl_coef": 0.1}  # 3 rollouts of 4 steps
EVENTS = ("rollout", "update")
PROMPTS = {"prompts": ["请问1+1=2？", "请问2+2="], "answer": ["2", "4"]}


class Witness(PPOCallback):
    """Keeps what the trainer tells, and reads the policy after the update on the whole rollout."""

    def __init__(self):
        self.events, self.rollouts, self.after = [], {}, {}

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, ppo_state, **kwargs):
        self.events.append(("rollout", ppo_state.rollouts, state.global_step))
        self.rollouts[ppo_state.rollouts] = rollout

    def on_update_end(self, args, state, control, *, model, rollout, ppo_state, **kwargs):
        self.events.append(("update", ppo_state.rollouts, state.global_step))
        assert rollout is self.rollouts[ppo_state.rollouts]
        with torch.no_grad():
            outputs = model(**rollout.joined(), completion_mask=rollout.mask, want=Want(args.temperature))
        self.after[ppo_state.rollouts] = outputs.logprobs


def traces(folder: Path) -> dict[int, list[Trace]]:
    return {(read := read_traces(path))[0].rollout: read for path in list_trace_files(folder)}


def column(trace: Trace, name: str) -> torch.Tensor:
    return torch.tensor([getattr(row, name) for row in trace.rows])


def test_trackers_that_are_reported_to_get_the_tokens(make_trainer, monkeypatch, tmp_path):
    logged = []
    tracker = SimpleNamespace(log=logged.append, Table=lambda dataframe: dataframe)
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    trainer = make_trainer({**CONFIG, "max_steps": 4}, callbacks=[TokenTraceCallback(num_completions=2)])
    trainer.args.report_to = ["trackio"]  # after Trainer has set up its own, which would start the real one
    trainer.train()
    rows = [row for trace in traces(tmp_path / "out")[1] for row in trace.rows]
    (table,) = (entry["traces"] for entry in logged)
    assert set(table["rollout"]) == {1}
    for name in ("token", "logprob", "value", "advantage", "new_logprob", "ratio", "clipped"):
        assert list(table[name]) == [getattr(row, name) for row in rows]


def test_traces_hold_the_trainers_own_numbers_before_and_after_the_update(make_trainer, tmp_path, tokenizer):
    """β is the one that the rewards were made with, though another callback has changed it before."""
    witness = Witness()
    callbacks = [witness, AdaptiveKLCallback(target=1e-6, horizon=10), TokenTraceCallback(every=2, num_completions=3)]
    limits = {"cliprange": 0.1, "cliprange_high": 1.0, "dual_clip": 1.02, "lam": 0.95}
    trainer = make_trainer({**CONFIG, **limits, "temperature": 0.7}, callbacks=callbacks)
    trainer.train()
    assert witness.events == [(event, n, 4 * (n - (event == "rollout"))) for n in (1, 2, 3) for event in EVENTS]
    found = traces(tmp_path / "out")
    assert list(found) == [1, 3]
    assert {(t.step, t.updated_step) for t in found[3]} == {(8, 12)}
    betas = [entry["kl_coef"] for entry in trainer.state.log_history if "kl_coef" in entry]
    assert len(set(betas)) == 3
    assert [{trace.kl_coef for trace in of_rollout} for of_rollout in found.values()] == [{betas[0]}, {betas[2]}]
    held_by = {"low": 0, "high": 0, "dual": 0, "none above 1.1": 0}
    for number, of_rollout in found.items():
        rollout = witness.rollouts[number]
        assert len(of_rollout) == 3
        for i, trace in enumerate(of_rollout):
            real = rollout.mask[i]
            assert trace.completion_ids == rollout.completion_ids[i][real].tolist()
            assert trace.prompt_ids == rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist()
            text = "".join(row.token for row in trace.rows).replace("<#25>", "")  # an id without text
            assert text == tokenizer.decode(trace.completion_ids)
            assert (trace.score, trace.truncated) == (float(rollout.scores[i]), bool(rollout.truncated[i]))
            for name, tensor in {
                "logprob": rollout.old_logprobs,
                "ref_logprob": rollout.ref_logprobs,
                "kl": rollout.old_logprobs - rollout.ref_logprobs,
                "reward": rollout.rewards,
                "value": rollout.values,
                "td_error": rollout.td_errors,
                "return_": rollout.returns,
                "advantage": rollout.advantages,
                "counted": rollout.loss_mask,
            }.items():
                assert torch.equal(column(trace, name), tensor[i][real]), name
            new, ratio = witness.after[number][i][real], column(trace, "ratio")
            torch.testing.assert_close(column(trace, "new_logprob"), new)
            torch.testing.assert_close(ratio, torch.exp(new - rollout.old_logprobs[i][real]))
            advantage = column(trace, "advantage")
            low, high = (advantage < 0) & (ratio < 0.9), (advantage > 0) & (ratio > 2)
            dual = (advantage < 0) & (ratio > 1.02)
            assert torch.equal(column(trace, "clipped"), low | high | dual)
            free = (advantage > 0) & (ratio > 1.1) & ~high
            for name, which in zip(held_by, (low, high, dual, free), strict=True):
                held_by[name] += int(which.sum())
    assert all(held_by.values()), held_by  # so that each was seen


def test_chosen_prompts_change_nothing_about_the_training(make_trainer, tmp_path):
    """A rollout before the training changes nothing either."""
    answers = []

    def noting(completions, answer, **kwargs):
        answers.append(answer)
        return count_digits(completions)

    plain = make_trainer(CONFIG)
    plain.train()
    watched = make_trainer({**CONFIG, "output_dir": str(tmp_path / "watched")}, reward_funcs=noting)
    watched.rollout(**PROMPTS)
    watched.add_callback(TokenTraceCallback(every=1, trainer=watched, **PROMPTS))
    watched.train()
    assert_same_tensors(watched.model.state_dict(), plain.model.state_dict())
    assert answers.count(PROMPTS["answer"]) == 4
    found = traces(tmp_path / "watched")
    assert list(found) == [1, 2, 3]
    assert [trace.prompt for trace in found[3]] == PROMPTS["prompts"]
    for trace in found[3]:
        assert trace.kl_coef == 0.1
        assert all(row.kl == pytest.approx(row.logprob - row.ref_logprob, abs=1e-6) for row in trace.rows)


def test_resumed_run_neither_loses_nor_repeats_a_trace(make_trainer, tmp_path):
    """Killed in a step that no checkpoint knows of, a rollout's first or a later one; older traces lie about."""

    def trainer(output_dir: str, *callbacks, **saving):
        made = make_trainer({**CONFIG, **saving, "output_dir": str(tmp_path / output_dir)}, callbacks=list(callbacks))
        for options in ({}, {"trainer": made, **PROMPTS}):
            made.add_callback(TokenTraceCallback(every=1, **options))
        return made

    trainer("straight").train()
    expected = [path.read_text() for path in list_trace_files(tmp_path / "straight")]
    assert len(expected) == 6
    assert "null" not in "".join(expected)
    for step in (9, 6):
        saving = {"save_strategy": "steps", "save_steps": step - 1}
        with pytest.raises(KeyboardInterrupt):
            trainer(str(step), Killed(step), **saving).train()
        for kind, stale in product(("rollout", "prompts"), (3, 7)):
            write_traces(trace_file(tmp_path / str(step), stale, kind), traces(tmp_path / "straight")[1])
        trainer(str(step), **saving).train(resume_from_checkpoint=True)
        assert [path.read_text() for path in list_trace_files(tmp_path / str(step))] == expected


def test_second_training_goes_on_with_the_rollouts_and_a_new_run_starts_anew(make_trainer, tmp_path):
    """The first and the last rollout of a training are always traced."""
    trainer = make_trainer(CONFIG, callbacks=[TokenTraceCallback()])
    trainer.train()
    assert list(traces(tmp_path / "out")) == [1, 3]
    trainer.args.max_steps = 4
    trainer.train()
    assert list(traces(tmp_path / "out")) == [1, 3, 4]
    make_trainer({"max_steps": 4}, callbacks=[TokenTraceCallback()]).train()
    assert list(traces(tmp_path / "out")) == [1]


@pytest.mark.parametrize("stopped", [False, True])
def test_update_end_comes_once_after_the_last_step_of_each_rollout(make_trainer, stopped):
    """Also where `max_steps` lies within a rollout, or a target for the KL ends it early."""
    witness = Witness()
    config = {"max_steps": 4, "num_ppo_epochs": 4} if stopped else {"max_steps": 6}
    make_trainer(config, callbacks=[witness, *([stops_at_kl(1e-6)] if stopped else [])]).train()
    first, last = (2, 4) if stopped else (4, 6)
    assert witness.events == [("rollout", 1, 0), ("update", 1, first), ("rollout", 2, first), ("update", 2, last)]


def test_only_the_main_process_writes(tmp_path):
    columns = {"token": ["a"], "logprob": [-1.0], "reward": [0.0], "advantage": [0.5]}
    place = {"rollout": 1, "step": 0, "kl_coef": 0.0, "truncated": False, "prompt_ids": [1], "completion_ids": [2]}
    written = trace_file(tmp_path, 1)
    write_traces(written, [Trace(prompt="p", score=1.0, columns=columns, **place)])
    before, callback = written.read_text(), TokenTraceCallback()
    other = SimpleNamespace(is_world_process_zero=False, global_step=0, max_steps=4)
    where, state = PPOConfig(output_dir=str(tmp_path)), SimpleNamespace(rollouts=1)
    callback.on_rollout_end(where, other, None, rollout=None, transcript=None, metrics=None, ppo_state=state)
    callback.on_update_end(where, other, None, model=None, rollout=None, ppo_state=state)
    callback.on_train_end(where, other, None)
    assert list(written.parent.iterdir()) == [written]
    assert written.read_text() == before
