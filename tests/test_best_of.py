"""Completions ranked by the critic that a run has saved."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from helpers.processes import environment
from helpers.scripted import answering
from helpers.tiny import tiny_model
from hfppo import ValueRanker
from hfppo.best_of import __main__ as command
from hfppo.models.critic import CRITIC_FOLDER

PROMPTS = ["请问1+2=", "3+4="]


@pytest.fixture
def trained(make_trainer, tmp_path):
    """Return a maker of trained trainers, whose folder and base lie on disk."""

    def train(critic="adapter", **config):
        tiny_model().save_pretrained(tmp_path / "base")
        trainer = make_trainer({"max_steps": 4, **config}, model=str(tmp_path / "base"), critic=critic)
        trainer.train()
        trainer.save_model()
        return trainer

    return train


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_it_has_the_numbers_of_the_run(trained, critic):
    """Values and log-probs of given completions are those of a rollout; the score is the value before the end."""
    trainer = answering(trained(critic), "12.", "3？4.")
    rollout = trainer.rollout(PROMPTS)
    ranker = ValueRanker.from_pretrained(trainer.args.output_dir)
    texts = ["12", "3？4"]
    judged = ranker.judge(PROMPTS, texts)
    for row, one in enumerate(judged):
        mask = rollout.mask[row]
        assert one.completion == texts[row]
        assert one.tokens == [*texts[row], "<eos>"]
        assert_close(torch.tensor(one.values), rollout.values[row][mask], rtol=1e-4, atol=1e-5)
        assert_close(torch.tensor(one.logprobs), rollout.old_logprobs[row][mask], rtol=1e-4, atol=1e-5)
        assert not one.truncated
    assert ranker.score(PROMPTS, texts) == [one.values[-1] for one in judged]


def test_the_best_comes_first_and_n_only_adds(trained):
    ranker = ValueRanker.from_pretrained(trained().args.output_dir, batch_size=3)
    ranked = ranker.best_of(PROMPTS[0], n=8, max_completion_length=6)
    values = [one.value for one in ranked]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
    few = ranker.best_of(PROMPTS[0], n=2, max_completion_length=6)
    assert {one.completion for one in few} <= {one.completion for one in ranked}
    other = ranker.best_of(PROMPTS[0], n=8, max_completion_length=6, seed=1)
    assert [one.completion for one in other] != [one.completion for one in ranked]


def test_conversations_are_rendered(trained):
    ranker = ValueRanker.from_pretrained(trained().args.output_dir)
    rendered = ranker.tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True, tokenize=False
    )
    (message,), (text,) = ([ranker.score([p], ["2"])] for p in ([{"role": "user", "content": "1+1="}], rendered))
    assert message == text


def test_what_it_refuses(trained, tmp_path):
    trainer = trained(advantage_estimator="reinforce_plus_plus")
    with pytest.raises(ValueError, match=f"holds no {CRITIC_FOLDER}/; give a folder"):
        ValueRanker.from_pretrained(trainer.args.output_dir)
    with pytest.raises(ValueError, match="2 prompts and 1 completions; give one for each prompt"):
        ValueRanker(trainer.model, trainer.processing_class).judge(PROMPTS, ["1"])


def test_the_command_shows_each_completion_with_its_values(trained, capsys):
    trainer = trained()
    command.main([trainer.args.output_dir, PROMPTS[0], "-n", "3", "--max_completion_length", "4"])
    shown = capsys.readouterr().out
    ranked = ValueRanker.from_pretrained(trainer.args.output_dir).best_of(PROMPTS[0], 3, 4)
    place = 0
    for one in ranked:  # each after the one before; index raises a ValueError
        place = shown.index(f"{one.value:.3f}", place) + 1
    with pytest.raises(SystemExit, match=r"error: .*no-such holds no critic/"):
        command.main([str(Path(trainer.args.output_dir) / "no-such"), "1="])


@pytest.mark.slow
def test_the_module_runs_without_a_warning(trained):
    run = subprocess.run(
        [sys.executable, "-m", "hfppo.best_of", trained().args.output_dir, "1=", "-n", "2"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "log π per token" in run.stdout
    assert "Warning" not in run.stderr
