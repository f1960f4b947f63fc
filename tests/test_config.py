"""PPOConfig: what follows from its fields, who reads them, and how flags and YAML files reach them."""

import ast
import inspect
import math
import pickle
import re
import textwrap
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from build_arithmetic_base import character_tokenizer
from transformers import HfArgumentParser, TrainingArguments

import hfppo
from helpers.tiny import tiny_model
from hfppo import PPOConfig, PPOTrainer
from hfppo.config import CHECKPOINTING as NAMES_OF_CHECKPOINTING
from hfppo.config import follows_base
from hfppo.config_checks import UNUSABLE_FIELDS, accumulation_steps

PACKAGE = Path(hfppo.__file__).parent
OWN = sorted(PPOConfig.__annotations__.keys() - {"_VALID_DICT_FIELDS"})  # overridden defaults included
NEW = sorted({f.name for f in fields(PPOConfig)} - {f.name for f in fields(TrainingArguments)})


@pytest.mark.parametrize(
    ("total_episodes", "processes", "steps"),
    [
        pytest.param(24, 1, 6, id="exactly one rollout"),
        pytest.param(25, 1, 12, id="one completion more is a rollout more"),
        pytest.param(241, 5, 18, id="rounded up over processes too"),
    ],
)
def test_total_episodes_sets_max_steps(config, monkeypatch, total_episodes, processes, steps):
    monkeypatch.setattr(PPOConfig, "world_size", property(lambda self: processes))
    args = config(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_mini_batches=3,
        num_ppo_epochs=2,
        total_episodes=total_episodes,
    )
    assert args.max_steps == steps  # 24 completions per process and rollout, 6 steps each


def test_accumulation_steps_follow_from_the_rollout_of_all_processes(config, monkeypatch, caplog):
    args = config(rollout_size=128, per_device_train_batch_size=4, num_mini_batches=4)
    assert (args.gradient_accumulation_steps, args.rollout_size_per_process) == (8, 128)
    assert replace(args, rollout_size=64).gradient_accumulation_steps == 4
    caplog.clear()
    assert replace(args, gradient_accumulation_steps=2).gradient_accumulation_steps == 8
    assert "rollout_size makes gradient_accumulation_steps=8; 2 is not used" in caplog.text
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert accumulation_steps(args) == 4
    args.rollout_size = 80
    with pytest.raises(ValueError, match=r"^rollout_size=80 must be a multiple of 32 = "):
        accumulation_steps(args)


TWO_STEPS = {"total_episodes": 16, "num_mini_batches": 1, "num_ppo_epochs": 1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TWO_STEPS, []),
        (TWO_STEPS | {"max_steps": 2}, []),
        (TWO_STEPS | {"max_steps": 5}, ["total_episodes makes max_steps=2; 5 is not used"]),
        ({"policy_loss": "gspo", "loss_reduction": "seq-mean-token-mean"}, []),
        ({"policy_loss": "gspo"}, ["policy_loss='gspo'"]),  # its paper has a mean per completion
        ({"kl_loss_coef": 0.1, "kl_estimator": "k1"}, ["gradient has mean 0"]),
        ({"kl_loss_coef": 0.1, "kl_estimator": "k1+"}, []),
    ],
    ids=str,
)
def test_one_line_warns_of_fields_that_mean_less_than_they_say(config, caplog, given, words):
    config(**given)
    assert len(caplog.messages) == bool(words)
    assert [word for word in words if word not in caplog.text] == []


