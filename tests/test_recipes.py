"""Each recipe runs for a few steps, resumes, and refuses a typo."""

import inspect
import json
import re
import runpy
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import arithmetic
import ppo
import pytest
import reward_model
import sentiment
import sft
import torch
from dataset import DataArguments, load, load_reward_func
from run import ActorArguments, RecipeParser, actor_config, init_kwargs, use_one_thread_if_small
from safetensors.torch import load_file
from trl import ModelConfig, RewardConfig, SFTConfig

from hfppo import PPOConfig, PPOTrainer

RECIPES = Path(arithmetic.__file__).parent
YAML = str(RECIPES / "arithmetic.yaml")
SEEDED = [
    *("arithmetic", "gsm8k", "ppo", "sentiment", "sft", "reward_model"),
    *("build_arithmetic_base", "build_sentiment", "build_smollm2"),
]
SHORT = [
    *("--max_steps", "2", "--per_device_train_batch_size", "4", "--save_steps", "1", "--logging_steps", "1"),
    *("--use_cpu", "true", "--disable_tqdm", "true"),
]


def run_arithmetic(*flags: str) -> None:
    parser = RecipeParser((arithmetic.ArithmeticArguments, PPOConfig, arithmetic.ArithmeticActor))
    arithmetic.main(*parser.parse_args_and_config(["--config", YAML, *SHORT, *flags]))


@pytest.fixture
def few_rows(tmp_path: Path) -> list[str]:
    """Flags that keep the evaluations small."""
    test = (RECIPES / "arithmetic/test.jsonl").read_text().splitlines(keepends=True)[:8]
    (tmp_path / "few.jsonl").write_text("".join(test))
    return ["--test_file", str(tmp_path / "few.jsonl")]


@pytest.mark.parametrize(
    ("processes", "flags", "wanted"),
    [
        ("1", [], "rollouts of 24 completions (24 per process), 20 optimizer steps each"),
        ("4", [], "rollouts of 96 completions (24 per process), 20 optimizer steps each"),
        ("4", ["--config"], "rollouts of 48 completions (12 per process), 14 optimizer steps each"),
    ],
)
def test_help_shows_the_sizes_in_completions(tmp_path, monkeypatch, capsys, processes, flags, wanted):
    @dataclass
    class Sizes:
        per_device_train_batch_size: int = 2
        gradient_accumulation_steps: int = 3
        num_mini_batches: int = 4
        num_ppo_epochs: int = 5
        num_critic_epochs: int | None = None

    monkeypatch.setenv("WORLD_SIZE", processes)
    (tmp_path / "run.yaml").write_text("num_mini_batches: 2\nnum_critic_epochs: 7\n")
    with pytest.raises(SystemExit):
        RecipeParser(Sizes).parse_args_and_config([*flags, *([str(tmp_path / "run.yaml")] if flags else []), "--help"])
    assert wanted in " ".join(capsys.readouterr().out.split())


def test_arithmetic_leaves_what_trainers_examples_leave_and_resumes(tmp_path, few_rows, capsys):
    straight, resumed = str(tmp_path / "straight"), str(tmp_path / "resumed")
    pretraining = ["--critic_pretraining_completions", "32"]
    run_arithmetic(*few_rows, *pretraining, "--output_dir", straight)
    results = json.loads((tmp_path / "straight/all_results.json").read_text())
    for split in ("before", "after"):
        for mode in ("sampled", "greedy"):
            assert 0 <= results[f"{split}_{mode}_accuracy"] <= 1
    assert results["train_runtime"] > 0
    assert results["critic_pretraining_completions"] == 32
    assert results["critic_pretraining_r2"] <= 1
    shown = capsys.readouterr().out
    assert "before training" in shown
    assert "after training" in shown
    assert "advantage" in shown

    (tmp_path / "resumed").mkdir()
    (tmp_path / "straight/checkpoint-1").rename(tmp_path / "resumed/checkpoint-1")
    run_arithmetic(*few_rows, *pretraining, "--output_dir", resumed, "--resume_from_checkpoint", "true")
    assert not list((tmp_path / "resumed").glob("before_*"))  # measured by the run that is gone on with
    expected = load_file(tmp_path / "straight/adapter_model.safetensors")
    got = load_file(tmp_path / "resumed/adapter_model.safetensors")
    assert all((expected[name] == got[name]).all() for name in expected)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--learning_rte", "1"], "'learning_rte': did you mean learning_rate"),
        (["--kl_estimator", "k7"], "kl_estimator='k7' is unknown; choose from k1, "),
        (["--policy_mode", "sideways"], "policy_mode='sideways' is unknown; choose from "),
        (["--critic", "shred"], "critic='shred' is not 'adapter', 'shared'"),
        (["--model_name_or_path", "/no/such"], "model='/no/such' cannot be loaded"),
    ],
)
def test_typos_are_refused_by_name(tmp_path, capsys, flags, wanted):
    with pytest.raises((SystemExit, ValueError, OSError)) as error:
        run_arithmetic("--output_dir", str(tmp_path / "out"), *flags)
    assert wanted in str(error.value) + capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")  # TRL's RewardConfig sets it
