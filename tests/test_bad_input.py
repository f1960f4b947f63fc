"""Bad input is refused before anything is sampled or written, by an error that names it and a remedy."""

import copy
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from helpers.runs import PROMPTS, SMALL, assert_same_tensors, count_digits, small_trainer
from helpers.tiny import LORA, lora, scorer, tiny_experts, tiny_model
from hfppo import (
    AdaptiveKLCallback,
    ClipMetricsCallback,
    PPOConfig,
    PPOTrainer,
    RewardServer,
    TokenTraceCallback,
    TolerantReward,
)
from hfppo.generation.generate import TransformersSampler
from hfppo.saving.manifest import seal


@dataclass(frozen=True)
class Bench:
    """What a bad input is tried with."""

    make_trainer: Callable[..., Any]
    folder: Path
    checkpoint: Path  # of a run with PROMPTS and `lora()`, after 2 of the 4 steps of a rollout


Case = Callable[[Bench], Any]


def adapter(config=LORA, **model_config: Any) -> PeftModel:
    return get_peft_model(tiny_model(**model_config), copy.deepcopy(config))


def tokenizer_without_eos():
    made = character_tokenizer()
    made.eos_token = None
    return made


def tokenizer_with_added_padding():
    made = character_tokenizer()
    made.add_special_tokens({"pad_token": "[PAD]"})
    return made


def strict_tokenizer():
    """Its template accepts one role."""
    made = character_tokenizer()
    made.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    return made


def model_with_eos(eos: int | None) -> PreTrainedModel:
    made = tiny_model(eos_token_id=eos)
    made.generation_config.eos_token_id = eos
    return made


def spread_out() -> PreTrainedModel:
    """As device_map="auto" leaves a model that is too large for one GPU."""
    model = tiny_model()
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    return model


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(vocab_size=26, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2))


def encoder() -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


def trained(**config: Any) -> Case:
    """Train with these fields of PPOConfig."""
    return given(config)


def given(config: dict | None = None, **makers: Any) -> Case:
    """Train with these arguments of PPOTrainer, which functions make anew for each test."""
    arguments = lambda: {name: make() if callable(make) else make for name, make in makers.items()}  # noqa: E731
    return lambda bench: bench.make_trainer(config, **arguments()).train()


def data(*prompts: Any, column: str = "prompt", **config: Any) -> Case:
    """Train on these prompts."""
    return given(config, train_dataset=lambda: Dataset.from_dict({column: list(prompts)}))


def resumed(change: Callable[[Path], Any] = lambda folder: None, config: dict | None = None, **makers) -> Case:
    """Resume from a changed copy of the checkpoint, or with other fields and arguments."""

    def case(bench: Bench) -> None:
        folder = bench.folder / "checkpoint-2"
        shutil.copytree(bench.checkpoint, folder)
        change(folder)
        resume(bench.make_trainer, folder, config, **{name: make() for name, make in makers.items()})

    return case


def resume(make_trainer, checkpoint: Path, config: dict | None = None, **arguments) -> None:
    config = {"save_strategy": "steps", "save_steps": 1, **(config or {})}
    make_trainer(config, **{"train_dataset": PROMPTS, "peft_config": lora(), **arguments}).train(
        resume_from_checkpoint=str(checkpoint)
    )


def of_size(vocab_size: int) -> Callable[[], PreTrainedModel]:
    return lambda: tiny_model(vocab_size=vocab_size)


def of_lora(**fields: Any) -> Case:
    """Train with this adapter."""
    return given(peft_config=lambda: lora(**fields))


def told(critic_prompt: Any = "3！") -> Dataset:
    """Prompts of which the critic is told more."""
    return PROMPTS.add_column("critic_prompt", [critic_prompt] * len(PROMPTS))


def remove_a_process(folder: Path) -> None:
    (folder / "ppo_state_0.json").unlink()
    seal(folder)  # so that the file is not missed as damage


def made(kind: Callable[..., Any], *arguments: Any) -> Callable[..., Case]:
    """Construct an object with these arguments and more."""
    return lambda **more: lambda bench: kind(*arguments, **more)


