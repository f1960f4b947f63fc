"""Bad input is refused before anything is generated or written, by an error with the field, the value, the way out."""

import copy
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from conftest import LORA, SMALL, count_digits, tiny_model
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import TrainerState, TrainingArguments

from hfppo import AdaptiveKLCallback, PPOConfig, PPOTrainer
from hfppo.crash_safe import seal
from hfppo.functional import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from hfppo.generation import TransformersSampler
from hfppo.rewards import RewardFunctions

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def sealed(monkeypatch):
    """Sampling fails the test."""

    def sample(*args, **kwargs):
        pytest.fail("completions were sampled", pytrace=False)

    monkeypatch.setattr(TransformersSampler, "__call__", sample)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def check_message(error: BaseException, patterns: tuple[str, ...]) -> None:
    """Every pattern occurs in the error's message."""
    missing = [pattern for pattern in patterns if not re.search(pattern, str(error), re.DOTALL)]
    assert not missing, f"nothing like {missing} in {type(error).__name__}: {error}"


def case(name: str, exception: type | tuple, *patterns: str, config: dict | None = None, arguments=dict):
    """A row of a table of bad inputs: fields of PPOConfig, and a function that makes arguments of PPOTrainer."""
    return pytest.param(config or {}, arguments, exception, patterns, id=name)


def field(name: str, value: Any, *patterns: str, **others: Any):
    """A row for a field: the message says `name=value`."""
    return case(f"{name}={value}", ValueError, rf"\b{name}={value!r}(?!\w)", *patterns, config={name: value, **others})


def test_good_input_gets_as_far_as_sampling(sealed, make_trainer):
    """What the tests below forbid does happen otherwise."""
    with pytest.raises(pytest.fail.Exception, match="were sampled"):
        make_trainer().train()


INHERITED = {f.name for f in fields(TrainingArguments)}
OWN = [f for f in fields(PPOConfig) if f.name not in INHERITED]
NUMBERS = [f.name for f in OWN if f.type in (float, float | None)]
COUNTS = [f.name for f in OWN if f.type in (int, int | None)]

FIELDS = [
    field("gamma", 1.01, r"in \[0, 1\]"),
    field("gamma", -0.1, r"in \[0, 1\]"),
    field("lam", 1.5, r"in \[0, 1\]"),
    field("lam", -0.5, r"in \[0, 1\]"),
    field("lam_critic", 2.0, r"in \[0, 1\]"),
    field("lam_critic", -1.0, r"in \[0, 1\]"),
    field("kl_coef", -0.05, "at least 0"),
    field("kl_loss_coef", -0.05, "at least 0"),
    field("entropy_coef", -0.01, "at least 0"),
    field("positive_nll_coef", -0.1, "at least 0"),
    field("vf_coef", -0.1, "at least 0"),
    field("missing_eos_penalty", -1.0, "at least 0"),
    field("critic_learning_rate", -1e-5, "at least 0"),
    field("critic_warmup", -1, "at least 0"),
    field("temperature", 0.0, "above 0"),
    field("temperature", -1.0, "above 0"),
    field("lam_alpha", 0.0, "above 0"),
    field("target_kl", 0.0, "above 0"),
    field("reward_clip", 0.0, "above 0"),
    field("cliprange", 0.0, "above 0"),
    field("cliprange", -0.2, "above 0"),
    field("cliprange", 1.0, "below 1"),
    field("cliprange", 1.5, "below 1"),
    field("cliprange_high", 0.0, "above 0"),
    field("cliprange_value", 0.0, "above 0"),
    field("dual_clip", 1.0, "above 1"),
    field("dual_clip", 0.5, "above 1"),
    field("num_ppo_epochs", 0, "at least 1"),
    field("num_mini_batches", 0, "at least 1"),
    field("num_generations", 0, "at least 1"),
    field("total_episodes", 0, "at least 1"),
    field("max_prompt_length", 0, "at least 1"),
    field("max_completion_length", 0, "at least 1"),
    field("local_rollout_forward_batch_size", 0, "at least 1"),
    field("per_device_train_batch_size", 0, "at least 1"),
    field("per_device_train_batch_size", -4, "at least 1"),
    field("gradient_accumulation_steps", 0, "at least 1"),
    field("kl_estimator", "k4", "choose from", *KL_ESTIMATORS),
    field("kl_loss_estimator", "kl", "choose from", *KL_ESTIMATORS),
    field("advantage_estimator", "gea", "choose from", *ADVANTAGE_ESTIMATORS),
    field("policy_loss", "pppo", "choose from", *POLICY_LOSSES),
    field("policy_mode", "coupled", "choose from", "decoupled", "bypass"),
    field("loss_reduction", "mean", "choose from", *REDUCTIONS),
    field("overlong_prompts", "keep", "choose from", "drop", "truncate"),
    *[
        field("advantage_estimator", name, "num_generations=1", "raise num_generations to 2", num_generations=1)
        for name in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
    ],
    field("num_generations", 3, "rollout of 8", "per_device_train_batch_size=4", "num_mini_batches=2", "divide"),
    field("num_generations", 16, "rollout of 8", "divide"),
    *[
        field(
            "critic_warmup", 2, f"advantage_estimator='{name}'", "critic_warmup=0", "'gae'", advantage_estimator=name
        )
        for name in ("remax", "reinforce_plus_plus")
    ],
    *[field(name, NAN) for name in NUMBERS],
    *[
        field(name, INFINITY)
        for name in (
            "kl_coef",
            "kl_loss_coef",
            "entropy_coef",
            "positive_nll_coef",
            "vf_coef",
            "missing_eos_penalty",
            "temperature",
            "critic_learning_rate",
        )
    ],
]


