"""TRL's names of fields are translated or explained; scripts of its documentation run here with two changes."""

import copy
import inspect
import pickle
from dataclasses import dataclass, fields, replace

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import GRPOConfig

from helpers.agents import VOCAB_SIZE, calling_tokenizer
from helpers.tiny import LORA, tiny_model
from hfppo import PPOConfig, PPOTrainer
from hfppo.trl_names import WITHOUT

# TRL's configuration still passes transformers' old name on.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def test_all_unknown_fields_are_named_at_once_each_with_its_word_here(config):
    unknown = {"top_p": 0.9, "num_ppo_epoch": 3, "batch_size": 4, "disable_dropout": False, "foo": 1, "callbacks": []}
    unknown |= {"warmup_ratio": 1.5, "beta": 0.1, "loss_type": "vespo", "steps_per_generation": "many"}
    with pytest.raises(TypeError) as refused:
        config(seed=1, epsilon=0.2, **unknown)
    lines = str(refused.value).splitlines()
    assert lines[0] == "PPOConfig has no field"
    assert [line.split(":")[0].strip(" '") for line in lines[1:-1]] == list(unknown)
    words = ["1.0 is accepted", "num_ppo_epochs", "num_mini_batches", "always off", "foo", "an argument of PPOTrainer"]
    words += ["here warmup_steps", "kl_coef (RLOO's", "here policy_loss", "whole number"]
    assert [word for word, line in zip(words, lines[1:-1], strict=True) if word not in line] == []
    assert "docs/from_trl.md" in lines[-1]


OF_GRPO = {f.name: f.default for f in fields(GRPOConfig)}
INHERITED = {f.name for f in fields(TrainingArguments)}
OWN = {f.name for f in fields(PPOConfig)} - INHERITED


def test_the_defaults_of_grpo_config_are_accepted_but_for_those_that_contradict_ppo(config, caplog):
    defaults = {name: x for name, x in OF_GRPO.items() if name not in INHERITED}
    with pytest.raises(TypeError, match=r"^PPOConfig has no field 'disable_dropout': dropout is always off"):
        config(advantage_estimator="grpo", **defaults)
    args = config(advantage_estimator="grpo", **defaults | {"disable_dropout": True})
    assert (args.num_generations, args.kl_coef, args.kl_loss_coef, args.vllm_server_base_url) == (
        *(8, 0.0, 0.0),
        "http://0.0.0.0:8000",
    )
    (line,) = [text for text in caplog.messages if text.startswith("fields of TRL: ")]
    assert [name for name in defaults if name not in OWN and name not in line] == []
    caplog.clear()
    config(advantage_estimator="grpo", num_generations=8, scale_rewards="group", kl_estimator="k3")
    assert "TRL" not in caplog.text  # nothing was translated


