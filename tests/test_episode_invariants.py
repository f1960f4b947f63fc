"""Invariants of PPO with context between the turns, on episodes that a small model plays."""

from dataclasses import replace

import pytest
import rich
import torch
from datasets import Dataset
from torch.testing import assert_close

from helpers.agents import Chatter, talking_trainer
from helpers.runs import critic_values, final_state, gradients, logged, logs
from hfppo import PlotCallback, TokenTraceCallback
from hfppo.functional import gae, turn_ends, turn_factors, turn_starts
from hfppo.token_trace.record import read_traces, trace_file
from hfppo.token_trace.table import TokenRow

PROMPTS = [[{"role": "user", "content": f"hi {n}"}] for n in range(8)]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A trainer after some steps, and a rollout of it."""
    trainer = talking_trainer(tmp_path_factory.mktemp("played"))
    trainer.remove_callback(PlotCallback)
    trainer.train()
    return trainer, trainer.rollout(PROMPTS)


def test_first_ratio_is_one_kl_starts_at_zero_and_sampling_agrees(played):
    trainer, _ = played
    assert max(logged(trainer, "policy/first_ratio_deviation")) < 1e-5  # rounding of rows of other lengths
    assert max(logged(trainer, "mismatch/max")) < 1e-4
    kl = logged(trainer, "kl_k3")
    assert kl[0] == 0.0
    assert kl[-1] > 1e-4
    assert min(logged(trainer, "turns/mean")) > 1


def test_numbers_of_sampled_tokens_are_those_of_the_plain_model(played):
    """One episode at a time, without padding; a turn's first value is that of the prefix alone."""
    trainer, rollout = played
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


def test_credit_is_the_recursion_over_sampled_tokens(played):
    trainer, rollout = played
    ends = turn_ends(rollout.mask, rollout.context)
    factors = [turn_factors(within, between, ends) for within, between in ((1.0, 0.9), (0.95, 0.7))]
    advantages, returns = gae(rollout.rewards, rollout.values, rollout.mask, *factors)
    assert_close(rollout.advantages, advantages)
    assert_close(rollout.returns, returns)
    kl = trainer.args.kl_coef * (rollout.old_logprobs - rollout.ref_logprobs)
    assert_close((rollout.rewards + kl).sum(dim=1), rollout.scores)


def test_nothing_on_context_reaches_the_update(played):
    trainer, rollout = played
    expected = gradients(trainer, rollout, 1)
    tensors = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "advantages", "returns")
    garbage = {name: getattr(rollout, name).where(rollout.mask, torch.nan) for name in tensors}
    assert any(x.isnan().any() for x in garbage.values())
    for name, gradient in gradients(trainer, replace(rollout, **garbage), 1).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("pieces", [2, 8])
def test_cuts_change_no_gradient(played, pieces):
    trainer, rollout = played
    expected = gradients(trainer, rollout, 1)
    for name, gradient in gradients(trainer, rollout, pieces).items():
        assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7, msg=name)


def test_padding_changes_nothing(played):
    trainer, rollout = played
    expected = gradients(trainer, rollout, 1)
    wide = {n: torch.nn.functional.pad(x, (0, 3)) for n, x in rollout.tensors().items() if x.dim() == 2}
    wide |= {n: torch.nn.functional.pad(x, (2, 0)) for n, x in rollout.tensors().items() if n.startswith("prompt_")}
    for name, gradient in gradients(trainer, replace(rollout, **wide), 1).items():
        assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("size", [1, 3])
def test_an_episode_does_not_depend_on_the_rows_beside_it(tmp_path, size):
    whole = talking_trainer(tmp_path / "whole").rollout(PROMPTS)
    parts = talking_trainer(tmp_path / "parts", {"local_rollout_forward_batch_size": size}).rollout(PROMPTS)
    assert parts.completion_ids.equal(whole.completion_ids)
    assert parts.mask.equal(whole.mask)
    assert_close(parts.rewards, whole.rewards)


def test_a_run_resumed_within_a_rollout_plays_nothing_again(tmp_path):
    config = {"save_strategy": "steps", "save_steps": 1}
    straight = talking_trainer(tmp_path / "straight", config)
    straight.train()
    played = Chatter.resets
    for step in (2, 5):
        resumed = talking_trainer(tmp_path / f"resumed-{step}", config)
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        expected = final_state(straight)
        assert all(torch.equal(x, expected[name]) for name, x in final_state(resumed).items())
        assert logs(resumed) == logs(straight)
    assert played == Chatter.resets - 8  # of step 2 the second rollout was to come, of step 5 none


def test_evaluation_plays_the_same_episodes_each_time_and_changes_no_training(tmp_path):
    trainer = talking_trainer(tmp_path, {"max_steps": 4}, eval_dataset=None)
    first = trainer.evaluate(trainer.train_dataset)
    again = trainer.evaluate(trainer.train_dataset)
    scores = [k for k in first if k.startswith(("eval_reward", "eval_turns", "eval_completions"))]
    assert {k: first[k] for k in scores} == {k: again[k] for k in scores}
    assert first["eval_turns/mean"] > 1
    trainer.train()
    plain = talking_trainer(tmp_path / "plain", {"max_steps": 4})
    plain.train()
    expected = final_state(plain)
    assert all(torch.equal(x, expected[name]) for name, x in final_state(trainer).items())


def test_changed_tools_are_refused_on_resume(tmp_path):
    def look() -> str:
        """Look."""
        return "a"

    config = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "gamma_turn": None, "lam_turn": None}
    talking_trainer(tmp_path / "out", {**config, "gamma_turn": 0.9}).train()
    other = talking_trainer(
        tmp_path / "other",
        config,
        environment_factory=None,
        tools=[look],
        reward_funcs=lambda completions, **_: [0.0] * 8,
    )
    with pytest.raises(ValueError, match="tools"):
        other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))


def test_traces_show_turns_and_leave_context_without_numbers(tmp_path):
    trainer = talking_trainer(tmp_path, {"max_steps": 4})
    trainer.add_callback(TokenTraceCallback())
    trainer.train()
    traces = read_traces(trace_file(tmp_path, 1))
    assert traces
    for trace in traces:
        rows = trace.table.rows
        assert len(rows) == len(trace.completion_ids)
        of_context = [row for row in rows if row.turn is None]
        assert of_context == [TokenRow(row.token, counted=False) for row in of_context]
        turns = [row.turn for row in rows if row.turn is not None]
        assert turns == sorted(turns)
        assert set(turns) == set(range(1, turns[-1] + 1))
        assert all(row.ratio is not None and row.value is not None for row in rows if row.turn is not None)
    assert any(row.turn is None for trace in traces for row in trace.table.rows)
    rich.print(traces[0].table)


def test_completions_of_several_turns_are_printed_and_saved_with_roles(tmp_path, capsys):
    talking_trainer(tmp_path, {"max_steps": 4, "log_completions": True}).train()
    printed = capsys.readouterr().out
    assert "assistant" in printed
    assert "user" in printed
    saved = Dataset.from_parquet(str(tmp_path / "completions" / "completions_00000.parquet"))
    roles = [[message["role"] for message in messages] for messages in saved["completion"]]
    assert all(some[:2] in (["assistant"], ["assistant", "user"]) for some in roles)
    assert max(map(len, roles)) > 2
