"""A table of bad inputs, by where it is refused, as in "Errors" of docs/configuration.md."""

import contextlib
import copy
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    HfArgumentParser,
    LlamaForSequenceClassification,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from helpers.http_server import Server
from helpers.runs import count_digits
from helpers.scripted import token_mask
from helpers.tiny import LORA, tiny_model
from hfppo import AdaptiveKLCallback, PPOConfig, PPOTrainer, RewardServer
from hfppo.checks.config import check_config
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.reward_func import RewardBatch
from hfppo.saving.manifest import seal
from hfppo.token_trace import TokenTraceCallback

NAN, INFINITY = float("nan"), float("inf")
PROMPTS = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]})
CHAT = [{"role": "user", "content": "1+1="}]
PROMPT_TUNING = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
SMALL_MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass(frozen=True)
class Bench:
    """What a bad input is tried with."""

    make_trainer: Callable[..., Any]
    folder: Path  # of this case alone
    checkpoint: Path  # of a run with PROMPTS and `lora()`, after 2 of the 4 steps of a rollout
    monkeypatch: pytest.MonkeyPatch


Case = Callable[[Bench], Any]


def trained(arguments: Callable[[], dict[str, Any]] = dict, **config: Any) -> Case:
    """Train with these arguments of PPOTrainer, made anew for each test, and fields of PPOConfig."""
    return lambda bench: bench.make_trainer(config, **arguments()).train()


def two_processes(bench: Bench) -> None:
    """Be one of two processes that Trainer has not joined."""
    args = bench.make_trainer().args
    bench.monkeypatch.setenv("WORLD_SIZE", "2")
    check_config(args)


def told_to_end(bench: Bench) -> None:
    """Be one of two processes that Trainer has joined, with checkpoints on SIGTERM."""
    args = bench.make_trainer({"enable_jit_checkpoint": True}).args
    bench.monkeypatch.setattr(PPOConfig, "world_size", 2)
    check_config(args)


def data(*prompts: Any, column: str = "prompt", **config: Any) -> Case:
    """Train on these prompts."""
    return trained(lambda: {"train_dataset": Dataset.from_dict({column: list(prompts)})}, **config)


def resumed(
    change: Callable[[Path], Any] = lambda folder: None, arguments: Callable[[], dict[str, Any]] = dict, **config: Any
) -> Case:
    """Go on from a changed copy of the checkpoint, or with other arguments and fields."""

    def case(bench: Bench) -> None:
        folder = bench.folder / "checkpoint-2"
        shutil.copytree(bench.checkpoint, folder)
        change(folder)
        trainer = bench.make_trainer(
            {"save_strategy": "steps", "save_steps": 1, **config},
            **{"train_dataset": PROMPTS, "peft_config": lora(), **arguments()},
        )
        trainer.train(resume_from_checkpoint=str(folder))

    return case


def critic_of_the_checkpoint(**arguments: Callable[[], Any]) -> Case:
    """Train with the checkpoint's critic and something that it does not fit."""
    return lambda bench: bench.make_trainer(
        critic=str(bench.checkpoint), **{"peft_config": lora(), **{name: make() for name, make in arguments.items()}}
    ).train()


def returned(output: Callable[[list[list[int]]], Any], log: Callable[..., Any] = lambda **_: None) -> Case:
    """A reward function that logs and returns this, as a function of the token ids of 8 completions."""

    def my_reward(completion_ids, **kwargs):
        log(**kwargs)
        return output(completion_ids)

    ids = [[4, 1], [3, 4, 1], [3, 4, 5, 1]] * 2 + [[3, 1], [4, 1]]
    batch = RewardBatch(["1+1="] * 8, ["2", "12", "123"] * 2 + ["1", "2"], ids, token_mask(ids))
    return lambda bench: RewardFunctions([count_digits, my_reward])(batch)


def answered(status: int, content: bytes, **options: Any) -> Case:
    """A reward server that answers this."""

    def case(bench: Bench) -> None:
        server = Server(lambda body: (status, content))
        try:
            bench.make_trainer(reward_funcs=RewardServer(server.url, max_retries=0, **options)).train()
        finally:
            server.stop()

    return case