VLLM = {"use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize(
    ("given", "here"),
    [
        (
            {"epsilon": 0.3, "epsilon_high": 0.4, "delta": 2.0},
            {"cliprange": 0.3, "cliprange_high": 0.4, "dual_clip": 2},
        ),
        ({"num_iterations": 3, "response_length": 9}, {"num_ppo_epochs": 3, "max_completion_length": 9}),
        ({"num_completions_to_print": 3, "warmup_ratio": 0.1}, {"log_completions": False, "warmup_steps": 0.1}),
        ({"beta": 0.1}, {"kl_loss_coef": 0.1, "kl_coef": 0.0, "kl_estimator": None}),
        ({"beta": 0.1, "advantage_estimator": "rloo"}, {"kl_loss_coef": 0.0, "kl_coef": 0.1}),
        ({"beta": 0.1, "use_bias_correction_kl": True}, {"kl_estimator": "k3+"}),
        ({"beta": 0.1, "use_bias_correction_kl": False}, {"kl_estimator": "k3"}),
        ({"use_bias_correction_kl": True}, {"kl_estimator": None}),
        ({"steps_per_generation": 6, "gradient_accumulation_steps": 2}, {"num_mini_batches": 3}),
        ({"generation_batch_size": 48, "gradient_accumulation_steps": 2}, {"num_mini_batches": 3}),
        ({"scale_rewards": True}, {"scale_rewards": "group"}),
        ({"scale_rewards": False}, {"scale_rewards": "none"}),
        ({"loss_type": "grpo"}, {"policy_loss": "ppo", "loss_reduction": "seq-mean-token-mean"}),
        ({"loss_type": "dr_grpo"}, {"loss_reduction": "seq-mean-token-sum-norm"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"policy_loss": "cispo", "cliprange_high": 5.0}),
        ({"loss_type": "sapo"}, {"policy_loss": "sapo", "loss_reduction": "seq-mean-token-mean"}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"policy_loss": "gspo"}),
        ({"vllm_server_host": "gpu1", "vllm_server_port": 80}, {"vllm_server_base_url": "http://gpu1:80"}),
        ({"vllm_server_host": "gpu1", "vllm_server_base_url": "http://a"}, {"vllm_server_base_url": "http://a"}),
        (
            {"vllm_gpu_memory_utilization": 0.5, "vllm_engine_kwargs": '{"dtype": "auto"}'},
            {"vllm_engine_kwargs": {"dtype": "auto", "gpu_memory_utilization": 0.5}},
        ),
        ({"trust_remote_code": True}, {"model_init_kwargs": {"trust_remote_code": True}}),
        ({"vllm_importance_sampling_mode": "token_mask"}, {"policy_mode": "decoupled"}),  # without vLLM
        (VLLM | {"vllm_importance_sampling_mode": "token_truncate"}, {"policy_mode": "token_truncate"}),
        (VLLM | {"vllm_importance_sampling_correction": False}, {"policy_mode": "decoupled"}),
        (
            VLLM | {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
            {"policy_mode": "token_mask"},
        ),
    ],
    ids=str,
)
def test_fields_of_trl_with_one_meaning_are_translated(config, given, here):
    args = config(**{"advantage_estimator": "grpo", "num_generations": 2, **given})
    assert {name: getattr(args, name) for name in here} == here


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epsilon": 0.3, "cliprange": 0.2}, ["epsilon=0.3", "cliprange", "0.2"]),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, ["policy_loss", "gspo", "cispo"]),
        (
            {"vllm_engine_kwargs": {"gpu_memory_utilization": 0.4}, "vllm_gpu_memory_utilization": 0.5},
            ["vllm_gpu_memory_utilization=0.5", "vllm_engine_kwargs", "0.4"],
        ),
        ({"vllm_engine_kwargs": "x", "vllm_gpu_memory_utilization": 0.5}, ["vllm_engine_kwargs", "'x'"]),
    ],
    ids=str,
)
def test_two_names_with_different_values_are_both_named(config, given, words):
    with pytest.raises(ValueError, match="leave one out") as refused:
        config(**{"advantage_estimator": "grpo", "num_generations": 2, **given})
    assert [word for word in words if word not in str(refused.value)] == []
    config(advantage_estimator="grpo", num_generations=2, epsilon=0.2, cliprange=0.2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_epoch": 3}, "'num_epoch': did you mean .*num_ppo_epochs.*$"),
        ({"auto_find_batch_sizes": True}, r"'auto_find_batch_sizes' \("),  # PPO refuses auto_find_batch_size
        ({"steps_per_generation": 5, "gradient_accumulation_steps": 2}, "'steps_per_generation': .*num_mini_batches"),
        ({"loss_type": "bnpo"}, "'loss_type': .*policy_loss"),
        ({"top_entropy_quantile": 0.2}, "'top_entropy_quantile': .*every token"),
        ({"reward_clip_range": (-1, 1)}, "'reward_clip_range': .*clip their own scores"),
        ({"sapo_temperature_neg": 2.0}, "'sapo_temperature_neg': .*paper"),
        ({"router_aux_loss_coef": 0.1}, "'router_aux_loss_coef': .*model_init_kwargs"),
        (VLLM | {"vllm_importance_sampling_mode": "token_mask"}, "'vllm_importance_sampling_mode': .*band"),
        (VLLM | {"vllm_importance_sampling_correction": True}, "'vllm_importance_sampling_correction': .*band"),
    ],
    ids=str,
)
def test_a_name_or_value_of_trls_without_a_counterpart_is_refused_in_one_line(config, given, words):
    with pytest.raises(TypeError, match=f"^PPOConfig has no field {words}"):
        config(**given)


