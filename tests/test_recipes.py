"""Recipes run from copies of their own files, resume, and refuse bad input by name."""

import json
import runpy
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import arithmetic
import pytest
import torch
import yaml
from build_arithmetic_base import BuildArguments
from build_arithmetic_base import main as build
from safetensors.torch import load_file

from helpers.processes import ROOT
from helpers.recipes import RECIPES, SHORT, run_copy
from hfppo import PPOConfig

SHIPPED = RECIPES / "arithmetic"


@pytest.fixture
def few(tmp_path: Path):
    """Write the first rows of a shipped file; returns the path."""

    def write(name: str) -> str:
        (tmp_path / name).write_text("".join((SHIPPED / name).read_text().splitlines(keepends=True)[:8]))
        return str(tmp_path / name)

    return write


def test_arithmetic_leaves_what_trainers_examples_leave_and_resumes(tmp_path, few, capsys, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    flags = ["--test_file", few("test.jsonl"), "--critic_pretraining_completions", "32", "--save_steps", "1"]
    straight, resumed = tmp_path / "straight/out", tmp_path / "resumed/out"
    results = run_copy("arithmetic/arithmetic.py", straight.parent, *flags)
    for split in ("before", "after"):
        for mode in ("sampled", "greedy"):
            assert 0 <= results[f"{split}_{mode}_accuracy"] <= 1
    assert results["train_runtime"] > 0
    assert results["critic_pretraining_completions"] == 32
    assert results["critic_pretraining_r2"] <= 1
    assert threads == [1]
    shown = capsys.readouterr().out
    assert [words for words in ("before training", "after training", "advantage") if words not in shown] == []

    resumed.mkdir(parents=True)
    (straight / "checkpoint-1").rename(resumed / "checkpoint-1")
    run_copy("arithmetic/arithmetic.py", resumed.parent, *flags, "--resume_from_checkpoint", "true")
    assert not list(resumed.glob("before_*"))  # measured by the run that is gone on with
    expected, got = (load_file(out / "adapter_model.safetensors") for out in (straight, resumed))
    assert all((expected[name] == got[name]).all() for name in expected)


@pytest.mark.slow
@pytest.mark.skipif("activation_checkpointing" not in PPOConfig.__dataclass_fields__, reason="transformers < 5.20")
def test_the_road_from_demonstrations_to_ppo_in_small(tmp_path, few):
    """Three recipes of two steps each; the adapters of the first two feed the third."""

    def run(recipe: str, train: str, test: str, *flags: str):
        files = json.dumps({"train": few(train), "test": few(test)})
        return run_copy(f"{recipe}.py", tmp_path / recipe, "--data_files", files, "--save_strategy", "no", *flags)

    base = ["--model_name_or_path", str(SHIPPED / "base")]
    run("sft", "demonstrations.jsonl", "demonstrations.jsonl", *base)
    results = run("reward_model", "preferences.jsonl", "test_preferences.jsonl", *base)
    assert 0 <= results["eval_accuracy"] <= 1
    sft, reward = (str(tmp_path / name / "out") for name in ("sft", "reward_model"))
    (tmp_path / "ppo/copy").mkdir(parents=True)
    shutil.copy(arithmetic.__file__, tmp_path / "ppo/copy")
    flags = ["--model_name_or_path", sft, "--reward_funcs", reward, "arithmetic.right_answer"]
    results = run("ppo", "train.jsonl", "test.jsonl", *flags, "--compute_metrics", "arithmetic.accuracy")
    assert {"before_sampled_accuracy", "after_greedy_accuracy", "after_sampled_rewards/out/mean"} <= results.keys()
    assert load_file(tmp_path / "ppo/out/critic/critic.safetensors")


@pytest.mark.parametrize("name", ["bpco", "pact", "sao"])
def test_ppo_runs_with_the_settings_of_a_paper(tmp_path, few, monkeypatch, name):
    flags = ["--model_name_or_path", str(SHIPPED / "base"), "--reward_funcs", "arithmetic.right_answer", *SHORT]
    flags += ["--data_files", few("train.jsonl"), "--num_mini_batches", "1", "--max_completion_length", "8"]
    config = ["--config", str(RECIPES / f"critics/{name}.yaml"), "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["ppo.py", *config, *flags])
    runpy.run_path(str(RECIPES / "ppo.py"), run_name="__main__")
    saved = json.loads((tmp_path / "out/critic/critic_config.json").read_text())
    links = {"bpco": "arctan", "pact": "sigmoid", "sao": None}
    assert saved.get("value_range", {}).get("link") == links[name]


def test_the_yaml_file_of_ppo_names_functions_and_files_of_a_clone():
    settings = yaml.safe_load((RECIPES / "ppo.yaml").read_text())
    assert all((ROOT / path).is_file() for path in settings["data_files"].values())
    for name in (settings["reward_funcs"][1], settings["compute_metrics"]):
        module, _, function = name.rpartition(".")
        assert arithmetic.__file__ == str(ROOT / f"{module.replace('.', '/')}.py")
        assert callable(getattr(arithmetic, function))


def test_only_small_models_have_one_thread():
    for path in RECIPES.rglob("*.py"):
        for before, line in pairwise(path.read_text().splitlines()):
            if "set_num_threads" in line and not path.name.startswith(("build_", "ppo_in_one_file")):
                assert "trainer.model.parameters()) < 10**7:" in before, path


def test_building_the_base_in_small(tmp_path):
    few = {"clean_steps": 2, "sloppy_steps": 2, "batch_size": 8, "num_test_prompts": 4, "num_train_prompts": 4}
    build(BuildArguments(output_dir=str(tmp_path), **few))
    row = json.loads((tmp_path / "test.jsonl").read_text().splitlines()[0])
    assert row.keys() == {"prompt", "answer"}
    assert (tmp_path / "base/model.safetensors").is_file()


def test_a_dataset_without_pairs_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"json has the columns prompt, answer, and no pairs; rename"):
        run_copy("reward_model.py", tmp_path, "--data_files", str(tmp_path / "rows.jsonl"))