@pytest.mark.parametrize(("config", "arguments", "exception", "patterns"), FIELDS)
def test_fields(sealed, make_trainer, tmp_path, config, arguments, exception, patterns):
    with pytest.raises(exception) as refused:
        make_trainer(config, **arguments()).train()
    check_message(refused.value, patterns)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NUMBERS + COUNTS)
def test_text_is_no_number(sealed, make_trainer, tmp_path, name):
    """YAML reads 1e-5, without a dot, as text."""
    with pytest.raises((TypeError, ValueError)) as refused:
        make_trainer({name: "1e-5"}).train()
    check_message(refused.value, (name, "1e-5"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", COUNTS)
def test_a_fraction_is_no_count(sealed, make_trainer, tmp_path, name):
    with pytest.raises((TypeError, ValueError)) as refused:
        make_trainer({name: 2.5}).train()
    check_message(refused.value, (name, r"2\.5"))
    assert not (tmp_path / "out").exists()


def data(*prompts: Any, column: str = "prompt") -> Callable[[], dict[str, Dataset]]:
    return lambda: {"train_dataset": Dataset.from_dict({column: list(prompts)})}


def tokenizer_without_eos():
    made = character_tokenizer()
    made.eos_token = None
    return made


def model_without_eos():
    made = tiny_model(eos_token_id=None)
    made.generation_config.eos_token_id = None
    return made


def adapter(config=LORA, **model_config) -> PeftModel:
    return get_peft_model(tiny_model(**model_config), copy.deepcopy(config))


def frozen_adapter() -> PeftModel:
    return adapter().requires_grad_(False)


def lora(**changes: Any) -> LoraConfig:
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**config, **changes})


def prompt_tuning() -> PromptTuningConfig:
    return PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")


CHAT = [{"role": "user", "content": "1+1="}]

