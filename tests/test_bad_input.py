"""Bad input is refused before anything is generated or written, by an error that names it and a remedy."""

import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from transformers import HfArgumentParser, TrainingArguments

from helpers.bad_input import PROMPTS, TABLE, Bench, adapter, lora, model_without_eos, tokenizer_without_eos
from helpers.error_facts import FACTS
from helpers.runs import SMALL, count_digits
from helpers.tiny import tiny_model
from hfppo import PPOConfig, PPOTrainer
from hfppo.generation.generate import TransformersSampler

CASES = [(heading, name) for heading, cases in TABLE.items() for name in cases]


@pytest.fixture
def sealed(monkeypatch):
    """Sampling fails the test."""

    def sample(*args, **kwargs):
        pytest.fail("completions were sampled", pytrace=False)

    monkeypatch.setattr("hfppo.trainer.check_sampler", lambda *_: None)  # it tries the sampler on tokens of its own
    monkeypatch.setattr(TransformersSampler, "__call__", sample)


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


@pytest.fixture
def bench(sealed, make_trainer, tmp_path, checkpoint, monkeypatch) -> Bench:
    return Bench(make_trainer, tmp_path, checkpoint, monkeypatch)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("heading", "name"), CASES, ids=[f"{heading}: {name}" for heading, name in CASES])
def test_bad_input_is_refused_by_name(bench, heading, name):
    """The error has its type, names the field, the value or the part concerned, and says what to do."""
    earlier = bench.folder / "out" / "adapter_model.safetensors"
    earlier.parent.mkdir()
    earlier.write_bytes(b"an earlier run's")
    before, first_run = contents(earlier.parent), contents(bench.checkpoint)
    with pytest.raises((Exception, SystemExit)) as refused:
        TABLE[heading][name](bench)
    kind, facts = FACTS[heading, name]
    message = " ".join(str(refused.value).split())
    assert kind in {parent.__name__ for parent in type(refused.value).__mro__}  # PEFT's error changes its class
    assert [fact for fact in facts if fact not in message] == [], message
    if heading == "Fields" and re.fullmatch(r"\w+=.*", name) and kind == "ValueError":
        assert name in message  # the field with its value
    assert kind != "ValueError" or re.search("[;:?] | must be ", message), message  # a remedy follows
    assert contents(earlier.parent) == before
    assert contents(bench.checkpoint) == first_run


def test_every_case_has_its_facts():
    assert set(FACTS) == set(CASES)
    assert len(CASES) >= 60


def test_good_input_gets_as_far_as_sampling(sealed, make_trainer):
    """What the tests above forbid does happen otherwise."""
    with pytest.raises(pytest.fail.Exception, match="were sampled"):
        make_trainer({"max_completion_length": 122}).train()


INHERITED = {f.name for f in fields(TrainingArguments)}
DECLARED = {name: kind for name, kind in get_type_hints(PPOConfig).items() if name not in INHERITED}


@pytest.mark.parametrize(
    ("kinds", "value"),
    [
        pytest.param((float, float | None), float("nan"), id="NaN"),
        pytest.param((float, float | None, int, int | None), "1e-5", id="text"),
        pytest.param((int, int | None), 2.5, id="a fraction"),
        pytest.param((bool, bool | None), "false", id="the text false"),
        pytest.param((float, int, bool), None, id="None"),
    ],
)
def test_every_field_of_a_type_refuses_what_is_of_another(tmp_path, kinds, value):
    """YAML reads 1e-5, without a dot, as text."""
    names = [name for name, kind in DECLARED.items() if kind in kinds]
    assert names
    for name in names:
        with pytest.raises(ValueError, match=f"^{name}={value!r} must be "):
            PPOConfig(output_dir=str(tmp_path), **{name: value})


@pytest.mark.parametrize("name", ["metric_for_best_model", "run_name", "vllm_engine_kwargs"])
def test_none_can_be_said_on_a_command_line(tmp_path, name):
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), f"--{name}=None"]
    )
    assert getattr(args, name) is None


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


def test_an_adapter_loaded_without_gradients_is_trained_on(make_trainer):
    """PeftModel.from_pretrained freezes it unless is_trainable=True is passed."""
    trainer = make_trainer(model=adapter().requires_grad_(False), peft_config=None)
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters() if "lora_B.default" in name}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert before
    assert all(not torch.equal(after[name], x) for name, x in before.items())


def test_a_peft_config_can_be_used_again(make_trainer):
    """PEFT writes the modules that "all-linear" found into the config that it is given."""
    config = lora()
    before = config.to_dict()
    for _ in range(2):
        make_trainer(peft_config=config)
        assert config.to_dict() == before


@pytest.mark.parametrize(
    "output", [[1.0] * 7, ["1"] * 8, [float("nan")] * 8, None], ids=["few", "text", "NaN", "None"]
)
def test_outputs_of_reward_functions_end_training_before_its_first_step(make_trainer, tmp_path, output):
    def my_reward(**kwargs):
        return output

    trainer = make_trainer({"save_strategy": "steps", "save_steps": 1}, reward_funcs=[count_digits, my_reward])
    with pytest.raises((TypeError, ValueError), match="reward function 'my_reward'"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "out").exists()


def test_arguments_whose_order_differs_from_grpos_are_not_taken_by_position(dataset, tokenizer, tmp_path):
    """GRPOTrainer's seventh is the reward functions' tokenizers."""
    args = PPOConfig(**SMALL, output_dir=str(tmp_path / "out"))
    with pytest.raises(TypeError, match="positional arguments but 8 were given"):
        PPOTrainer(tiny_model(), count_digits, args, dataset, None, tokenizer, tokenizer)


def resume(make_trainer, checkpoint: Path, config: dict | None = None, **arguments) -> None:
    config = {"save_strategy": "steps", "save_steps": 1, **(config or {})}
    make_trainer(config, train_dataset=PROMPTS, peft_config=lora(), **arguments).train(
        resume_from_checkpoint=str(checkpoint)
    )


def test_resuming_the_same_run_gets_as_far_as_sampling(checkpoint, sealed, make_trainer, tmp_path):
    """The cases above are refused for what they change; here the rest of the rollout is used and the next is due."""
    with pytest.raises(pytest.fail.Exception, match="were sampled"):
        resume(make_trainer, checkpoint)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


def test_resuming_on_the_same_base_in_another_precision(checkpoint, make_trainer):
    resume(make_trainer, checkpoint, {"max_steps": 3}, model=tiny_model().bfloat16())


def test_resuming_with_other_settings_says_so(checkpoint, make_trainer, caplog):
    def other(completions, **kwargs):
        return [0.0] * len(completions)

    with caplog.at_level(logging.WARNING, "hfppo"):
        resume(make_trainer, checkpoint, {"max_steps": 3, "vf_coef": 0.7, "weight_decay": 0.1}, reward_funcs=other)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "vf_coef=0.7, the checkpoint was written with 0.1" in said
    assert "reward_funcs=['other'], the checkpoint was written with ['count_digits']" in said
    assert "weight_decay=0.1, the checkpoint was written with 0.0" in said
    assert "max_steps=3, the checkpoint was written with" in said
    assert said.count("the checkpoint was written with") == 4


def test_a_saved_critic_that_fits(checkpoint, sealed, make_trainer):
    with pytest.raises(pytest.fail.Exception, match="were sampled"):
        make_trainer(critic=str(checkpoint), peft_config=lora()).train()