def flags(*words: str) -> Case:
    """Words on the command line of a script that parses PPOConfig; the last line it leaves is the error."""

    def case(bench: Bench) -> None:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                HfArgumentParser(PPOConfig).parse_args_into_dataclasses(["--output_dir", str(bench.folder), *words])
        except SystemExit as error:
            raise SystemExit(said.getvalue().splitlines()[-1].split(": ", 1)[1]) from error

    return case


def in_yaml(text: str) -> Case:
    """A configuration file of a recipe."""

    def case(bench: Bench) -> None:
        trl = pytest.importorskip("trl")
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            trl.TrlParser(PPOConfig).parse_args_and_config(["--config", file.name])

    return case


def lora(**changes: Any) -> LoraConfig:
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**config, **changes})


def spread_out() -> PreTrainedModel:
    """As device_map="auto" leaves a model that one GPU does not hold."""
    model = tiny_model()
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    return model


def long_rope() -> Phi3ForCausalLM:
    factors = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = {"original_max_position_embeddings": 10, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Phi3ForCausalLM(Phi3Config(**SMALL_MODEL, **config, rope_parameters=rope))


def encoder() -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(**SMALL_MODEL))


def saved(bench: Bench, model: Any) -> str:
    """Where the model was saved."""
    model.save_pretrained(bench.folder / "saved")
    return str(bench.folder / "saved")


def adapter(config=LORA, **model_config: Any) -> PeftModel:
    return get_peft_model(tiny_model(**model_config), copy.deepcopy(config))


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(vocab_size=26, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2))


def tokenizer_without_eos():
    made = character_tokenizer()
    made.eos_token = None
    return made


def tokenizer_with_added_padding():
    made = character_tokenizer()
    made.add_special_tokens({"pad_token": "[PAD]"})
    return made


def strict_tokenizer():
    """Its template knows one role."""
    made = character_tokenizer()
    made.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    return made


def model_without_eos():
    made = tiny_model(eos_token_id=None)
    made.generation_config.eos_token_id = None
    return made


def model_with_far_eos():
    made = tiny_model()
    made.generation_config.eos_token_id = 50_256
    return made


def mixed_prompts() -> Dataset:
    """Arrow holds no such column, but a transform can make one."""
    dataset = Dataset.from_dict({"prompt": ["1+1=", json.dumps(CHAT)]})

    def decode(batch):
        return {"prompt": [json.loads(text) if text.startswith("[") else text for text in batch["prompt"]]}

    return dataset.with_transform(decode)


def with_two_arguments(prompts, completions):
    return [0.0] * len(completions)


def with_a_missing_column(completions, solution, **kwargs):
    return [0.0] * len(completions)


