"""python -m hfppo.token_trace: a checkpoint's numbers for any prompt, friendly errors, no code from checkpoints."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from helpers.runs import SUMS, small_trainer
from helpers.tiny import tiny_model
from hfppo import PPOConfig, TokenTable, TokenTraceCallback
from hfppo.saving.manifest import seal
from hfppo.token_trace.__main__ import main
from hfppo.token_trace.from_checkpoint import trace_prompt

PROMPT = "请问1+1=2？"
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"mode": "max"},
    "eval_strategy": "epoch",
}


class Run:
    """A short run with one checkpoint at its end, and its trainer's token table for the prompt."""

    def __init__(self, folder: Path, model: PreTrainedModel | None = None, **config):
        (model or tiny_model()).save_pretrained(folder / "base")
        saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
        settings = {"kl_coef": 0.1, "gamma": 0.98, "temperature": 0.8}
        self.trainer = small_trainer(
            folder / "out",
            {**saving, **settings, **config},
            model=str(folder / "base"),
            train_dataset=SUMS.take(8),
            eval_dataset=Dataset.from_list([{"prompt": PROMPT}]),
            callbacks=[TokenTraceCallback()],
        )
        self.trainer.train()
        self.checkpoint = folder / "out/checkpoint-4"
        rollout = self.trainer.rollout([PROMPT])
        kl = self.trainer.args.reward_kl_estimator
        self.table = TokenTable.from_rollout(rollout, 0, self.trainer.processing_class, kl)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


def assert_same(table: TokenTable, expected: TokenTable) -> None:
    assert (table.prompt, len(table.rows)) == (expected.prompt, len(expected.rows))
    for row, other in zip(table.rows, expected.rows, strict=True):
        assert row.token == other.token
        torch.testing.assert_close(*(torch.tensor([x or 0.0 for x in [*vars(r).values()][1:]]) for r in (row, other)))


def test_table_of_a_checkpoint_is_that_of_the_trainer_that_wrote_it(run):
    assert any(abs(row.kl) > 0.01 for row in run.table.rows)  # the adapter has moved, and so have the values
    assert any(abs(row.value) > 0.01 for row in run.table.rows)
    trace, _ = trace_prompt(run.checkpoint, PROMPT, score=run.table.score)
    assert_same(trace, run.table)
    assert (trace.step, trace.rollout, trace.kl_coef) == (4, 1, 0.1)


def test_table_of_a_run_without_critic_whose_sampler_was_its_anchor(tmp_path):
    """Its groups do not divide the usual batch."""
    groups = {"num_generations": 3, "per_device_train_batch_size": 3}
    run = Run(tmp_path, advantage_estimator="rloo", policy_mode="bypass", **groups)
    trace, _ = trace_prompt(run.checkpoint, PROMPT, score=run.table.score)
    assert_same(trace, run.table)
    assert {row.value for row in trace.rows} == {None}
    given, _ = trace_prompt(run.checkpoint, PROMPT, completion="是的")  # which no sampler has log-probs of
    assert all(row.logprob < 0 for row in given.rows)


def test_table_of_a_run_with_autocast_whatever_it_was_told_about_training(tmp_path, caplog):
    """A schedule that follows evaluations, a number of episodes, rollouts ahead."""
    told = {**PLATEAU, "total_episodes": 16, "per_device_train_batch_size": 8, "rollouts_ahead": 1}
    run = Run(tmp_path, bf16=True, model_init_kwargs={"dtype": "bfloat16"}, **told)
    caplog.clear()
    trace, _ = trace_prompt(run.checkpoint, PROMPT, score=run.table.score)
    assert_same(trace, run.table)
    assert caplog.messages == []


def test_a_trace_writes_no_file_and_uses_one_gpu_of_several(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PPOConfig, "n_gpu", 2)
    before = sorted(run.checkpoint.parent.rglob("*"))
    trace_prompt(run.checkpoint, PROMPT)
    assert (sorted(run.checkpoint.parent.rglob("*")), list(tmp_path.iterdir())) == (before, [])


def test_another_base_than_the_runs_is_warned_of(run, tmp_path, caplog):
    trace_prompt(run.checkpoint, PROMPT)
    assert caplog.messages == []
    tiny_model(seed=7).save_pretrained(tmp_path / "other")
    trace_prompt(run.checkpoint, PROMPT, base=str(tmp_path / "other"), ref_model=str(tmp_path / "other"))
    assert [message.split(" (")[0] for message in caplog.messages] == ["base", "reference"]
    assert all("is not the run's" in message for message in caplog.messages)


def test_given_completion_is_looked_at_instead_of_a_sampled_one(run):
    trace, _ = trace_prompt(run.checkpoint, PROMPT, completion="是的", score=1.0)
    assert [row.token for row in trace.rows] == ["是", "的", "<eos>"]
    ids = torch.tensor([trace.prompt_ids + trace.completion_ids])
    with torch.no_grad():
        logits = run.trainer.model(input_ids=ids).logits[0, -4:-1] / 0.8
    expected = logits.log_softmax(-1)[range(3), trace.completion_ids]
    assert [row.logprob for row in trace.rows] == pytest.approx(expected.tolist(), abs=1e-5)
    last = trace.rows[-1]
    assert last.reward == pytest.approx(1.0 - 0.1 * last.kl)