ESTIMATORS = {"gae": True, "reinforce_plus_plus": True, "reinforce_plus_plus_baseline": True}
ESTIMATORS |= dict.fromkeys(("grpo", "rloo", "opo"), False)  # whether the paper whitens advantages
SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_mini_batches": 5}


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        # 2·3·5 completions and 7·5 steps: accumulation adds no steps
        (SIZES | {"num_ppo_epochs": 7}, {"rollout_size_per_process": 30, "updates_per_rollout": 35}),
        ({"cliprange": 0.3}, {"clip_high": 0.3}),
        ({"cliprange": 0.3, "cliprange_high": 0.4}, {"clip_high": 0.4}),
        ({"kl_coef": 0.0, "kl_loss_coef": 0.0}, {"needs_reference": False}),
        ({"kl_coef": 0.1, "kl_loss_coef": 0.0}, {"needs_reference": True}),
        ({"kl_coef": 0.0, "kl_loss_coef": 0.1}, {"needs_reference": True}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": math.inf}),  # no clipping, as Trainer reads 0 and None
        ({"max_grad_norm": None}, {"max_grad_norm": math.inf}),
        *(({"whiten_advantages": x}, {"whitens_advantages": x}) for x in (True, False)),
        *(
            ({"advantage_estimator": "grpo", "num_generations": 2, "whiten_advantages": x}, {"whitens_advantages": x})
            for x in (True, False)
        ),
        *(
            (
                {"advantage_estimator": name, "num_generations": 2},
                {"needs_critic": name == "gae", "whitens_advantages": habit},
            )
            for name, habit in ESTIMATORS.items()
        ),
    ],
    ids=str,
)
def test_what_follows_from_fields(config, given, derived):
    for args in (config(**given), replace(config(**given), seed=3)):
        assert {name: getattr(args, name) for name in derived} == derived


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("model_init_kwargs", '{"use_auth_token": "abcSECRET"}', "model_init_kwargs['use_auth_token']"),
        ("chat_template_kwargs", {"tools": [{"api_key": "abcSECRET"}]}, "chat_template_kwargs['tools'][0]['api_key']"),
        ("vllm_server_base_url", "http://me:abcSECRET@host", "vllm_server_base_url"),
        ("vllm_server_base_url", ["http://a", "http://me:abcSECRET@b"], "vllm_server_base_url[1]"),
        ("run_name", f"with hf_{'SECRET' * 5}", "run_name"),
    ],
)
def test_a_secret_in_a_setting_is_refused_and_not_repeated(config, field, value, place):
    with pytest.raises(ValueError, match=rf"^{re.escape(place)} contains a secret, .*HF_TOKEN") as refused:
        config(**{field: value})
    assert "SECRET" not in str(refused.value)


def test_a_field_of_a_subclass_that_is_a_secret_is_refused(tmp_path):
    @dataclass
    class JudgeConfig(PPOConfig):
        judge_api_key: str | None = None

    JudgeConfig(str(tmp_path), use_cpu=True, hub_token="hf_" + "a" * 34)
    with pytest.raises(ValueError, match=r"^judge_api_key contains a secret"):
        JudgeConfig(str(tmp_path), use_cpu=True, judge_api_key="abc")


def test_a_pickle_and_the_settings_shown_lack_the_token_of_the_hub(config):
    args = config(hub_token="abcSECRET", learning_rate=0.5)
    for shown in (pickle.dumps(args).decode("latin-1"), args.to_json_string(), str(args)):
        assert "SECRET" not in shown
    assert pickle.loads(pickle.dumps(args)).learning_rate == 0.5
    assert args.hub_token == replace(args, seed=3).hub_token == "abcSECRET"


