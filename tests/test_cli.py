"""hfppo.cli: arguments from flags and YAML files, the help, and data and functions by name."""

import inspect
import json
import re
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import arithmetic
import pytest
import torch
from trl import SFTConfig

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import ActorArguments, DataArguments, PPOParser, RewardArguments, actor_config, load_data, load_reward

BASE = str(arithmetic.FOLDER / "base")


@dataclass
class Script:
    """Arguments of this script."""

    critic: str = field(default="adapter", metadata={"help": "The critic."})


@dataclass
class Actor(ActorArguments):
    """Arguments of the actor."""

    model_name_or_path: str = field(default=BASE, metadata={"help": "The base."})


def parse(*flags: str):
    return PPOParser((Script, PPOConfig, Actor), prog="script").parse_args_and_config([*flags])


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What the parser says of these arguments before it ends."""
    with pytest.raises(SystemExit) as end:
        parse(*flags)
    assert end.value.code == 2
    said = capsys.readouterr().err
    return said.partition("script: error: ")[2]


def helped(capsys: pytest.CaptureFixture[str], *flags: str, types=(Script, PPOConfig, Actor)) -> str:
    with pytest.raises(SystemExit) as end:
        PPOParser(types).parse_args_and_config([*flags])
    assert not end.value.code
    return capsys.readouterr().out


@pytest.fixture
def config(tmp_path):
    """Write a YAML file; returns the flag with its path."""

    def write(text: str) -> list[str]:
        (tmp_path / "run.yaml").write_text(text)
        return ["--config", str(tmp_path / "run.yaml")]

    return write


def test_all_unknown_names_of_file_and_flags_are_refused_at_once(config, capsys):
    flags = ["--lora-rr", "4", "--critc=shared", "--top_p", "0.9", "--response_length", "53"]
    lines = refused(capsys, *config("kl_coeff: 0.1\nbeta: 0.04\nepsilon: 0.3\n"), *flags).splitlines()
    assert lines[0] == "PPOConfig has no field"
    wanted = {"kl_coeff": "kl_coef", "beta": "kl_loss_coef", "lora_rr": "lora_r", "critc": "critic", "top_p": "1.0"}
    assert [line.strip().split(":")[0] for line in lines[1:6]] == [repr(name) for name in wanted]
    assert [word for word, line in zip(wanted.values(), lines[1:], strict=False) if word not in line] == []


def test_a_flag_goes_by_its_whole_name_only(capsys):
    """argparse takes the beginning of a name for it."""
    assert refused(capsys, "--see", "3").startswith("PPOConfig has no field 'see'")
    with pytest.raises(SystemExit):
        PPOParser((DataArguments, SFTConfig)).parse_args_and_config(["--see", "3"])
    assert "there is no argument for see" in capsys.readouterr().err


def test_names_of_trl_in_file_and_flags_are_translated(config, capsys):
    grpo = "use_cpu: true\nadvantage_estimator: grpo\nnum_generations: 4\nbeta: 0.04\ntop_k: 0\nscale_rewards: false\n"
    flags = ["--epsilon", "2e-1", "--num_iterations=2", "--response_length", "53", "--disable_dropout"]
    _, args, _ = parse(*config(grpo), *flags, "--top_p", "1.0")
    assert (args.kl_loss_coef, args.kl_coef, args.cliprange, args.num_ppo_epochs) == (0.04, 0.0, 0.2, 2)
    assert (args.max_completion_length, args.scale_rewards) == (53, "none")
    said = refused(capsys, *config(grpo), "--epsilon", "0.3", "--cliprange", "0.2")
    assert "epsilon=0.3" in said
    assert "cliprange" in said


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("policy_mode", "sideways", "choose from '?decoupled"),
        ("learning_rate", "fast", "float value: 'fast'"),
        ("gamma", "1.5", r"gamma=1.5 must be in \[0, 1\]"),
    ],
)
def test_a_wrong_value_in_a_flag_or_a_file_is_named(config, capsys, name, value, words):
    for flags in ([f"--{name}", value], config(f"{name}: {value}\n")):
        said = refused(capsys, "--use_cpu", "true", *flags)
        assert name in said
        assert re.search(words, said)


def test_all_values_out_of_their_range_are_named_at_once(config, capsys):
    file = config("use_cpu: true\nnum_mini_batches: 2.5\nkl_coef: -1\n")
    lines = refused(capsys, *file, "--gamma", "1.5").splitlines()
    named = ["  num_mini_batches", "  kl_coef", "  gamma"]
    assert [line.partition("=")[0] for line in lines[:4]] == ["3 fields have wrong values", *named]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("a: [", "flow node"),
        ("- a", "YAML mapping"),
        ("lora_r: x", "--lora_r.* int value: 'x'"),
        ("model_name_or_path: null", "model_name_or_path is missing; give the id or path"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(config, capsys, text, words):
    file = ["--config", "no.yaml"] if text is None else config(f"{text}\n")
    assert re.search(words, refused(capsys, *file, "--use_cpu", "true"))
    assert refused(capsys, "--config").startswith("--config needs the path")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        ("resume_from_checkpoint: true", True),
        ("resume_from_checkpoint: 'False'", None),
        ("resume_from_checkpoint: auto", "auto"),
        ("resume_from_checkpoint: out/checkpoint-4", "out/checkpoint-4"),
    ],
)
def test_what_is_resumed_from_is_read_from_a_yaml_file_as_from_a_flag(config, tmp_path, line, expected):
    file = config(f"output_dir: {tmp_path}\nuse_cpu: true\n{line}\n")
    (args,) = PPOParser((PPOConfig,)).parse_args_and_config(file)
    assert (args.resume_from_checkpoint, type(args.resume_from_checkpoint)) == (expected, type(expected))


def test_the_help_has_our_fields_and_the_others_on_demand(config, capsys):
    shown = helped(capsys, "--help")
    own = [*inspect.get_annotations(PPOConfig), *inspect.get_annotations(Script)]
    assert [name for name in own if not re.search(f"^  --{name}[, \n]", shown, flags=re.MULTILINE)] == []
    assert "--no_use_peft" not in shown
    assert "--weight_decay" not in shown

    assert "(default: 0.125)" in helped(capsys, *config("weight_decay: 0.125\n"), "--help")
    everything = helped(capsys, "--help-all")
    assert [f.name for cls in (PPOConfig, Actor) for f in fields(cls) if f"--{f.name}" not in everything] == []
    some = helped(capsys, "--help", "learning_rate")
    assert re.findall(r"^  (--\w+)", some, flags=re.MULTILINE) == ["--learning_rate", "--critic_learning_rate"]
    meant = "PPOConfig has no field 'clip_range': did you mean cliprange or "
    assert refused(capsys, "--help", "clip_range").startswith(meant)
    assert refused(capsys, "max_steps=3").startswith("PPOConfig has no field 'max_steps=3': did you mean max_steps")
    of_sft = helped(capsys, "--help", types=(DataArguments, SFTConfig))
    assert "--dataset_name" in of_sft
    assert "--weight_decay" not in of_sft


def test_a_single_reward_function_needs_no_list_in_a_yaml_file(config):
    (parsed,) = PPOParser(RewardArguments).parse_args_and_config(config("reward_funcs: arithmetic.right_answer\n"))
    assert parsed.reward_funcs == ["arithmetic.right_answer"]


def test_an_actor_without_an_adapter_is_refused():
    with pytest.raises(ValueError, match=r"use_peft=False: the actor is always an adapter.*leave use_peft out"):
        actor_config(Actor(use_peft=False, lora_r=7))


@pytest.mark.parametrize("given", [["q_proj"], "q_proj", ["all-linear"], ["q_proj", "k_proj"], r".*\.q_proj", None])
def test_a_single_target_module_is_a_name_and_no_pattern(given):
    names = ["q_proj"] if given == "q_proj" else "all-linear" if given == ["all-linear"] else given
    assert ActorArguments(lora_target_modules=given).lora_target_modules == names


def test_flags_of_the_model_reach_it(tmp_path):
    flags = ["--load_in_4bit", "true", "--dtype", "bfloat16", "--lora_r", "3", "--output_dir", str(tmp_path)]
    _, args, actor = parse(*flags, "--use_cpu", "true", "--model_init_kwargs", '{"attn_implementation": "eager"}')
    assert json.loads(args.to_json_string())["model_init_kwargs"]["quantization_config"]["load_in_4bit"]
    assert args.model_init_kwargs["revision"] == "main"
    config = actor_config(actor)
    trainer = PPOTrainer(BASE, lambda completions, **kwargs: [0.0 for _ in completions], args, peft_config=config)
    assert trainer.model.causal_lm.is_loaded_in_4bit
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer.model.causal_lm.dtype == torch.bfloat16
    assert trainer.model.peft_config["default"].r == 3
    assert trainer.model.peft_config["default"].revision is None  # a folder has none

    trainer.model.save_pretrained(tmp_path / "adapter")
    adapter = replace(actor, model_name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"lora_r: model_name_or_path=.* is an adapter"):
        actor_config(adapter)
    assert actor_config(replace(adapter, lora_r=16)) is None


def test_without_files_the_working_folder_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "of_something_else.jsonl").write_text('{"prompt": "1"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="data_files is missing, and dataset_name='json' only says"):
        load_data(DataArguments())
    given = DataArguments(data_files="of_something_else.jsonl")
    assert load_data(given)[0]["prompt"] == ["1"]
    with pytest.raises(ValueError, match="train_split='some' is not in json, which has train"):
        load_data(replace(given, train_split="some"))


def test_names_of_reward_functions_and_models(tmp_path, monkeypatch):
    assert load_reward("arithmetic.right_answer") is arithmetic.right_answer
    assert load_reward("org/reward-model-1.5b") == "org/reward-model-1.5b"
    monkeypatch.setattr(sys, "path", list(sys.path))
    function = "def brevity(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    Path(tmp_path / "my_rewards.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    assert load_reward("my_rewards.brevity")(["a"]) == [0.0]