ARGUMENTS = [
    # The dataset.
    case("no rows", ValueError, "train_dataset", "no rows", "at least one prompt", arguments=data()),
    case(
        "no prompt column",
        ValueError,
        "train_dataset",
        "'prompt'",
        "question",
        "rename_column",
        arguments=data("1+1=", column="question"),
    ),
    case(
        "text and messages",
        ValueError,
        "train_dataset",
        "row 1 is list",
        "use one kind",
        arguments=lambda: {"train_dataset": mixed_prompts()},
    ),
    case("numbers", ValueError, "train_dataset row 0", "prompt=7", "text", "'role': 'user'", arguments=data(7, 8)),
    case("a missing prompt", ValueError, "train_dataset row 1", "prompt=None", "text", arguments=data("1+1=", None)),
    case("an empty prompt", ValueError, "train_dataset row 1", "''", "remove the row", arguments=data("1", "", "2")),
    case("an empty conversation", ValueError, "row 1", r"prompt=\[\]", "'role': 'user'", arguments=data(CHAT, [])),
    case("lists of words", ValueError, "row 0", r"\['1', '2'\]", "'role': 'user'", arguments=data(["1", "2"])),
    case(
        "conversations without a chat template",
        ValueError,
        "chat_template",
        arguments=lambda: {**data(CHAT)(), "processing_class": character_tokenizer()},
    ),
    case(
        "a list",
        TypeError,
        "train_dataset",
        "list",
        "Dataset.from_list",
        arguments=lambda: {"train_dataset": [{"prompt": "1+1="}]},
    ),
    case(
        "several splits",
        TypeError,
        "train_dataset",
        "DatasetDict",
        arguments=lambda: {"train_dataset": DatasetDict(train=Dataset.from_dict({"prompt": ["1+1="]}))},
    ),
    case(
        "a stream",
        TypeError,
        "train_dataset",
        "IterableDataset",
        arguments=lambda: {"train_dataset": Dataset.from_dict({"prompt": ["1"]}).to_iterable_dataset()},
    ),
    case(
        "all prompts too long",
        ValueError,
        "16 of 16",
        "train_dataset",
        "max_prompt_length=3",
        "raise max_prompt_length",
        "overlong_prompts='truncate'",
        config={"max_prompt_length": 3},
    ),
    case(
        "a bad evaluation set",
        ValueError,
        r"eval_dataset\['hard'\]",
        "no rows",
        arguments=lambda: {"eval_dataset": {"hard": Dataset.from_dict({"prompt": []})}},
    ),
    # Reward functions and their weights.
    case("no reward function", ValueError, "reward_funcs is empty", arguments=lambda: {"reward_funcs": []}),
    case("a number as function", TypeError, "reward_funcs", "5", "functions", arguments=lambda: {"reward_funcs": 5}),
    case(
        "a list with a number",
        TypeError,
        "reward_funcs",
        "0.5",
        "functions",
        arguments=lambda: {"reward_funcs": [count_digits, 0.5]},
    ),
    case("None as function", TypeError, "reward_funcs", "None", arguments=lambda: {"reward_funcs": None}),
    case(
        "a language model as function",
        (TypeError, ValueError),
        "reward_funcs",
        "LlamaForCausalLM",
        arguments=lambda: {"reward_funcs": [tiny_model()]},
    ),
    case(
        "too many weights",
        ValueError,
        "reward_weights",
        "2 entries for 1",
        "count_digits",
        "one weight each",
        config={"reward_weights": [1.0, 2.0]},
    ),
    case(
        "too few weights",
        ValueError,
        "reward_weights",
        "1 entries for 2",
        "count_digits_2",
        config={"reward_weights": [1.0]},
        arguments=lambda: {"reward_funcs": [count_digits, count_digits]},
    ),
    case("weight NaN", ValueError, "reward_weights", "nan", config={"reward_weights": [NAN]}),
    case("weight infinite", ValueError, "reward_weights", "inf", config={"reward_weights": [INFINITY]}),
    case("weight text", (TypeError, ValueError), "reward_weights", "'1.0'", config={"reward_weights": ["1.0"]}),
    case("weight without list", (TypeError, ValueError), "reward_weights", "0.5", config={"reward_weights": 0.5}),
    # The tokenizer.
    case(
        "no end of sequence",
        ValueError,
        "tokenizer has no EOS",
        "generation config",
        "processing_class.eos_token",
        arguments=lambda: {"processing_class": tokenizer_without_eos(), "model": model_without_eos()},
    ),
    # The adapter.
    *[
        case(
            name,
            ValueError,
            f"init_lora_weights='{name}'",
            "reference",
            "init_lora_weights=True",
            arguments=lambda name=name: {"peft_config": lora(init_lora_weights=name)},
        )
        for name in ("pissa", "pissa_niter_4", "olora")
    ],
    *[
        case(
            f"bias {bias}",
            ValueError,
            f"bias='{bias}'",
            "reference",
            "use bias='none'",
            arguments=lambda bias=bias: {"peft_config": lora(bias=bias)},
        )
        for bias in ("all", "lora_only")
    ],
    case(
        "prompt tuning",
        ValueError,
        "peft_config",
        "PROMPT_TUNING",
        "use LoRA",
        arguments=lambda: {"peft_config": prompt_tuning()},
    ),
    case(
        "a prompt-tuned model",
        ValueError,
        "model",
        "PROMPT_TUNING",
        "use LoRA",
        arguments=lambda: {"model": adapter(prompt_tuning()), "peft_config": None},
    ),
    case(
        "an adapter with biases",
        ValueError,
        "bias='all'",
        "use bias='none'",
        arguments=lambda: {"model": adapter(lora(bias="all"), attention_bias=True), "peft_config": None},
    ),
    case(
        "a frozen adapter",
        ValueError,
        "model is a PeftModel",
        "without a trainable weight",
        "is_trainable=True",
        arguments=lambda: {"model": frozen_adapter(), "peft_config": None},
    ),
    case(
        "an adapter on an adapter",
        ValueError,
        "model is already an adapter",
        "peft_config",
        "leave peft_config out",
        arguments=lambda: {"model": adapter(), "peft_config": lora()},
    ),
    case(
        "peft_config as a dictionary",
        (TypeError, ValueError),
        "peft_config",
        "dict",
        arguments=lambda: {"peft_config": {"r": 4}},
    ),
    case(
        "target modules that do not exist",
        ValueError,
        "(?i)target.modules",
        "nope",
        arguments=lambda: {"peft_config": lora(target_modules=["nope"])},
    ),
    # The critic.
    case(
        "an unknown critic",
        (ValueError, OSError),
        "critic",
        "adaptor",
        "'adapter'.*'shared'",
        arguments=lambda: {"critic": "adaptor"},
    ),
    case("a number as critic", (TypeError, ValueError), "critic", "5", arguments=lambda: {"critic": 5}),
]