@pytest.mark.parametrize("recipe", SEEDED)
def test_a_flag_goes_by_its_whole_name_only(monkeypatch, capsys, recipe):
    """argparse takes the beginning of a name for it."""
    monkeypatch.setattr(sys, "argv", [recipe, "--see", "x", "--use_cpu", "true"])
    with pytest.raises((SystemExit, ValueError)) as error:
        runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")
    assert re.search(r"not used.*--see|no field 'see'|no argument for see", str(error.value) + capsys.readouterr().err)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the parser of arithmetic.py says of these arguments before it ends."""
    parser = RecipeParser((arithmetic.ArithmeticArguments, PPOConfig, arithmetic.ArithmeticActor), prog="recipe")
    with pytest.raises(SystemExit) as end:
        parser.parse_args_and_config([*argv])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("recipe: error: ")
    assert "usage" not in said
    return said.removeprefix("recipe: error: ")


def test_all_unknown_names_of_file_and_flags_are_refused_at_once(tmp_path, capsys):
    (tmp_path / "typo.yaml").write_text("kl_coeff: 0.1\nbeta: 0.04\nepsilon: 0.3\n")
    flags = ["--lora-rr", "4", "--critc=shared", "--top_p", "0.9", "--response_length", "53"]
    said = refused(capsys, "--config", str(tmp_path / "typo.yaml"), *flags)
    lines = [line.strip() for line in said.splitlines()]
    assert lines[0] == "PPOConfig has no field"
    wanted = {"kl_coeff": "kl_coef", "beta": "kl_loss_coef", "lora_rr": "lora_r", "critc": "critic", "top_p": "pure"}
    assert [line.split(":")[0] for line in lines[1:6]] == [repr(name) for name in wanted]
    assert [word for word, line in zip(wanted.values(), lines[1:], strict=False) if word not in line] == []


def test_names_of_trl_in_file_and_flags_are_translated(tmp_path, capsys):
    text = "use_cpu: true\nadvantage_estimator: grpo\nnum_generations: 4\nbeta: 0.04\ntop_k: 0\nscale_rewards: false\n"
    (tmp_path / "grpo.yaml").write_text(text)
    parser = RecipeParser((arithmetic.ArithmeticArguments, PPOConfig, arithmetic.ArithmeticActor))
    flags = ["--epsilon", "2e-1", "--num_iterations=2", "--response_length", "53", "--disable_dropout"]
    _, args, _ = parser.parse_args_and_config(["--config", str(tmp_path / "grpo.yaml"), *flags, "--top_p", "1.0"])
    assert (args.kl_loss_coef, args.kl_coef, args.cliprange, args.num_ppo_epochs) == (0.04, 0.0, 0.2, 2)
    assert (args.max_completion_length, args.scale_rewards) == (53, "none")
    said = refused(capsys, "--config", str(tmp_path / "grpo.yaml"), "--epsilon", "0.3", "--cliprange", "0.2")
    assert "epsilon=0.3" in said
    assert "cliprange" in said


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_ppo_epochs", "two", "num_ppo_epochs='two' must be a whole number"),
        ("use_vllm", "maybe", "use_vllm='maybe' must be True or False"),
        (
            "policy_mode",
            "sideways",
            "policy_mode='sideways' is unknown; choose from decoupled, bypass, token_truncate",
        ),
        ("kl_estimator", "k7", "kl_estimator='k7' is unknown; choose from k1, abs, k2, k3"),
        ("eval_strategy", "sideways", "eval_strategy='sideways' is unknown; choose from no, steps, epoch"),
        ("learning_rate", "fast", "learning_rate='fast' must be a finite number\n"),
        ("chat_template_kwargs", "x", "chat_template_kwargs='x' must be a dictionary, or JSON of one"),
        ("gamma", "1.5", "gamma=1.5 must be in [0, 1]"),
    ],
)
def test_a_wrong_value_gives_the_sentence_of_pythons_error(tmp_path, capsys, name, value, words):
    (tmp_path / "wrong.yaml").write_text(f"use_cpu: true\n{name}: {value}\n")
    assert refused(capsys, "--use_cpu", "true", f"--{name}", value).startswith(words)
    assert refused(capsys, "--config", str(tmp_path / "wrong.yaml")).startswith(words)
    with pytest.raises(ValueError, match=re.escape(words.strip())):
        PPOConfig(use_cpu=True, **{name: float(value) if name == "gamma" else value})


def test_all_wrong_values_of_file_and_flags_are_named_at_once(tmp_path, capsys):
    (tmp_path / "wrong.yaml").write_text("use_cpu: true\nnum_mini_batches: 2.5\nmax_steps: many\n")
    said = refused(capsys, "--config", str(tmp_path / "wrong.yaml"), "--kl_estimator", "k7", "--gamma", "1.5")
    assert [line.partition("=")[0] for line in said.splitlines()[:5]] == [
        "4 fields have wrong values",
        "  max_steps",
        "  num_mini_batches",
        "  kl_estimator",
        "  gamma",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("a: [", "flow node"),
        ("- a", "YAML mapping"),
        ("lora_r: x", "--lora_r.* int value: 'x'"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    assert re.search(words, refused(capsys, "--config", str(tmp_path / "run.yaml")))
    assert refused(capsys, "--config").startswith("--config needs the path")


@pytest.mark.parametrize(("width", "threads"), [(1_000, 1), (4_000, 3)])
def test_only_small_models_on_a_cpu_have_one_thread(width, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        use_one_thread_if_small(torch.nn.Linear(width, width))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_no_recipe_for_any_model_sets_one_thread_whatever_its_size():
    for path in Path(ppo.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert path.stem == "run" or "actor_config(" not in text or "set_num_threads" not in text, path


@pytest.mark.parametrize("arguments", [ppo.PPOArguments, sentiment.SentimentArguments])
def test_a_single_reward_function_needs_no_list_in_a_yaml_file(tmp_path, arguments):
    (tmp_path / "one.yaml").write_text("reward_funcs: arithmetic.right_answer\n")
    (parsed,) = RecipeParser((arguments,)).parse_args_and_config(["--config", str(tmp_path / "one.yaml")])
    assert parsed.reward_funcs == ["arithmetic.right_answer"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        ("resume_from_checkpoint: false", None),
        ("resume_from_checkpoint: true", True),
        ("resume_from_checkpoint: 'False'", None),
        ("resume_from_checkpoint: 'True'", True),
        ("resume_from_checkpoint: out/checkpoint-4", "out/checkpoint-4"),
    ],
)
def test_what_is_resumed_from_is_read_from_a_yaml_file_as_from_a_flag(tmp_path, line, expected):
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nuse_cpu: true\n{line}\n")
    (args,) = RecipeParser((PPOConfig,)).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert (args.resume_from_checkpoint, type(args.resume_from_checkpoint)) == (expected, type(expected))


@pytest.mark.parametrize("given", [["q_proj"], "q_proj", ["all-linear"], ["q_proj", "k_proj"], r".*\.q_proj", None])
def test_a_single_target_module_is_a_name_and_no_pattern(given):
    names = ["q_proj"] if given == "q_proj" else "all-linear" if given == ["all-linear"] else given
    assert ActorArguments(lora_target_modules=given).lora_target_modules == names


def test_an_actor_without_an_adapter_is_refused():
    with pytest.raises(ValueError, match=r"use_peft=False: the actor is always an adapter.*leave use_peft out"):
        actor_config(ActorArguments(model_name_or_path=str(RECIPES / "arithmetic/base"), use_peft=False, lora_r=7))


@pytest.mark.parametrize(("recipe", "flag"), [("arithmetic", "--kl_coef"), ("sft", "--dataset_name")])
def test_help_lists_the_fields(monkeypatch, capsys, recipe, flag):
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert flag in shown
    assert "--weight_decay" not in shown
    assert ("sizes with these defaults" in shown) == (recipe == "arithmetic"), "sizes of rollouts"


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The help of arithmetic.py."""
    with pytest.raises(SystemExit) as end:
        RecipeParser((arithmetic.ArithmeticArguments, PPOConfig, arithmetic.ArithmeticActor)).parse_args_and_config(
            [*argv]
        )
    assert not end.value.code
    return capsys.readouterr().out