def test_a_size_of_all_processes_is_divided_among_them(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {"per_device_train_batch_size": 4, "generation_batch_size": 24}
    assert PPOConfig.translate_names(given) == {"per_device_train_batch_size": 4, "num_mini_batches": 3}
    given["per_device_train_batch_size"] = 0
    with pytest.raises(TypeError, match="generation_batch_size"):
        PPOConfig.translate_names(given)


def test_what_grpo_config_holds_after_its_own_checks_is_accepted(tmp_path):
    """Both of its sizes are set then."""
    of_trl = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, disable_dropout=True, steps_per_generation=3)
    args = PPOConfig(**{name: getattr(of_trl, name) for name in OF_GRPO}, advantage_estimator="grpo")
    assert args.rollout_size_per_process == of_trl.generation_batch_size == 24
    assert args.learning_rate == of_trl.learning_rate == 1e-6


def test_a_dataclass_that_inherits_takes_names_of_trl_too(tmp_path):
    @dataclass
    class Own(PPOConfig):
        more: int = 1

    args = Own(str(tmp_path), epsilon=0.3, more=2, use_cpu=True)
    assert (args.cliprange, args.more, replace(args, seed=5).cliprange) == (0.3, 2, 0.3)
    assert pickle.loads(pickle.dumps(PPOConfig(str(tmp_path), epsilon=0.3, use_cpu=True))).cliprange == 0.3


def test_every_argument_of_the_trainer_is_explained():
    arguments = [name for name, (reason, _) in WITHOUT.items() if reason == "an argument of PPOTrainer"]
    assert arguments == [*inspect.signature(PPOTrainer).parameters]


WITH_TOOLS = '''
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b

async def negate(a: int) -> int:
    """
    Negates an integer.

    Args:
        a: The integer.
    """
    return -a

def right(completions, answer, **kwargs):
    return [float(str(x) in c[-1]["content"]) + 0.1 * len(c) for c, x in zip(completions, answer)]

rows = [{"prompt": [{"role": "user", "content": f"{n}*3?"}], "answer": 3 * n} for n in range(4)]
training_args = GRPOConfig(
    output_dir=out,
    per_device_train_batch_size=4,
    num_generations=2,
    max_completion_length=60,
    max_tool_calling_iterations=2,
    chat_template_kwargs={"enable_thinking": False},
    loss_type="grpo",
    shuffle_dataset=True,
    log_completions=True,
    num_completions_to_print=1,
    max_steps=2,
    bf16=False,
    use_cpu=True,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model,
    args=training_args,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    reward_funcs=right,
    tools=[multiply, negate],
    peft_config=peft_config,
)
trainer.train()
'''


def run(script, out):
    """Run a script, and return its trainer."""
    base = tiny_model(vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    base.save_pretrained(out / "base")
    names = {"out": str(out / "run"), "model": str(out / "base"), "tokenizer": calling_tokenizer()}
    names |= {"Dataset": Dataset, "peft_config": copy.deepcopy(LORA)}
    exec(script, names)
    return names["trainer"]


def changed(script):
    """Return the script with hfppo's classes, and with the algorithm's name."""
    classes = "from hfppo import PPOConfig as GRPOConfig, PPOTrainer as GRPOTrainer"
    script = script.replace("from trl import GRPOConfig, GRPOTrainer", classes)
    return script.replace("GRPOConfig(\n", 'GRPOConfig(\n    advantage_estimator="grpo",\n')


def test_a_script_of_trl_runs_with_two_changes(tmp_path, caplog):
    trainer = run(changed(WITH_TOOLS), tmp_path)
    assert (trainer.args.loss_reduction, trainer.args.log_completions) == ("seq-mean-token-mean", True)
    assert len([text for text in caplog.messages if text.startswith("fields of TRL: ")]) == 1
    assert trainer.state.global_step == trainer.args.max_steps
    moved = [p.count_nonzero() for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert torch.stack(moved).sum() > 0
    assert trainer.model.critic is None