def test_without_a_score_what_rests_on_it_is_unknown(run, capsys):
    trace, _ = trace_prompt(run.checkpoint, PROMPT)
    assert trace.score is None
    assert {(row.reward, row.td_error, row.return_, row.advantage) for row in trace.rows} == {(None,) * 4}
    assert [row.value for row in trace.rows] == pytest.approx([row.value for row in run.table.rows], abs=1e-5)
    main([str(run.checkpoint), PROMPT])
    assert "add --score 1" in capsys.readouterr().out


def test_command_prints_the_table_and_writes_the_page(run, tmp_path, capsys):
    page = tmp_path / "new/page.html"
    main([str(run.checkpoint), PROMPT, "--score", "1", "--html", str(page)])
    shown = capsys.readouterr().out
    assert "score 1" in shown
    assert f"{run.table.rows[0].logprob:.4f}" in shown
    assert "step 4, rollout 1: β = 0.1, γ = 0.98" in shown
    assert PROMPT in page.read_text()


def test_nothing_in_a_checkpoint_runs_as_code(run, tmp_path, monkeypatch):
    """Its pickles are not opened, and it cannot ask for a base's code to be trusted."""
    checkpoint = shutil.copytree(run.checkpoint, tmp_path / "checkpoint")
    bomb = type("Bomb", (), {"__reduce__": lambda self: (Path.touch, (tmp_path / "exploded",))})()
    for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "pytorch_model.bin", "adapter_model.bin"):
        (checkpoint / name).write_bytes(pickle.dumps(bomb))
    path = checkpoint / "ppo_state_0.json"
    content = json.loads(path.read_text())
    content["run"]["settings"]["model_init_kwargs"] = {"trust_remote_code": True, "dtype": "float32"}
    path.write_text(json.dumps(content))
    seal(Path(checkpoint))
    asked, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **kwargs: asked.append(kwargs) or load(*a, **kwargs)
    )
    trace_prompt(checkpoint, PROMPT)
    assert asked == [{"trust_remote_code": False, "dtype": "float32", "revision": None}]
    assert not (tmp_path / "exploded").exists()


def test_errors_say_what_to_do(run, tmp_path):
    out, gone = run.checkpoint.parent, tmp_path / "gone"
    shutil.copytree(run.checkpoint, tmp_path / "moved")
    config = json.loads((tmp_path / "moved/adapter_config.json").read_text())
    (tmp_path / "moved/adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(gone)}))
    seal(tmp_path / "moved")
    (tmp_path / "torn/checkpoint-20").mkdir(parents=True)
    for arguments, *said in (
        ([str(tmp_path / "torn"), PROMPT], "torn is not a whole checkpoint", "manifest.json", "out/checkpoint-120"),
        ([str(gone), PROMPT], "gone is not a whole checkpoint", "it is not a folder", "out/checkpoint-120"),
        ([str(tmp_path / "moved"), PROMPT], "base", "cannot be loaded", "--base"),
    ):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert [words for words in said if words not in str(error.value)] == []
    main([str(tmp_path / "moved"), PROMPT, "--base", str(out.parent / "base")])


def test_a_whole_checkpoint_of_another_trainer_is_refused(run, tmp_path):
    folder = Path(shutil.copytree(run.checkpoint, tmp_path / "checkpoint"))
    (folder / "ppo_state_0.json").unlink()
    seal(folder)
    with pytest.raises(SystemExit, match=r"of PPOTrainer: it has no ppo_state_0\.json"):
        main([str(folder), PROMPT])


def test_a_page_that_cannot_be_written_ends_with_one_line(run, tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*Is a directory"):
        main([str(run.checkpoint), PROMPT, "--html", str(tmp_path)])


def test_more_tokens_than_a_model_has_positions_are_refused(tmp_path):
    """GPT-2 has learnt its positions, and none for those beyond; those of the tiny Llama have no end."""
    sizes = {"vocab_size": 26, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    small = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0))
    run = Run(tmp_path, small)
    for given, prompt, completion in (
        (["1" * 11], 11, 6),
        (["1" * 2, "--completion", "1" * 14], 2, 15),  # and the end of sequence
    ):
        said = f"of up to {prompt} tokens and max_completion_length={completion} .* 16 positions"
        with pytest.raises(SystemExit, match=said):
            main([str(run.checkpoint), *given])
    longest, _ = trace_prompt(run.checkpoint, "1" * 2, completion="1" * 13)
    assert len(longest.rows) == 14


def test_a_reference_with_fewer_positions_is_named(run, tmp_path):
    tiny_model(max_position_embeddings=8).save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match="ref_model's 8 positions"):
        trace_prompt(run.checkpoint, PROMPT, ref_model=str(tmp_path / "short"))