def test_the_help_has_our_fields_in_sections_and_the_others_on_demand(tmp_path, capsys):
    shown = helped(capsys, "--help")
    own = [*inspect.get_annotations(PPOConfig), *inspect.get_annotations(arithmetic.ArithmeticArguments)]
    assert [name for name in own if shown.count(f"--{name}\n") + shown.count(f"--{name} {{") != 1] == []
    titles = [
        "Arguments of this recipe:",
        "PPOConfig: the rollout:",
        "PPOConfig: KL to the reference:",
        "PPOConfig: the critic:",
    ]
    places = [shown.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    assert places[1] < shown.index("--num_mini_batches") < places[2] < shown.index("--kl_coef") < places[3]
    assert "--weight_decay" not in shown
    assert len(shown.splitlines()) < 250

    (tmp_path / "run.yaml").write_text("weight_decay: 0.125\n")
    assert "(default: 0.125)" in helped(capsys, "--config", str(tmp_path / "run.yaml"), "--help")
    everything = helped(capsys, "--help-all")
    named = {f.name for cls in (PPOConfig, arithmetic.ArithmeticActor) for f in fields(cls)}
    assert [name for name in named if f"--{name}" not in everything] == []
    some = helped(capsys, "--help", "learning_rate")
    assert re.findall(r"^  (--\w+)", some, flags=re.MULTILINE) == ["--learning_rate", "--critic_learning_rate"]
    meant = "PPOConfig has no field 'clip_range': did you mean cliprange or "
    assert refused(capsys, "--help", "clip_range").startswith(meant)
    assert refused(capsys, "max_steps=3").startswith(
        "PPOConfig has no field 'max_steps=3': did you mean max_steps or "
    )


def test_built_data_holds_no_test_pair_in_training(tmp_path):
    """The shipped files keep the pairs of numbers apart, in either order."""

    def pairs(name: str) -> set[frozenset]:
        rows = [json.loads(line) for line in (RECIPES / "arithmetic" / name).read_text().splitlines()]
        return {frozenset(r["prompt"].removeprefix("请问").split("=")[0].split("+")) for r in rows}

    train, test = pairs("train.jsonl"), pairs("test.jsonl")
    assert len(test) > 100
    assert not train & test


def test_building_the_base_in_small(tmp_path):
    from build_arithmetic_base import BuildArguments
    from build_arithmetic_base import main as build

    build(
        BuildArguments(
            output_dir=str(tmp_path),
            clean_steps=2,
            sloppy_steps=2,
            batch_size=8,
            num_test_prompts=4,
            num_train_prompts=4,
        )
    )
    row = json.loads((tmp_path / "test.jsonl").read_text().splitlines()[0])
    assert row.keys() == {"prompt", "answer"}
    assert (tmp_path / "base/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif("activation_checkpointing" not in PPOConfig.__dataclass_fields__, reason="transformers < 5.20")
def test_the_road_from_demonstrations_to_ppo_in_small(tmp_path, few_rows, monkeypatch):
    """Three recipes of two steps each; the adapters of the first two feed the third."""
    monkeypatch.chdir(RECIPES.parent)
    few = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--use_cpu", "true", "--save_strategy", "no"]

    def run(recipe, dataclasses, *flags):
        config = ["--config", str(RECIPES / f"{recipe.__name__}.yaml"), *few, *flags]
        recipe.main(*RecipeParser(dataclasses).parse_args_and_config(config))

    sft_out, reward_out, ppo_out = (str(tmp_path / name) for name in ("sft", "reward", "ppo"))
    run(sft, (DataArguments, SFTConfig, ModelConfig), "--output_dir", sft_out)
    run(reward_model, (DataArguments, RewardConfig, ModelConfig), "--output_dir", reward_out)
    files = json.dumps({"train": str(RECIPES / "arithmetic/train.jsonl"), "test": few_rows[1]})
    flags = ["--model_name_or_path", sft_out, "--reward_funcs", reward_out, "arithmetic.right_answer"]
    run(ppo, (ppo.PPOArguments, PPOConfig, ActorArguments), *flags, "--data_files", files, "--output_dir", ppo_out)
    assert 0 <= json.loads((tmp_path / "reward/eval_results.json").read_text())["eval_accuracy"] <= 1
    results = json.loads((tmp_path / "ppo/all_results.json").read_text())
    assert {"before_sampled_accuracy", "after_greedy_accuracy", "after_sampled_rewards/reward/mean"} <= results.keys()
    assert load_file(tmp_path / "ppo/critic/critic.safetensors")


@pytest.mark.parametrize(
    ("name", "wanted"), [("arithmetic.no_such", "no_such"), ("no_such_module.f", "no_such_module")]
)
def test_a_reward_function_that_cannot_be_imported_is_named(name, wanted):
    with pytest.raises(ValueError, match=wanted):
        load_reward_func(name)


def test_a_function_is_found_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    )
    with pytest.raises(ValueError, match=r"my_rewards\.brevity"):
        load_reward_func("my_rewards.brevity")
    monkeypatch.chdir(tmp_path)
    assert load_reward_func("my_rewards.brevity")(["a"]) == [0.0]


def test_flags_of_the_model_reach_it(tmp_path):
    base = str(RECIPES / "arithmetic/base")
    flags = ActorArguments(model_name_or_path=base, load_in_4bit=True, dtype="bfloat16", lora_r=3)
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs={"attn_implementation": "eager"})
    args.model_init_kwargs = init_kwargs(args, flags)
    assert json.loads(args.to_json_string())["model_init_kwargs"]["quantization_config"]["load_in_4bit"]
    trainer = PPOTrainer(
        model=base,
        reward_funcs=lambda completions, **kwargs: [0.0 for _ in completions],
        args=args,
        peft_config=actor_config(flags),
    )
    assert trainer.model.causal_lm.is_loaded_in_4bit
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer.model.causal_lm.dtype == torch.bfloat16
    assert trainer.model.peft_config["default"].r == 3
    assert args.model_init_kwargs["revision"] == "main"
    assert trainer.model.peft_config["default"].revision is None  # a folder has none

    trainer.model.save_pretrained(tmp_path / "adapter")
    adapter = replace(flags, model_name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"lora_r: model_name_or_path=.* is an adapter"):
        actor_config(adapter)
    assert actor_config(replace(adapter, lora_r=16)) is None


def test_a_dataset_without_pairs_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"json has the columns prompt, answer, and no pairs; rename"):
        reward_model.main(DataArguments(data_files=str(tmp_path / "rows.jsonl")), None, None)


def test_without_files_the_working_folder_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "of_something_else.jsonl").write_text('{"prompt": "1"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="data_files is missing, and dataset_name='json' only says"):
        load(DataArguments())
    assert load(DataArguments(data_files="of_something_else.jsonl"))[0]["prompt"] == ["1"]


def test_names_of_reward_functions_and_models():
    assert load_reward_func("arithmetic.right_answer") is arithmetic.right_answer
    assert load_reward_func("org/reward-model-1.5b") == "org/reward-model-1.5b"