tolerant, traced, clipped = made(TolerantReward, count_digits), made(TokenTraceCallback), made(ClipMetricsCallback)
server = made(lambda url="http://127.0.0.1:9", **more: RewardServer(url, **more))


def flags(*words: str) -> Case:
    return lambda bench: HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        ["--output_dir", str(bench.folder), *words]
    )


TOOL = {"role": "tool", "content": "1"}
GRPO = {"advantage_estimator": "grpo", "num_generations": 2}
PLAIN = {"advantage_estimator": "reinforce_plus_plus"}  # without a critic
UPPER = {"critic_layers": 1}
LATE = {"critic_update": "after_actor"}
# What each error names and its remedy, and the bad input, which is another way of being wrong each time.
CASES: dict[str, Case] = {
    # Fields
    r"gamma=1\.01 .*\[0, 1\]": trained(gamma=1.01),
    "learning_rate='1e-5'.*1.0e-5": trained(learning_rate="1e-5"),
    "kl_coef=inf.*finite": trained(kl_coef=float("inf")),
    "kl_estimator='k4'.*k3": trained(kl_estimator="k4"),
    "HfArgumentParser.*--kl_coeff": flags("--kl_coeff", "0.1"),
    "advantage_estimator='grpo'.*num_generations": trained(advantage_estimator="grpo"),
    "per_device_train_batch_size.*num_generations=3": trained(num_generations=3),
    "max_completion_length.*max_prompt_length": trained(max_completion_length=123),
    "metric_for_best_model.*unscorable_frac": trained(metric_for_best_model="eval_loss"),
    "optim=.*adamw_torch": trained(optim="schedule_free_adamw"),  # which has two sets of weights
    "prompt_candidates=2 .*'reinforce_plus_plus'": trained(prompt_candidates=2, **PLAIN),
    "rollouts_ahead=2 must be 0 or 1": trained(rollouts_ahead=2),
    "rollouts_ahead=1 .* set vllm_mode='server'": trained(rollouts_ahead=1, use_vllm=True),
    "rollouts_ahead=1 .* torch_compile=True": trained(rollouts_ahead=1, torch_compile=True),
    r"rollouts_ahead=1 .*target_parameters=\['down_proj', .* set rollouts_ahead=0": given(
        {"rollouts_ahead": 1}, model=lambda: tiny_experts("qwen3_moe")
    ),
    **{
        f"torch_compile_mode='{mode}' records a CUDA graph.* leave torch_compile_mode": trained(
            torch_compile_mode=mode
        )
        for mode in ("reduce-overhead", "max-autotune")
    },
    # Prompts
    "train_dataset.*rename_column": data("1+1=", column="question"),
    "train_dataset.*completions.*rename": given(train_dataset=lambda: PROMPTS.add_column("completions", ["2"] * 16)),
    "prompts.*list": lambda bench: bench.make_trainer().rollout("1+1="),
    "row 1.*'role'": data("1+1=", None),
    "row 0.*'content'": data([{"role": "user"}]),
    "row 0.*chat template": given(
        processing_class=strict_tokenizer, train_dataset=lambda: Dataset.from_dict({"prompt": [[TOOL]]})
    ),
    "train_dataset.*max_prompt_length": data("1+1=", "1+2=", max_prompt_length=3),
    "train_dataset.*max_steps": given({"max_steps": -1}, train_dataset=PROMPTS.to_iterable_dataset),
    # Models and tokenizers
    "args.*PPOConfig": lambda bench: PPOTrainer(
        tiny_model(), count_digits, TrainingArguments("runs", report_to="none")
    ),
    "model.*adapter": given(model=lambda: adapter().get_base_model()),
    "model.*AutoModelForCausalLM": given(model=t5),
    "train_dataset has token id.*processing_class": given(model=of_size(10)),
    "processing_class.*resize_token_embeddings": given(
        processing_class=tokenizer_with_added_padding, model=of_size(25)
    ),
    "generation_config.*resize_token_embeddings": given(model=lambda: model_with_eos(50_256)),
    "processing_class.*eos_token": given(processing_class=tokenizer_without_eos, model=lambda: model_with_eos(None)),
    "ref_model.*token": given(ref_model=of_size(20)),
    "critic='adaptor'.*'shared'": given(critic="adaptor"),
    "critic.*device_map": given(critic=spread_out),
    "critic.*'adapter'": given(critic=encoder),  # which reads ahead
    "critic.*peft_config": lambda bench: bench.make_trainer(critic=str(bench.checkpoint), peft_config=lora(r=2)),
    "peft_config.*LoRA": given(peft_config=lambda: PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
    "layer_replication.*adapter": of_lora(layer_replication=[(0, 2), (0, 2)]),
    "alora_invocation_tokens.*peft_config": of_lora(alora_invocation_tokens=[3]),
    "bias='all'.*peft_config": of_lora(bias="all"),
    "model.*peft_config": given(model=adapter),
    # Critics
    "num_critic_epochs=4 train the critic, but vf_coef=0": trained(num_critic_epochs=4, vf_coef=0.0),
    "num_critic_epochs=4 has no effect": trained(num_critic_epochs=4, **PLAIN),
    "critic_pretraining_completions=26, .* uses up total_episodes=32": trained(
        critic_pretraining_completions=26, total_episodes=32
    ),
    "critic_pretraining_completions=26 has no effect": trained(critic_pretraining_completions=26, **PLAIN),
    "critic_layers=1 is for critic='adapter'.* is 'shared'; leave": given(UPPER, critic="shared"),
    "critic is 'model'; leave critic_layers out": given(UPPER, critic=scorer),
    "critic_layers=2 must be below the model's 2 layers; lower it": trained(critic_layers=2),
    "critic_layers=0 must be at least 1": trained(critic_layers=0),
    "critic_layers=1 has no effect": trained(**UPPER, **PLAIN),
    "critic_layers=1 leaves the critic no weight to train": given(
        UPPER, peft_config=lambda: lora(target_modules=["q_proj"], layers_to_transform=[0])
    ),
    "weights returns at λ = 1, but lam_critic=None; set it to 1.0": trained(critic_update="policy_aligned"),
    "critic_update='after_actor' has no effect": trained(**LATE, **GRPO),
    "vf_coef=0 gives its loss no weight": trained(**LATE, vf_coef=0.0),
    "set critic='shared_detached' or 'adapter'": given(LATE, critic="shared"),
    "is an adapter, and critic='shared' has none": given(critic="shared", critic_peft_config=lora),
    "critic_peft_config has no effect with advantage_estimator='grpo'": given(GRPO, critic_peft_config=lora),
    "bias='all' trains biases": given(critic_peft_config=lambda: lora(bias="all")),
    "with critic='shared' the critic starts from states": given(critic="shared", train_dataset=told),
    "with critic='shared_detached' the critic": given(critic="shared_detached", train_dataset=told),
    "with critic_layers=1 the critic starts from states": given(UPPER, train_dataset=told),
    "row 0: the critic_prompt '' has no tokens": given(train_dataset=lambda: told("")),
    "row 0: critic_prompt=1 is neither text nor": given(train_dataset=lambda: told(1)),
    # Reward functions and callbacks
    "reward_funcs is empty; give at least one": given({"kl_coef": 1.0}, reward_funcs=None),
    "reward_funcs is empty.*docs/distillation.md": given({"kl_coef": 0.0}, reward_funcs=None, ref_model=tiny_model),
    "on_error='ignore' must be 'skip' or a finite number": tolerant(on_error="ignore"),
    "timeout=0 must be above 0": tolerant(timeout=0),
    r"max_failed=1.5 must be in \[0, 1\]": tolerant(max_failed=1.5),
    "'localhost:80' is not an HTTP address; write http://host:port/path": server(url="localhost:80"),
    "'ftp://a/b' is not an HTTP address": server(url="ftp://a/b"),
    "timeout=0 must be above 0, max_concurrency": server(timeout=0),
    "max_retries=-1 0 or more": server(max_retries=-1),
    "max_concurrency=0 1 or more": server(max_concurrency=0),
    "batch_size=0 must be 1 or more": server(batch_size=0),
    "every=0": traced(every=0),
    "num_completions=0": traced(num_completions=0),
    r"TokenTraceCallback\(trainer=trainer, prompts=": traced(prompts=["x"]),
    r"columns \(evry\) belong together": traced(evry=2),
    "target=": clipped(target=0.0),
    "by=": clipped(by="ratio"),
    "then=": clipped(target=0.1, then="halt"),
    "reward_weights.*count_digits": trained(reward_weights=[1.0, 2.0]),
    "AdaptiveKLCallback.*kl_coef": given({"kl_coef": 0.0}, callbacks=lambda: [AdaptiveKLCallback()]),
    "horizon=1.5.*8 completions": given(callbacks=lambda: [AdaptiveKLCallback(horizon=1.5)]),  # of a rollout
    # Resuming
    "num_mini_batches.*resume": resumed(config={"num_mini_batches": 4}),
    "seed.*resume": resumed(config={"seed": 4}),
    "optim=.*resume": resumed(config={"optim": "sgd"}),
    "prompts.*resume": resumed(train_dataset=lambda: PROMPTS.select(range(15, -1, -1))),
    r"base \(SHA-256.*resume": resumed(model=lambda: tiny_model(seed=7)),
    "lora_alpha.*resume": resumed(peft_config=lambda: lora(lora_alpha=16)),
    "ppo_state_0.*another trainer": resumed(remove_a_process),
    "resume_from_checkpoint.*output_dir": lambda bench: bench.make_trainer().train(resume_from_checkpoint=True),
}


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
    config = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    small_trainer(folder, config, train_dataset=PROMPTS, peft_config=lora()).train()
    return folder / "checkpoint-2"


@pytest.fixture
def bench(sealed, make_trainer, tmp_path, checkpoint) -> Bench:
    return Bench(make_trainer, tmp_path, checkpoint)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("message", "case"), CASES.items(), ids=CASES)
