"""Invariants of PPO with context between the turns, on episodes that a small model plays."""

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
import rich
import torch
from datasets import Dataset
from torch.testing import assert_close

from helpers.agents import Chatter, talking_trainer
from helpers.runs import assert_same_end, assert_same_tensors, critic_values, gradients, logged, logs
from hfppo import RunPageCallback, TokenTraceCallback
from hfppo.functional import turn_starts
from hfppo.reporting.token_table import HEADINGS
from hfppo.reporting.traces import read_traces, trace_file

SAVING = {"save_strategy": "steps", "save_steps": 1}
PROMPTS = [[{"role": "user", "content": f"hi {n}"}] for n in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("played")


@pytest.fixture(scope="module")
def played(folder):
    """A trainer after a run with a checkpoint of each step, a rollout of it, and what the run has printed."""
    trainer = talking_trainer(folder, {**SAVING, "log_completions": True}, callbacks=[TokenTraceCallback()])
    trainer.remove_callback(RunPageCallback)
    with redirect_stdout(StringIO()) as printed:
        trainer.train()
    return trainer, trainer.rollout(PROMPTS), printed.getvalue()


def test_first_ratio_is_one_kl_starts_at_zero_and_sampling_agrees(played):
    trainer, *_ = played
    assert max(logged(trainer, "policy/first_ratio_deviation")) < 1e-5  # rounding of rows of other lengths
    assert max(logged(trainer, "mismatch/max")) < 1e-4
    kl = logged(trainer, "kl_k3")
    assert kl[0] == 0.0
    assert kl[-1] > 1e-4
    assert min(logged(trainer, "turns/mean")) > 1


def test_numbers_of_sampled_tokens_are_those_of_the_plain_model(played):
    """One episode at a time, without padding; a turn's first value is that of the prefix alone."""
    trainer, rollout, _ = played
    actor = trainer.model.eval()
    seen = 0
    for i in range(len(rollout)):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]]
        completion = rollout.completion_ids[i][rollout.real[i]]
        ids = torch.cat([prompt, completion])[None]
        columns = rollout.mask[i].nonzero().flatten()
        before = len(prompt) - 1 + columns
        with torch.no_grad():
            logp = actor(input_ids=ids).logits[0].log_softmax(-1)[before, completion[columns]]
            values = critic_values(actor, ids)[before]
            for start in turn_starts(rollout.mask)[i].nonzero().flatten().tolist():
                prefix = ids[:, : len(prompt) + start]
                alone = critic_values(actor, prefix)[-1]
                assert_close(rollout.values[i, start], alone)
                seen += 1
        assert_close(rollout.old_logprobs[i, columns], logp)
        assert_close(rollout.values[i, columns], values)
    assert seen > len(rollout)
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "rewards", "advantages", "returns"):
        assert not getattr(rollout, name)[~rollout.mask].any(), name


def test_nothing_on_context_reaches_the_update(played):
    trainer, rollout, _ = played
    expected = gradients(trainer, rollout, 1)
    tensors = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "advantages", "returns")
    garbage = {name: getattr(rollout, name).where(rollout.mask, torch.nan) for name in tensors}
    assert any(x.isnan().any() for x in garbage.values())
    assert_same_tensors(gradients(trainer, replace(rollout, **garbage), 1), expected)


def test_neither_cuts_nor_padding_change_a_gradient(played):
    trainer, rollout, _ = played
    expected = gradients(trainer, rollout, 1)
    wide = {n: torch.nn.functional.pad(x, (0, 3)) for n, x in rollout.tensors().items() if x.dim() == 2}
    wide |= {n: torch.nn.functional.pad(x, (2, 0)) for n, x in rollout.tensors().items() if n.startswith("prompt_")}
    for changed, pieces in ((rollout, 2), (rollout, 8), (replace(rollout, **wide), 1)):
        assert_close(gradients(trainer, changed, pieces), expected, rtol=1e-4, atol=1e-7)


def test_a_run_resumed_within_a_rollout_plays_nothing_again(played, folder, tmp_path):
    straight, resets = played[0], Chatter.resets
    for step in (2, 5):
        resumed = talking_trainer(tmp_path / f"resumed-{step}", SAVING)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert_same_end(resumed, straight)
        assert logs(resumed) == logs(straight)
    assert resets == Chatter.resets - 8  # of step 2 the second rollout was to come, of step 5 none


def test_evaluation_plays_the_same_episodes_each_time_and_changes_no_training(played, tmp_path):
    trainer = talking_trainer(tmp_path)
    first, again = (trainer.evaluate(trainer.train_dataset) for _ in range(2))
    scores = [k for k in first if k.startswith(("eval_reward", "eval_turns", "eval_completions"))]
    assert {k: first[k] for k in scores} == {k: again[k] for k in scores}
    assert first["eval_turns/mean"] > 1
    trainer.train()
    assert_same_end(trainer, played[0])


def test_changed_tools_are_refused_on_resume(tmp_path):
    """The prompts show the names of tools only."""

    def trainer(folder, description):
        def look() -> str:
            return "a"

        look.__doc__ = description
        given = {"environment_factory": None, "tools": [look], "reward_funcs": lambda completions, **_: [0.0] * 8}
        return talking_trainer(tmp_path / folder, {**SAVING, "max_steps": 1}, **given)

    trainer("out", "Look.").train()
    with pytest.raises(ValueError, match=r"was written with tools=.*Look\..*, this run has .*Listen\."):
        trainer("other", "Listen.").train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))


def test_traces_show_turns_and_leave_context_without_numbers(played, folder):
    traces = read_traces(trace_file(folder, 1))
    assert traces
    for trace in traces:
        rows = trace.rows
        assert len(rows) == len(trace.completion_ids)
        of_context = [row for row in rows if row.turn is None]
        assert {getattr(row, name) for row in of_context for name in HEADINGS} <= {None}
        assert not any(row.counted for row in of_context)
        turns = [row.turn for row in rows if row.turn is not None]
        assert turns == sorted(turns)
        assert set(turns) == set(range(1, turns[-1] + 1))
        assert all(row.ratio is not None and row.value is not None for row in rows if row.turn is not None)
    assert any(row.turn is None for trace in traces for row in trace.rows)
    rich.print(traces[0])


def test_completions_of_several_turns_are_printed_and_saved_with_roles(played, folder):
    assert "assistant" in played[2]
    assert "user" in played[2]
    saved = Dataset.from_parquet(str(folder / "completions" / "completions_00000.parquet"))
    roles = [[message["role"] for message in messages] for messages in saved["completion"]]
    assert all(some[:2] in (["assistant"], ["assistant", "user"]) for some in roles)
    assert max(map(len, roles)) > 2
