"""TRL's names of fields are translated or explained; scripts of its documentation run here with two changes."""

import copy
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from datasets import Dataset

from helpers.agents import VOCAB_SIZE, calling_tokenizer
from helpers.tiny import LORA, tiny_model
from hfppo import PPOConfig

# TRL's configuration still passes transformers' old name on.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def test_all_unknown_fields_are_named_at_once_each_with_its_word_here(config):
    unknown = {"top_p": 0.9, "num_ppo_epoch": 3, "disable_dropout": False, "foo": 1}
    unknown |= {"beta": 0.1, "loss_type": "vespo", "steps_per_generation": 5}
    with pytest.raises(TypeError) as refused:
        config(seed=1, epsilon=0.2, gradient_accumulation_steps=2, **unknown)
    lines = str(refused.value).splitlines()
    assert lines[0] == "PPOConfig has no field"
    assert [line.split(":")[0].strip(" '") for line in lines[1:-1]] == list(unknown)
    words = ["only 1.0", "num_ppo_epochs", "only True", "foo", "kl_coef (RLOO's", "here policy_loss", "whole number"]
    assert [word for word, line in zip(words, lines[1:-1], strict=True) if word not in line] == []
    assert "docs/from_trl.md" in lines[-1]


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
        ({"disable_dropout": True, "top_p": 1.0, "top_k": 0, "cast_lm_head_to_fp32": True}, {}),
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
        ({"vllm_importance_sampling_mode": "token_mask"}, "'vllm_importance_sampling_mode': here policy_mode"),
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


def test_a_dataclass_that_inherits_takes_names_of_trl_too(tmp_path):
    @dataclass
    class Own(PPOConfig):
        more: int = 1

    args = Own(str(tmp_path), epsilon=0.3, more=2, use_cpu=True)
    assert (args.cliprange, args.more, replace(args, seed=5).cliprange) == (0.3, 2, 0.3)
    assert pickle.loads(pickle.dumps(PPOConfig(str(tmp_path), epsilon=0.3, use_cpu=True))).cliprange == 0.3


WITH_TOOLS = '''
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b

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
    tools=[multiply],
    peft_config=peft_config,
)
trainer.train()
'''


def test_a_script_of_trl_runs_with_two_changes(tmp_path, caplog):
    """With hfppo's classes, and with the algorithm's name."""
    classes = "from hfppo import PPOConfig as GRPOConfig, PPOTrainer as GRPOTrainer"
    script = WITH_TOOLS.replace("from trl import GRPOConfig, GRPOTrainer", classes)
    script = script.replace("GRPOConfig(\n", 'GRPOConfig(\n    advantage_estimator="grpo",\n')
    tiny_model(vocab_size=VOCAB_SIZE, max_position_embeddings=256).save_pretrained(tmp_path / "base")
    names = {"out": str(tmp_path / "run"), "model": str(tmp_path / "base"), "tokenizer": calling_tokenizer()}
    names |= {"Dataset": Dataset, "peft_config": copy.deepcopy(LORA)}
    exec(script, names)
    trainer = names["trainer"]
    assert (trainer.args.loss_reduction, trainer.args.log_completions) == ("seq-mean-token-mean", True)
    assert len([text for text in caplog.messages if text.startswith("fields of TRL: ")]) == 1
    assert trainer.state.global_step == trainer.args.max_steps
    moved = [p.count_nonzero() for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert torch.stack(moved).sum() > 0
    assert trainer.model.critic is None