BREAKING = {
    "auto_find_batch_size": True,
    "neftune_noise_alpha": 0.5,
    "ddp_static_graph": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "ignore_data_skip": True,
}
CISPO = {"policy_loss": "cispo"}
DIS = {"policy_loss": "dis", "cliprange": 0.3, "cliprange_high": 5.0}
UNIT = {"value_range": [0.0, 1.0], "kl_coef": 0.0}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reward_weights": "1,2"}, "^reward_weights='1,2' must be a list of numbers$"),
        ({"reward_weights": [1, "2"]}, r"^reward_weights=\[1, '2'\] must be a list of numbers$"),
        ({"scale_rewards": "row"}, "^scale_rewards='row' is unknown; choose from group, batch, none$"),
        ({"gamma": 1.5}, r"^gamma=1\.5 must be in \[0, 1\]"),
        ({"seed": -1}, r"^seed=-1 must be in \[0, "),  # NumPy's seeds
        ({"seed": 2**32}, rf"^seed={2**32} must be in \[0, "),
        (CISPO, "cliprange_high=None"),
        (CISPO | {"cliprange_high": 0.28}, r"cliprange_high=0\.28"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
        ({"policy_loss": "dis"}, "needs the upper end of its band; set cliprange_high=5.0"),
        (DIS | {"policy_mode": "token_truncate"}, "policy_mode='token_truncate' weights tokens"),
        ({"value_range": [1.0, 1.0]}, "must be two numbers, the lower one first"),
        ({"value_range": [0.0, float("inf")]}, "must be a list of numbers"),
        ({"value_range": [0.0, 1.0]}, "kl_coef=0.05 subtracts a KL .* kl_loss_coef"),
        ({"value_loss": "bce"}, "value_loss='bce' takes values in a range"),
        (UNIT | {"advantage_estimator": "grpo", "num_generations": 2}, r"value_range=\[0.0, 1.0\] has no effect"),
        (PLATEAU, r"'reduce_lr_on_plateau' lowers .* eval_reward falls.*'mode': 'max'"),
        *(({name: value}, rf"(?s)^{name}=.* cannot be used with PPO: ") for name, value in BREAKING.items()),
        *(
            ({"generation_kwargs": kwargs}, words)
            for kwargs, words in (
                ({"top_p": 0.9}, "top_p cannot be set, since completions are sampled from the policy's own distrib"),
                ({"repetition_penalty": 1.1, "stop_strings": ["a"]}, "repetition_penalty cannot be set"),
                ({"stop_strings": "a"}, "stop_strings must be a list of strs"),
                ({"stop_strings": []}, "stop_strings must be a list"),
                ({"stop_strings": [""]}, "stop_strings must be a list"),
                ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of ints"),
            )
        ),
    ],
    ids=str,
)
def test_a_value_that_ppo_cannot_use_is_refused(config, given, words):
    with pytest.raises(ValueError, match=words):
        config(**given)


def test_the_defaults_of_fields_that_would_break_ppo_are_accepted(config):
    assert sorted(BREAKING) == sorted(UNUSABLE_FIELDS)
    config(**{name: getattr(config(), name) for name in UNUSABLE_FIELDS})


def test_the_settings_of_fsdp_may_be_a_file_as_in_trainer(config):
    assert config(fsdp_config="fsdp.json").fsdp_config == "fsdp.json"


def test_a_relative_output_folder_is_where_the_run_started(config, monkeypatch, tmp_path):
    """A reward function may change the working folder."""
    monkeypatch.chdir(tmp_path)
    args = config(output_dir="out")
    monkeypatch.chdir("/")
    assert args.output_dir == replace(args, seed=3).output_dir == str(tmp_path / "out")


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps"}


@pytest.mark.parametrize(
    ("changes", "save_steps"),
    [
        ({}, 0.1),
        ({"eval_strategy": "steps"}, 0.1),
        ({"save_steps": 7}, 7),
        (BEST, 8),
        (BEST | {"eval_steps": 24}, 24),
        (BEST | {"eval_steps": 0.25}, 0.25),
        (BEST | {"logging_steps": 10}, 10),
        (BEST | {"save_steps": 48}, 48),
    ],
)
def test_a_checkpoint_is_saved_at_every_evaluation_if_the_best_is_kept(config, changes, save_steps):
    args = config(**changes)
    assert args.save_steps == replace(args, seed=3).save_steps == save_steps


# Fields of TrainingArguments that mean here what they mean in Trainer, or that neither of them reads.
USABLE = re.findall(
    r"\w+",
    """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps max_grad_norm bf16 fp16 tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config torch_empty_cache_steps
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size eval_on_start
    save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end
    metric_for_best_model greater_is_better restore_callback_states_from_checkpoint full_determinism seed use_cpu
    accelerator_config parallelism_config dataloader_pin_memory ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval
    do_predict include_num_input_tokens_seen resume_from_checkpoint local_rank
    remove_unused_columns data_seed train_sampling_strategy length_column_name label_smoothing_factor label_names
    average_tokens_across_devices use_cache dataloader_drop_last dataloader_num_workers
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    prediction_loss_only include_for_metrics batch_eval_metrics eval_accumulation_steps eval_do_concat_batches
    eval_use_gather_object
    """,
)