def mixed_prompts() -> Dataset:
    """Arrow holds no such column, but a transform can make one."""
    dataset = Dataset.from_dict({"prompt": ["1+1=", json.dumps(CHAT)]})

    def decode(batch):
        return {"prompt": [json.loads(text) if text.startswith("[") else text for text in batch["prompt"]]}

    return dataset.with_transform(decode)


@pytest.mark.parametrize(("config", "arguments", "exception", "patterns"), ARGUMENTS)
def test_arguments(sealed, make_trainer, tmp_path, config, arguments, exception, patterns):
    with pytest.raises(exception) as refused:
        make_trainer(config, **arguments()).train()
    check_message(refused.value, patterns)
    assert not (tmp_path / "out").exists()


def test_training_without_prompts(sealed, make_trainer, tmp_path):
    """A trainer without prompts may evaluate, so only training refuses."""
    trainer = make_trainer(train_dataset=None)
    with pytest.raises(ValueError, match="train_dataset is missing"):
        trainer.train()
    assert files_in(tmp_path / "out") == []


@pytest.mark.parametrize("which", ["tokenizer", "generation config"])
def test_one_end_of_sequence_is_enough(make_trainer, which):
    if which == "tokenizer":
        trainer = make_trainer(model=model_without_eos())
    else:
        trainer = make_trainer(processing_class=tokenizer_without_eos())
    assert trainer.rollout(["1+1="]).mask.any()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(lambda: {"peft_config": lora()}, id="a second adapter"),
        pytest.param(lambda: {"peft_config": None, "processing_class": tokenizer_without_eos()}, id="no EOS"),
        pytest.param(lambda: {"peft_config": None, "critic": 5}, id="a number as critic"),
        pytest.param(lambda: {"peft_config": None, "critic": "adaptor"}, id="an unknown critic"),
    ],
)
def test_a_refused_model_keeps_its_adapter(make_trainer, arguments):
    """So that, in a notebook, the next attempt has something to start from."""
    model = adapter(eos_token_id=None)
    model.generation_config.eos_token_id = None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((TypeError, ValueError), match=r"peft_config|EOS|critic"):
        make_trainer(model=model, **arguments())
    after = model.state_dict()
    assert sorted(after) == sorted(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_peft_config_can_be_used_again(make_trainer):
    """PEFT writes the modules that "all-linear" found into the config that it is given."""
    config = lora()
    before = config.to_dict()
    for _ in range(2):
        make_trainer(peft_config=config)
        assert config.to_dict() == before


# What a function returns, as a function of the token ids of 8 completions.
OUTPUTS = [
    pytest.param(lambda ids: [1.0] * 7, ValueError, ("7 rewards", "8 completions", "one each"), id="too few"),
    pytest.param(lambda ids: [1.0] * 9, ValueError, ("9 rewards", "8 completions", "one each"), id="too many"),
    pytest.param(lambda ids: [], ValueError, ("0 rewards", "8 completions"), id="none at all"),
    pytest.param(lambda ids: [1.0] * 5 + ["1"] * 3, TypeError, ("row 5", "'1'", "float or None"), id="text"),
    pytest.param(lambda ids: [1.0, [], *[1.0] * 6], ValueError, ("row 1", "0 token rewards"), id="an empty list"),
    pytest.param(lambda ids: [1j] * 8, TypeError, ("row 0", "1j", "float or None"), id="complex"),
    pytest.param(lambda ids: [1.0, NAN] * 4, ValueError, ("row 1", "nan", "return None"), id="NaN"),
    pytest.param(lambda ids: [1.0] * 7 + [INFINITY], ValueError, ("row 7", "inf", "return None"), id="infinity"),
    pytest.param(lambda ids: [1.0] * 7 + [-INFINITY], ValueError, ("row 7", "-inf"), id="minus infinity"),
    pytest.param(lambda ids: [1.0] * 7 + [1e300], ValueError, ("row 7", r"1e\+300"), id="infinite in float32"),
    pytest.param(lambda ids: torch.full((8,), NAN), ValueError, ("row 0", "nan"), id="a tensor of NaN"),
    pytest.param(
        lambda ids: [[0.0] * len(row) for row in ids[:3]] + [[0.0] * (len(row) + 1) for row in ids[3:]],
        ValueError,
        ("row 3", "3 token rewards for 2 completion tokens", "completion_ids"),
        id="too many token rewards",
    ),
    pytest.param(
        lambda ids: [[0.0] * len(ids[0]), [0.0] * (len(ids[1]) - 1), *[1.0] * 6],
        ValueError,
        ("row 1", "2 token rewards for 3 completion tokens", "completion_ids"),
        id="too few token rewards",
    ),
    pytest.param(
        lambda ids: [[0.0] * (len(row) - 1) + [NAN] for row in ids],
        ValueError,
        ("row 0", "nan"),
        id="token reward NaN",
    ),
    pytest.param(
        lambda ids: [[None] * len(row) for row in ids], TypeError, ("row 0", "None", "float"), id="token reward None"
    ),
    pytest.param(lambda ids: None, TypeError, ("NoneType", "list of numbers"), id="None"),
    pytest.param(lambda ids: 1.0, TypeError, ("float", "list of numbers"), id="one number"),
    pytest.param(lambda ids: "12345678", TypeError, ("str", "list of numbers"), id="a string"),
    pytest.param(lambda ids: dict.fromkeys(range(8), 1.0), TypeError, ("dict", "list of numbers"), id="a dictionary"),
    pytest.param(lambda ids: (1.0 for _ in ids), TypeError, ("generator", "list of numbers"), id="a generator"),
    pytest.param(lambda ids: torch.tensor(1.0), (TypeError, ValueError), ("list of numbers",), id="a scalar tensor"),
]


@pytest.mark.parametrize(("make", "exception", "patterns"), OUTPUTS)
def test_outputs_of_reward_functions(make, exception, patterns):
    def my_reward(completion_ids, **kwargs):
        return make(completion_ids)

    with pytest.raises(exception) as refused:
        RewardFunctions([count_digits, my_reward])(
            prompts=["1+1="] * 8,
            completions=["2", "12", "123"] * 2 + ["1", "2"],
            completion_ids=[[4, 1], [3, 4, 1], [3, 4, 5, 1]] * 2 + [[3, 1], [4, 1]],
            columns={},
            trainer_state=TrainerState(),
            width=4,
        )
    check_message(refused.value, ("reward function 'my_reward'", *patterns))


@pytest.mark.parametrize("output", [[1.0] * 7, ["1"] * 8, [NAN] * 8, None], ids=["too few", "text", "NaN", "None"])
def test_outputs_of_reward_functions_end_training_before_its_first_step(make_trainer, tmp_path, output):
    def my_reward(**kwargs):
        return output

    trainer = make_trainer({"save_strategy": "steps", "save_steps": 1}, reward_funcs=[count_digits, my_reward])
    with pytest.raises((TypeError, ValueError), match="reward function 'my_reward'"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert files_in(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("arguments", "patterns"),
    [
        pytest.param({"target": 0.0}, (r"target=0\.0", "above 0"), id="target 0"),
        pytest.param({"target": -0.1}, (r"target=-0\.1", "above 0"), id="negative target"),
        pytest.param({"target": NAN}, ("target=nan", "above 0"), id="target NaN"),
        pytest.param({"horizon": 0}, ("horizon=0", "above 0"), id="horizon 0"),
    ],
)
def test_adaptive_kl_with_a_target_that_cannot_be(arguments, patterns):
    with pytest.raises(ValueError, match="target") as refused:
        AdaptiveKLCallback(**arguments)
    check_message(refused.value, patterns)


def test_adaptive_kl_cannot_start_from_0(sealed, make_trainer, tmp_path):
    with pytest.raises(ValueError, match="AdaptiveKLCallback") as refused:
        make_trainer({"kl_coef": 0.0}, callbacks=[AdaptiveKLCallback()]).train()
    check_message(refused.value, ("kl_coef=0", "start from"))
    assert files_in(tmp_path / "out") == []


PROMPTS = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint after 2 of the 4 steps of a rollout."""
    folder = tmp_path_factory.mktemp("first_run")
    changes = {"output_dir": str(folder), "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    PPOTrainer(
        model=tiny_model(),
        reward_funcs=count_digits,
        args=PPOConfig(**{**SMALL, **changes}),
        train_dataset=PROMPTS,
        processing_class=character_tokenizer(),
        peft_config=lora(),
    ).train()
    return folder / "checkpoint-2"


def resume(make_trainer, checkpoint: Path | str, config: dict | None = None, **arguments) -> None:
    config = {"save_strategy": "steps", "save_steps": 1, **(config or {})}
    make_trainer(config, **{"train_dataset": PROMPTS, "peft_config": lora(), **arguments}).train(
        resume_from_checkpoint=str(checkpoint)
    )


def differs(name: str, before: Any, now: Any, **arguments: Any):
    """A row for a field with which the checkpoint cannot be gone on with."""
    return case(
        name,
        ValueError,
        rf"{name}='?{before}\b",
        rf"this run has '?{now}\b",
        "set it back",
        "start anew",
        config={name: now},
        **arguments,
    )


OTHER_RUNS = [
    differs("num_mini_batches", 2, 4),
    case(
        "another mini-batch",
        ValueError,
        "per_device_train_batch_size × gradient_accumulation_steps=4, this run has 8",
        "set it back",
        config={"gradient_accumulation_steps": 2},
    ),
    differs("num_ppo_epochs", 2, 3),
    differs("num_generations", 1, 2),
    differs("advantage_estimator", "gae", "remax"),
    differs("policy_mode", "decoupled", "bypass"),
    differs("temperature", 1.0, 0.5),
    differs("seed", 3, 4),
    case(
        "other prompts",
        ValueError,
        "prompts",
        "[0-9a-f]{64}.*[0-9a-f]{64}",
        "set it back",
        arguments=lambda: {"train_dataset": PROMPTS.select(range(15))},
    ),
    case(
        "the same prompts in another order",
        ValueError,
        "prompts",
        "[0-9a-f]{64}.*[0-9a-f]{64}",
        arguments=lambda: {"train_dataset": PROMPTS.select(range(15, -1, -1))},
    ),
    case(
        "another kind of critic",
        ValueError,
        "critic=adapter",
        "this run has shared",
        "set it back",
        arguments=lambda: {"critic": "shared"},
    ),
    case(
        "another rank",
        ValueError,
        r"\br\b\D{1,4}4\b",
        r"this run has .*\b2\b",
        arguments=lambda: {"peft_config": lora(r=2)},
    ),
    case(
        "another lora_alpha",
        ValueError,
        r"\blora_alpha\b\D{1,4}8\b",
        r"this run has .*\b16\b",
        arguments=lambda: {"peft_config": lora(lora_alpha=16)},
    ),
    case(
        "other target modules",
        ValueError,
        "peft_config|target_modules",
        arguments=lambda: {"peft_config": lora(target_modules=["q_proj"])},
    ),
]


@pytest.mark.parametrize(("config", "arguments", "exception", "patterns"), OTHER_RUNS)
def test_resuming_another_run(checkpoint, sealed, make_trainer, tmp_path, config, arguments, exception, patterns):
    with pytest.raises(exception) as refused:
        resume(make_trainer, checkpoint, config, **arguments())
    check_message(refused.value, (re.escape(str(checkpoint)), *patterns))
    assert files_in(tmp_path / "out") == []


def test_resuming_the_same_run_gets_as_far_as_sampling(checkpoint, sealed, make_trainer, tmp_path):
    """The tests above refuse for what they change; here the rest of the rollout is used and the next one is due."""
    with pytest.raises(pytest.fail.Exception, match="were sampled"):
        resume(make_trainer, checkpoint)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-3", "checkpoint-4"]


def test_resuming_with_other_settings_says_so(checkpoint, make_trainer, caplog):
    with caplog.at_level(logging.WARNING, "hfppo"):
        resume(make_trainer, checkpoint, {"max_steps": 3, "vf_coef": 0.7})
    (message,) = [record.getMessage() for record in caplog.records if "vf_coef" in record.getMessage()]
    assert "vf_coef=0.7" in message
    assert "0.1" in message


@pytest.mark.parametrize("wrong", ["a file is missing", "a file has changed", "a plain Trainer's", "no folder"])
def test_resuming_from_what_is_no_whole_checkpoint(checkpoint, sealed, make_trainer, tmp_path, wrong):
    folder = tmp_path / "foreign"
    if wrong != "no folder":
        shutil.copytree(checkpoint, folder)
    if wrong == "a file is missing":
        (folder / "optimizer.pt").unlink()
    if wrong == "a file has changed":
        with (folder / "adapter_model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    if wrong == "a plain Trainer's":
        (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="resume_from_checkpoint=") as refused:
        resume(make_trainer, folder)
    words = {
        "a file is missing": "lacks optimizer.pt",
        "a file has changed": "has a changed adapter_model.safetensors",
    }
    says = words.get(
        wrong, "has no readable manifest.json: the run was killed while it was written, or another program"
    )
    check_message(refused.value, (re.escape(str(folder)), re.escape(says), "take an earlier one"))
    assert files_in(tmp_path / "out") == []


def test_resuming_from_a_checkpoint_of_fewer_processes(checkpoint, sealed, make_trainer, tmp_path):
    folder = tmp_path / "foreign"
    shutil.copytree(checkpoint, folder)
    (folder / "ppo_state_0.json").unlink()
    seal(folder)
    with pytest.raises(ValueError, match=r"has no ppo_state_0\.json") as refused:
        resume(make_trainer, folder)
    check_message(refused.value, (re.escape(str(folder)), "not written by PPOTrainer", "pass it as model"))
    assert files_in(tmp_path / "out") == []


def test_resuming_from_a_checkpoint_without_its_critic(checkpoint, sealed, make_trainer, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "critic")
    with pytest.raises((ValueError, OSError)) as refused:
        resume(make_trainer, tmp_path / "half")
    check_message(refused.value, (re.escape(str(tmp_path / "half")), "critic"))
    assert files_in(tmp_path / "out") == []


def test_a_saved_critic_of_another_kind(checkpoint, make_trainer):
    critic = make_trainer(critic="shared").model.critic
    with pytest.raises(ValueError, match="critic") as refused:
        critic.load(checkpoint / "critic")
    check_message(refused.value, (re.escape(str(checkpoint)), "kind 'adapter'", "'shared' critic", "use the critic"))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(lambda: {"peft_config": lora(target_modules=["q_proj"])}, id="other target modules"),
        pytest.param(lambda: {"peft_config": lora(r=2)}, id="another rank"),
        pytest.param(lambda: {"peft_config": lora(lora_alpha=16)}, id="another lora_alpha"),
        pytest.param(lambda: {"model": tiny_model(hidden_size=16)}, id="another base"),
    ],
)
def test_a_saved_critic_that_does_not_fit(checkpoint, sealed, make_trainer, tmp_path, arguments):
    with pytest.raises(ValueError, match="critic") as refused:
        make_trainer(critic=str(checkpoint), **{"peft_config": lora(), **arguments()}).train()
    check_message(refused.value, (re.escape(str(checkpoint)), "peft_config"))
    assert not (tmp_path / "out").exists()


def test_a_saved_critic_that_fits(checkpoint, sealed, make_trainer):
    with pytest.raises(pytest.fail.Exception, match="were sampled"):
        make_trainer(critic=str(checkpoint), peft_config=lora()).train()


def test_prompts_and_completions_longer_than_the_models_positions(sealed, make_trainer, tmp_path):
    with pytest.raises(ValueError, match=r"the longest prompt has 6 tokens and max_completion_length=123, more") as no:
        make_trainer({"max_completion_length": 123})
    assert "the model's 128 positions; lower max_completion_length or max_prompt_length" in str(no.value)
    assert not (tmp_path / "out").exists()
    make_trainer({"max_completion_length": 122})
