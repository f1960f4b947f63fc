"""Completions ranked by the critic that a run has saved."""

from pathlib import Path

import best_of as recipe
import pytest
import torch
from torch.testing import assert_close

PROMPT = "请问1+2="


@pytest.fixture
def trained(make_trainer, base_path):
    """Return a maker of trained trainers, whose folder and base lie on disk."""

    def train(critic="adapter", **config):
        trainer = make_trainer({"max_steps": 4, **config}, model=base_path, critic=critic)
        trainer.train()
        trainer.save_model()
        return trainer

    return train


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_it_has_the_numbers_of_the_run(trained, critic):
    trainer = trained(critic)
    loaded = recipe.load_run(trainer.args.output_dir, max_completion_length=6, seed=trainer.args.seed, use_cpu=True)
    rollout, expected = (made.rollout([PROMPT] * 3) for made in (loaded, trainer))
    assert expected.values.abs().max() > 0.01
    assert torch.equal(rollout.completion_ids, expected.completion_ids)
    for name in ("values", "old_logprobs"):
        assert_close(getattr(rollout, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_the_best_comes_first_and_n_only_adds(trained):
    folder, settings = trained().args.output_dir, {"max_completion_length": 6, "use_cpu": True}
    trainer = recipe.load_run(folder, **settings)
    ranked = recipe.best_of(trainer, PROMPT, 8)
    values = [table.rows[-1].value for table in ranked]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
    fewer = recipe.best_of(trainer, PROMPT, 2)
    of_seed_1 = recipe.best_of(recipe.load_run(folder, seed=1, **settings), PROMPT, 8)
    texts, few, other = ([[row.token for row in x.rows] for x in tables] for tables in (ranked, fewer, of_seed_1))
    assert [text in texts for text in few] == [True, True]
    assert other != texts


def test_a_critic_of_some_layers_and_a_conversation(trained, capsys):
    folder = trained(critic_layers=1).args.output_dir
    recipe.main([folder, "1+1=", "-n", "1", "--chat", "--critic_layers", "1", "--max_completion_length", "2"])
    assert "log π per token" in capsys.readouterr().out


def test_the_command_shows_each_completion_with_its_values(trained, capsys):
    folder = trained().args.output_dir
    recipe.main([folder, PROMPT, "-n", "3", "--max_completion_length", "4"])
    shown = capsys.readouterr().out
    place = 0
    for table in recipe.best_of(recipe.load_run(folder, max_completion_length=4, seed=0), PROMPT, 3):
        place = shown.index(f"{table.rows[-1].value:.3f}", place) + 1  # after the one before, or a ValueError
    with pytest.raises(ValueError, match="no-such"):
        recipe.main([str(Path(folder) / "no-such"), "1="])