def test_every_field_of_trainer_is_either_usable_or_not():
    """A new release's fields fail here until somebody has looked at them."""
    names = [*USABLE, *UNUSABLE_FIELDS]
    assert sorted(names) == sorted(set(names))
    assert sorted({f.name for f in fields(TrainingArguments)} - set(names)) == []


def test_every_field_has_a_help():
    helps = {name: PPOConfig.__dataclass_fields__[name].metadata.get("help", "").strip() for name in OWN}
    assert [name for name, text in helps.items() if len(text.split()) < 2 or not text.endswith(".")] == []


def reads_of_args(path: Path) -> set[str]:
    """Names x in `args.x` and `….args.x`; comments and docstrings don't count."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return {n.attr for n in nodes if "args" in (getattr(n.value, "id", None), getattr(n.value, "attr", None))}


def reads_of_config() -> set[str]:
    """Names x in `self.x` in the properties of config.py and in what sets max_steps; checks don't count as reading."""
    functions = [n for n in ast.walk(ast.parse((PACKAGE / "config.py").read_text())) if isinstance(n, ast.FunctionDef)]
    wanted = [f for f in functions if f.name == "__post_init__" or "property" in map(ast.unparse, f.decorator_list)]
    nodes = [node for f in wanted for node in ast.walk(f) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if getattr(node.value, "id", None) == "self"}


def test_every_field_is_read():
    read = reads_of_config()
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("config.py", "config_checks.py"):
            read |= reads_of_args(path)
    assert [name for name in NEW if name not in read] == []


def flags(tmp_path: Path, *more: str) -> list[str]:
    return ["--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--report_to", "none", *more]


def test_flags(tmp_path):
    given = flags(
        tmp_path,
        *("--num_ppo_epochs", "2", "--kl_coef", "1e-3", "--whiten_advantages", "false", "--vllm_mode", "server"),
        *("--reward_weights", "1.0", "0.5", "--chat_template_kwargs", '{"enable_thinking": false}'),
    )
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(given)
    assert (args.num_ppo_epochs, args.kl_coef, args.whiten_advantages) == (2, 0.001, False)
    assert (args.vllm_mode, args.reward_weights) == ("server", [1.0, 0.5])
    assert args.chat_template_kwargs == {"enable_thinking": False}


def test_flags_left_out_give_the_defaults(tmp_path, config):
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(flags(tmp_path))
    assert {name: getattr(args, name) for name in OWN} == {name: getattr(config(), name) for name in OWN}


@pytest.mark.parametrize("field", ["chat_template_kwargs", "model_init_kwargs"])
def test_dictionaries_can_be_json(config, field):
    value = {"enable_thinking": False, "depth": 2, "name": "x", "nested": {"a": [1, None]}}
    text = '{"enable_thinking": false, "depth": 2, "name": "x", "nested": {"a": [1, null]}}'
    assert getattr(config(**{field: text}), field) == value
    assert getattr(config(**{field: value}), field) == value
    assert getattr(config(), field) is None


def test_model_init_kwargs_reach_the_model(make_trainer, base_path):
    trainer = make_trainer({"model_init_kwargs": '{"attn_implementation": "eager"}'}, model=base_path)
    assert trainer.model.causal_lm.config._attn_implementation == "eager"
    assert make_trainer(model=base_path).model.causal_lm.config._attn_implementation != "eager"


def example_of(owner: type) -> str:
    """The code after "Example::" in a docstring."""
    _, after = inspect.getdoc(owner).split("Example::\n\n")
    return textwrap.dedent(re.match(r"(?:(?:    .*)?\n)+", after)[0])


def test_the_examples_in_the_docstrings_run(tmp_path, monkeypatch, capsys):
    """With a tiny model in place of the one on the Hub."""
    monkeypatch.chdir(tmp_path)
    exec(example_of(PPOConfig), {})
    assert capsys.readouterr().out == "32\n4\n"
    tiny_model().save_pretrained("tiny")
    character_tokenizer().save_pretrained("tiny")
    code, names = example_of(PPOTrainer), {}
    hub_id = "Qwen/Qwen2.5-0.5B"
    assert hub_id in code
    exec(code.replace(hub_id, "tiny"), names)
    assert names["trainer"].state.global_step == 8
    assert Path("out/adapter_model.safetensors").is_file()