def change_a_byte(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def without(name: str) -> Callable[[Path], None]:
    """Take a file out, and list the others anew."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        seal(folder)

    return change


def by_field(*configs: dict[str, Any]) -> Iterator[tuple[str, Case]]:
    """Cases that are called by their fields."""
    for config in configs:
        yield ", ".join(f"{name}={value!r}" for name, value in config.items()), trained(**config)


TABLE: dict[str, dict[str, Case]] = {
    "Fields": dict(
        by_field(
            *({"gamma": 1.01}, {"gamma": -0.1}, {"gamma": NAN}, {"gamma": True}, {"lam": 1.5}, {"lam_critic": -1.0}),
            *({"kl_coef": -0.05}, {"kl_coef": INFINITY}, {"kl_coef": None}, {"kl_loss_coef": -0.05}),
            *({"entropy_coef": -0.01}, {"positive_nll_coef": -0.1}, {"vf_coef": -0.1}, {"missing_eos_penalty": -1.0}),
            *({"learning_rate": -1e-5}, {"learning_rate": "1e-5"}, {"critic_learning_rate": -1e-5}),
            *({"max_grad_norm": -1.0}, {"weight_decay": -0.1}, {"seed": -1}, {"seed": "3"}, {"critic_warmup": -1}),
            *({"temperature": 0.0}, {"temperature": None}, {"lam_alpha": 0.0}, {"target_kl": 0.1}),
            *({"cliprange": 0.0}, {"cliprange": 1.0}, {"cliprange_high": 0.0}),
            *({"cliprange_value": 0.0}, {"dual_clip": 1.0}, {"vllm_importance_sampling_clip_max": 0.9}),
            *({"vllm_gpu_memory_utilization": 1.5}, {"vllm_server_timeout": 0.0}),
            *({"num_ppo_epochs": 0}, {"num_ppo_epochs": 2.5}, {"num_mini_batches": 0}, {"num_generations": 0}),
            *({"num_generations": None}, {"total_episodes": 0}, {"max_prompt_length": 0}, {"max_steps": "8"}),
            *({"max_completion_length": 0}, {"local_rollout_forward_batch_size": 0}),
            {"max_tokens_per_micro_batch": 0},
            *({"per_device_train_batch_size": -4}, {"per_device_eval_batch_size": 0}),
            {"gradient_accumulation_steps": 0},
            *({"whiten_rewards": "false"}, {"bf16": "yes"}, {"use_vllm": 1}),
            *({"chat_template_kwargs": "thinking=no"}, {"model_init_kwargs": 5}),
            *({"kl_estimator": "k4"}, {"kl_loss_estimator": "kl"}, {"advantage_estimator": "gea"}),
            *({"policy_loss": "pppo"}, {"policy_mode": "coupled"}, {"loss_reduction": "mean"}),
            *({"overlong_prompts": "keep"}, {"vllm_mode": "local"}),
            {"vllm_importance_sampling_mode": "token_clip"},
            *({"kl_coeff": 0.1}, {"beta": 0.1}, {"epsilon": 0.2}, {"warmup_ratio": 0.1}),
        )
    ),
    "Fields that contradict each other": dict(
        by_field(
            *({"advantage_estimator": name} for name in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")),
            *({"num_generations": 3}, {"num_generations": 16}, {"auto_find_batch_size": True}),
            {"critic_warmup": 2, "advantage_estimator": "reinforce_plus_plus"},
            *({"neftune_noise_alpha": 5.0}, {"optim": "schedule_free_adamw"}),
            {"model_init_kwargs": {"dtype": "bf16"}},
            {"bf16_full_eval": True},
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
            *({"max_completion_length": 123}, {"max_steps": 0}, {"chat_template_kwargs": {"tokenize": False}}),
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "localhost"},
        )
    ),
    "Evaluations": {
        "a name of none": lambda bench: bench.make_trainer(eval_dataset={"hard": PROMPTS}).evaluate("easy"),
    },
    "Command line and YAML": {
        "--kl_coeff 0.1": flags("--kl_coeff", "0.1"),
        "--gamma 1.5": flags("--gamma", "1.5"),
        "--num_generations two": flags("--num_generations", "two"),
        "--overlong_prompts keep": flags("--overlong_prompts", "keep"),
        "--vllm_engine_kwargs max_model_len=9": flags("--vllm_engine_kwargs", "max_model_len=9"),
        "num_minibatches: 5": in_yaml("num_minibatches: 5\n"),
        "two processes without a GPU and without --use_cpu": two_processes,
        "two processes with --enable_jit_checkpoint": told_to_end,
    },
    "Prompts": {
        "no rows": data(),
        "no prompt column": data("1+1=", column="question"),
        "a column named as what the trainer passes": trained(
            lambda: {"train_dataset": Dataset.from_dict({"prompt": ["1"], "completions": ["2"]})}
        ),
        "text and messages": trained(lambda: {"train_dataset": mixed_prompts()}),
        "numbers": data(7, 8),
        "a text to rollout": lambda bench: bench.make_trainer().rollout("1+1="),
        "a missing prompt": data("1+1=", None),
        "an empty prompt": data("1", "", "2"),
        "an empty conversation": data(CHAT, []),
        "lists of words": data(["1", "2"]),
        "a message without content": data([{"role": "user"}]),
        "a number as content": data([{"role": "user", "content": 5}]),
        "no role": data([{"role": None, "content": "1"}]),
        "a role that the chat template refuses": trained(
            lambda: {
                "train_dataset": Dataset.from_dict({"prompt": [CHAT, [{"role": "tool", "content": "1"}]]}),
                "processing_class": strict_tokenizer(),
            }
        ),
        "conversations without a chat template": trained(
            lambda: {
                "train_dataset": Dataset.from_dict({"prompt": [CHAT]}),
                "processing_class": character_tokenizer(),
            }
        ),
        "a list": trained(lambda: {"train_dataset": [{"prompt": "1+1="}]}),
        "several splits": trained(lambda: {"train_dataset": DatasetDict(train=PROMPTS, test=PROMPTS)}),
        "a stream without an end of the run": trained(
            lambda: {"train_dataset": PROMPTS.to_iterable_dataset()}, max_steps=-1
        ),
        "a stream of prompts of any length": trained(
            lambda: {"train_dataset": PROMPTS.to_iterable_dataset()}, max_prompt_length=None
        ),
        "a stream of prompts that are all too long": trained(
            lambda: {"train_dataset": PROMPTS.to_iterable_dataset()}, max_prompt_length=3
        ),
        "a stream to evaluate on": trained(lambda: {"eval_dataset": PROMPTS.to_iterable_dataset()}),
        "all prompts too long": data("1+1=", "1+2=", max_prompt_length=3),
        "a bad evaluation set": trained(lambda: {"eval_dataset": {"hard": Dataset.from_dict({"prompt": []})}}),
        "none to train on": trained(lambda: {"train_dataset": None}),
    },
    "Models and tokenizers": {
        "a TrainingArguments as args": lambda bench: PPOTrainer(
            tiny_model(), count_digits, TrainingArguments("runs", report_to="none")
        ),
        "the output folder as model": lambda bench: bench.make_trainer(
            {"output_dir": (folder := saved(bench, tiny_model()))}, model=folder
        ).train(),
        "a base with an adapter in it": trained(lambda: {"model": adapter().get_base_model()}),
        "a number as model": trained(lambda: {"model": 5}),
        "an encoder-decoder": trained(lambda: {"model": t5()}),
        "an encoder": trained(
            lambda: {"model": BertForMaskedLM(BertConfig(vocab_size=26, **SMALL_MODEL, intermediate_size=16))}
        ),
        "a trunk without its output head": trained(lambda: {"model": tiny_model().model}),
        "a classifier": trained(lambda: {"model": LlamaForSequenceClassification(tiny_model().config)}),
        "no such model": trained(lambda: {"model": "org/none"}),
        "no such model, no tokenizer": trained(lambda: {"model": "org/none", "processing_class": None}),
        "a text as tokenizer": trained(lambda: {"processing_class": "gpt2"}),
        "another model's tokenizer": trained(lambda: {"model": tiny_model(vocab_size=10)}),
        "a padding token of which the model was not told": trained(
            lambda: {"processing_class": tokenizer_with_added_padding(), "model": tiny_model(vocab_size=25)}
        ),
        "an end of sequence of which the model knows nothing": trained(lambda: {"model": model_with_far_eos()}),
        "no end of sequence": trained(
            lambda: {"processing_class": tokenizer_without_eos(), "model": model_without_eos()}
        ),
        "a number as reference": trained(lambda: {"ref_model": 5}),
        "the model as its own reference": trained(lambda: dict.fromkeys(("model", "ref_model"), tiny_model())),
        "a reference with fewer tokens": trained(lambda: {"ref_model": tiny_model(vocab_size=20)}),
        "an encoder-decoder as reference": trained(lambda: {"ref_model": t5()}),
        "no such reference": trained(lambda: {"ref_model": "org/none"}),
        "an unknown critic": trained(lambda: {"critic": "adaptor"}),
        "a number as critic": trained(lambda: {"critic": 5}),
        "a critic with fewer positions": trained(lambda: {"critic": tiny_model(max_position_embeddings=8)}),
        "a reference with fewer positions": trained(lambda: {"ref_model": tiny_model(max_position_embeddings=8)}),
        "more positions than LongRoPE leaves as they are": trained(lambda: {"model": long_rope()}),
        "a model over several devices": trained(lambda: {"model": spread_out()}),
        "a critic over several devices": trained(lambda: {"critic": spread_out()}),
        "a reference over several devices": trained(lambda: {"ref_model": spread_out()}),
        "a critic that reads from both sides": trained(lambda: {"critic": encoder()}),
        "an adapter as critic": trained(lambda: {"critic": adapter()}),
        "the folder of an adapter as critic": lambda bench: bench.make_trainer(critic=saved(bench, adapter())),
        "a critic with fewer tokens": trained(lambda: {"critic": tiny_model(vocab_size=20)}),
        "a saved critic of another rank": critic_of_the_checkpoint(peft_config=lambda: lora(r=2)),
        "a saved critic of another lora_alpha": critic_of_the_checkpoint(peft_config=lambda: lora(lora_alpha=16)),
        "a saved critic of other modules": critic_of_the_checkpoint(
            peft_config=lambda: lora(exclude_modules=["q_proj"])
        ),
        "a saved critic of another base": critic_of_the_checkpoint(model=lambda: tiny_model(hidden_size=16)),
    },
    "Adapters": {
        **{
            f"init_lora_weights={name!r}": trained(lambda name=name: {"peft_config": lora(init_lora_weights=name)})
            for name in ("pissa", "pissa_niter_4", "olora")
        },
        **{
            f"bias={bias!r}": trained(lambda bias=bias: {"peft_config": lora(bias=bias)})
            for bias in ("all", "lora_only")
        },
        "an adapter for classification": trained(lambda: {"peft_config": lora(task_type="SEQ_CLS")}),
        "prompt tuning": trained(lambda: {"peft_config": copy.deepcopy(PROMPT_TUNING)}),
        "a prompt-tuned model": trained(lambda: {"model": adapter(PROMPT_TUNING), "peft_config": None}),
        "an adapter with biases": trained(
            lambda: {"model": adapter(lora(bias="all"), attention_bias=True), "peft_config": None}
        ),
        "an adapter on an adapter": trained(lambda: {"model": adapter(), "peft_config": lora()}),
        "layers used twice": trained(lambda: {"peft_config": lora(layer_replication=[(0, 2), (0, 2)])}),
        "an adapter that tokens switch on": trained(lambda: {"peft_config": lora(alora_invocation_tokens=[3])}),
        "target modules that do not exist": trained(lambda: {"peft_config": lora(target_modules=["nope"])}),
    },
    "Reward functions": {
        "none": trained(lambda: {"reward_funcs": []}),
        "a number": trained(lambda: {"reward_funcs": 5}),
        "a list with a number": trained(lambda: {"reward_funcs": [count_digits, 0.5]}),
        "None": trained(lambda: {"reward_funcs": None}),
        "a language model": trained(lambda: {"reward_funcs": [tiny_model()]}),
        "no such reward model": trained(lambda: {"reward_funcs": "org/none"}),
        "a model without a name, and no tokenizer": trained(
            lambda: {"reward_funcs": LlamaForSequenceClassification(tiny_model().config)}
        ),
        "a reward model whose tokenizer has no chat template, for conversations": trained(
            lambda: {
                "reward_funcs": LlamaForSequenceClassification(tiny_model(num_labels=1).config),
                "reward_processing_classes": character_tokenizer(),
                "train_dataset": Dataset.from_dict({"prompt": [CHAT]}),
                "processing_class": strict_tokenizer(),
            }
        ),
        "a function without **kwargs": trained(lambda: {"reward_funcs": with_two_arguments}),
        "a function that needs a column": trained(lambda: {"reward_funcs": with_a_missing_column}),
        "two tokenizers for one function": trained(lambda: {"reward_processing_classes": [None, None]}),
        "too many weights": trained(reward_weights=[1.0, 2.0]),
        "too few weights": trained(lambda: {"reward_funcs": [count_digits, count_digits]}, reward_weights=[1.0]),
        "no weight": trained(reward_weights=[0.0]),
        "weight NaN": trained(reward_weights=[NAN]),
        "weight infinite": trained(reward_weights=[INFINITY]),
    },
    "What reward functions return": {
        "too few": returned(lambda ids: [1.0] * 7),
        "too many": returned(lambda ids: [1.0] * 9),
        "none at all": returned(lambda ids: []),
        "text among numbers": returned(lambda ids: [1.0] * 5 + ["1"] * 3),
        "an empty list among numbers": returned(lambda ids: [1.0, [], *[1.0] * 6]),
        "complex numbers": returned(lambda ids: [1j] * 8),
        "NaN": returned(lambda ids: [1.0, NAN] * 4),
        "infinity": returned(lambda ids: [1.0] * 7 + [INFINITY]),
        "more than float32 holds": returned(lambda ids: [1.0] * 7 + [1e300]),
        "a tensor of NaN": returned(lambda ids: torch.full((8,), NAN)),
        "too many token rewards": returned(lambda ids: [[0.0] * (len(row) + (i > 2)) for i, row in enumerate(ids)]),
        "too few token rewards": returned(lambda ids: [[0.0] * len(ids[0]), [0.0], *[1.0] * 6]),
        "a token reward of NaN": returned(lambda ids: [[0.0] * (len(row) - 1) + [NAN] for row in ids]),
        "a token reward of None": returned(lambda ids: [[None] * len(row) for row in ids]),
        "None for all": returned(lambda ids: None),
        "one number": returned(lambda ids: 1.0),
        "a text": returned(lambda ids: "12345678"),
        "a dictionary": returned(lambda ids: dict.fromkeys(range(8), 1.0)),
        "a generator": returned(lambda ids: (1.0 for _ in ids)),
    },
    "Reward servers": {
        "no address": trained(lambda: {"reward_funcs": "http://"}),
        "not there": trained(lambda: {"reward_funcs": RewardServer("http://127.0.0.1:9/score", max_retries=0)}),
        "500": answered(500, b"out of memory"),
        "404": answered(404, b"no such page"),
        "a redirect": answered(302, b"elsewhere"),
        "no JSON": answered(200, b"<html>welcome</html>"),
        "no scores": answered(200, b'{"result": []}'),
        "too many scores": answered(200, b'{"scores": [1.0]}'),
        "a column that the dataset lacks": answered(200, b'{"scores": []}', columns=["solution"]),
    },
    "Callbacks": {
        "one outside of a list": trained(lambda: {"callbacks": AdaptiveKLCallback()}),
        "a trace with a misspelt argument": lambda bench: TokenTraceCallback(evry=2),
        "a target of 0": lambda bench: AdaptiveKLCallback(target=0.0),
        "a target of NaN": lambda bench: AdaptiveKLCallback(target=NAN),
        "a horizon of 0": lambda bench: AdaptiveKLCallback(horizon=0),
        "an adaptive KL that starts from 0": trained(lambda: {"callbacks": [AdaptiveKLCallback()]}, kl_coef=0.0),
    },
    "Resuming": {
        **{
            ", ".join(f"{name}={value!r}" for name, value in config.items()): resumed(**config)
            for config in (
                *({"num_mini_batches": 4}, {"per_device_train_batch_size": 2}, {"gradient_accumulation_steps": 2}),
                *({"num_ppo_epochs": 3}, {"num_generations": 2}, {"advantage_estimator": "reinforce_plus_plus"}),
                *({"policy_mode": "bypass"}, {"temperature": 0.5}, {"seed": 4}, {"optim": "sgd"}),
            )
        },
        "other prompts": resumed(arguments=lambda: {"train_dataset": PROMPTS.select(range(15))}),
        "prompts in another order": resumed(arguments=lambda: {"train_dataset": PROMPTS.select(range(15, -1, -1))}),
        "another base": resumed(arguments=lambda: {"model": tiny_model(seed=7)}),
        "a narrower base": resumed(arguments=lambda: {"model": tiny_model(hidden_size=16)}),
        "another kind of critic": resumed(arguments=lambda: {"critic": "shared"}),
        "another rank": resumed(arguments=lambda: {"peft_config": lora(r=2)}),
        "another reference": resumed(arguments=lambda: {"ref_model": tiny_model(seed=7)}),
        "other trained tokens": resumed(arguments=lambda: {"peft_config": lora(trainable_token_indices=[1])}),
        "other modules to save": resumed(arguments=lambda: {"peft_config": lora(modules_to_save=["norm"])}),
        "another lora_alpha": resumed(arguments=lambda: {"peft_config": lora(lora_alpha=16)}),
        "other target modules": resumed(arguments=lambda: {"peft_config": lora(target_modules=["q_proj"])}),
        "other modules left out": resumed(arguments=lambda: {"peft_config": lora(exclude_modules=["q_proj"])}),
        "a file is missing": resumed(lambda folder: (folder / "optimizer.pt").unlink()),
        "a file has changed": resumed(change_a_byte),
        "a plain Trainer's": resumed(lambda folder: (folder / "manifest.json").unlink()),
        "no folder": resumed(shutil.rmtree),
        "no critic": resumed(without("critic/critic.safetensors")),
        "fewer processes": resumed(without("ppo_state_0.json")),
        "no checkpoint at all": lambda bench: bench.make_trainer().train(resume_from_checkpoint=True),
    },
}