def test_bad_input_is_refused_by_name(bench, message, case):
    """And neither the output folder nor the checkpoint changes."""
    earlier = bench.folder / "out" / "adapter_model.safetensors"
    earlier.parent.mkdir()
    earlier.write_bytes(b"an earlier run's")
    before, first_run = contents(earlier.parent), contents(bench.checkpoint)
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        case(bench)
    assert contents(earlier.parent) == before
    assert contents(bench.checkpoint) == first_run


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


@pytest.mark.parametrize(
    ("name", "value"),
    [("processing_class", len), ("peft_config", {"r": 8}), ("peft_config", LoraConfig), ("tools", len)],
)
def test_an_argument_of_another_type_is_refused_with_the_right_one(make_trainer, name, value):
    with pytest.raises(TypeError, match=rf"^{name}={re.escape(repr(value))} cannot be used; pass a"):
        make_trainer(**{name: value})


@pytest.mark.parametrize("which", ["tokenizer", "generation config"])
def test_one_end_of_sequence_is_enough(make_trainer, which):
    if which == "tokenizer":
        trainer = make_trainer(model=model_with_eos(None))
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
    assert_same_tensors(model.state_dict(), before)


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


def test_a_reward_functions_wrong_output_ends_training_before_its_first_step(make_trainer, tmp_path):
    def my_reward(**kwargs):
        return [1.0] * 7

    trainer = make_trainer({"save_strategy": "steps", "save_steps": 1}, reward_funcs=[count_digits, my_reward])
    with pytest.raises((TypeError, ValueError), match="reward function 'my_reward'"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not any((tmp_path / "out").iterdir())


def test_arguments_whose_order_differs_from_grpos_are_not_taken_by_position(dataset, tokenizer, tmp_path):
    """GRPOTrainer's seventh is the reward functions' tokenizers."""
    args = PPOConfig(**SMALL, output_dir=str(tmp_path / "out"))
    with pytest.raises(TypeError, match="positional arguments but 8 were given"):
        PPOTrainer(tiny_model(), count_digits, args, dataset, None, tokenizer, tokenizer)


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