def test_the_config_survives_a_round_trip(config):
    """As Trainer saves it beside a model, and as a cluster script passes it on."""
    args = config(kl_coef=0.2, reward_weights=[1.0, 2.0], chat_template_kwargs={"a": 1}, cliprange_high=0.3)
    again = PPOConfig(**{name: args.to_dict()[name] for name in NEW}, output_dir=args.output_dir, use_cpu=True)
    assert {name: getattr(again, name) for name in NEW} == {name: getattr(args, name) for name in NEW}


CHECKPOINTING = NAMES_OF_CHECKPOINTING[0]  # another name before transformers 5.20


@pytest.fixture
def on_cuda(monkeypatch):
    """As if the CPU were a GPU, to what decides about autocast and checkpointing."""
    monkeypatch.setattr("hfppo.config.follows_base", lambda args: True)
    monkeypatch.setattr("hfppo.config.is_torch_bf16_gpu_available", lambda: True)


def switches(trainer) -> tuple[bool, str, bool]:
    found = trainer.args.bf16, trainer.accelerator.mixed_precision, getattr(trainer.args, CHECKPOINTING)
    AcceleratorState._reset_state(reset_partial_state=False)
    return found


@pytest.mark.parametrize(
    ("dtype", "fields", "expected"),
    [
        ("bfloat16", {}, (True, "bf16", True)),
        ("float32", {}, (False, "no", False)),
        ("bfloat16", {"bf16": False}, (False, "no", True)),
        ("bfloat16", {CHECKPOINTING: False}, (True, "bf16", False)),
        ("float32", {"bf16": True, CHECKPOINTING: True}, (True, "bf16", True)),
    ],
)
def test_on_cuda_a_base_in_bfloat16_brings_autocast_and_checkpointing(make_trainer, on_cuda, dtype, fields, expected):
    """Whatever the user sets stays as it is, and the user's own object as well."""
    AcceleratorState._reset_state(reset_partial_state=False)
    trainer = make_trainer(
        {"max_steps": 1, "hub_token": "hf_x", **fields}, model=tiny_model().to(getattr(torch, dtype))
    )
    assert trainer.args.hub_token == "hf_x"
    trainer.train()
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in trainer.model.modules()) == expected[2]
    assert switches(trainer) == expected


def test_a_configuration_serves_bases_of_both_kinds_on_cuda(on_cuda):
    args = PPOConfig("out", use_cpu=True)
    assert args.for_base(torch.bfloat16).bf16
    assert not args.for_base(torch.float32).bf16
    assert not replace(args, fp16=True).for_base(torch.bfloat16).bf16
    assert (args.bf16, getattr(args, CHECKPOINTING)) == (None, None)
    assert getattr(replace(args).for_base(torch.bfloat16), CHECKPOINTING), "a copy decides as well"


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_launcher_that_chose_the_precision_is_obeyed_on_cuda(on_cuda, monkeypatch, kind):
    """As `accelerate launch --mixed_precision fp16` does."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", kind)
    chosen = PPOConfig("out", use_cpu=True).for_base(torch.bfloat16)
    assert (chosen.bf16, chosen.mixed_precision, getattr(chosen, CHECKPOINTING)) == (False, kind, True)


def test_on_a_cpu_autocast_and_checkpointing_are_off(make_trainer):
    trainer = make_trainer(model=tiny_model().to(torch.bfloat16))
    assert switches(trainer) == (False, "no", False)


def test_engines_with_settings_of_their_own_keep_them(monkeypatch):
    args = SimpleNamespace(device=torch.device("cuda"), deepspeed_plugin=None)
    assert follows_base(args)
    assert not follows_base(SimpleNamespace(device=torch.device("cpu"), deepspeed_plugin=None))
    assert not follows_base(SimpleNamespace(device=args.device, deepspeed_plugin=object()))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert not follows_base(args)


@pytest.mark.parametrize(("words", "expected"), [([], None), (["--bf16"], True), (["--bf16", "false"], False)])
def test_autocast_is_a_flag_as_upstream(on_cuda, words, expected):
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu", *words])
    assert args.bf16 is expected
