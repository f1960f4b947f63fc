"""FSDP2 and ZeRO on two CPU processes: DDP's numbers, checkpoints that plain PEFT reads, exact resume; refusals."""

import functools
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType

from helpers.fake_vllm import PeftVLLM
from helpers.processes import FSDP2, HELPERS, TWO_PROCESSES, run_python
from helpers.runs import saved_weights
from helpers.tiny import ragged_model
from hfppo import TolerantReward
from hfppo.checks.engine import check_engine
from hfppo.rewards.model import RewardAdapter

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ENVIRONMENT = {
    "ddp": {},
    "ddp of 4": {},
    "fsdp2": FSDP2,
    "fsdp2 of 1": FSDP2,
    "fsdp2 of 4": FSDP2,
    "hsdp": {
        **FSDP2,
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    },
    **{
        f"zero{stage}": {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
            "DS_ACCELERATOR": "cpu",
        }
        for stage in (2, 3)
    },
}
PROCESSES = {"fsdp2 of 1": "1", **dict.fromkeys(("ddp of 4", "fsdp2 of 4", "hsdp"), "4")}
SMOOTH = {"learning_rate": 1.0, "adam_epsilon": 1.0}  # Adam's step is about the gradient, and not its sign
PIECES, UNCLIPPED = {**SMOOTH, "max_tokens_per_micro_batch": 14}, {**SMOOTH, "max_grad_norm": 0.0}


def launch(out: Path, critic: str, engine: str, fields: dict, *start: Path) -> subprocess.CompletedProcess:
    command = [*TWO_PROCESSES[:-1], PROCESSES.get(engine, "2"), HELPERS / "sharded.py"]
    return run_python(*command, out, critic, engine, json.dumps(fields), *start, **ENVIRONMENT[engine])


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Callable[..., tuple[Path, dict]]:
    """Have tests/helpers/sharded.py make a run, once; gives its folder and what it writes."""

    @functools.cache
    def make(engine: str, fields: str, critic: str) -> tuple[Path, dict]:
        if engine.startswith("zero"):
            pytest.importorskip("deepspeed")
        out = tmp_path_factory.mktemp(engine)
        run = launch(out, critic, engine, json.loads(fields))
        assert run.returncode == 0, run.stderr
        return out, json.loads((out / "result_0.json").read_text())

    return lambda engine, fields, critic="shared": make(engine, json.dumps(fields), critic)


ENGINES = [
    ("fsdp2", PIECES, "FSDP", "shared"),
    ("zero2", UNCLIPPED, "DEEPSPEED", "shared"),
    ("zero2", UNCLIPPED, "DEEPSPEED", "adapter"),
    ("fsdp2", PIECES, "FSDP", "adapter"),
    ("fsdp2", PIECES, "FSDP", "privileged"),
    ("zero3", UNCLIPPED, "DEEPSPEED", "shared"),
    ("zero3", UNCLIPPED, "DEEPSPEED", "adapter"),
    ("hsdp", PIECES, "FSDP", "shared"),
]


@pytest.mark.parametrize(("engine", "fields", "kind", "critic"), ENGINES)
def test_a_sharded_run_has_the_numbers_of_one_that_is_not_and_resumes(run_of, engine, fields, kind, critic):
    of_ddp = "ddp of 4" if PROCESSES.get(engine) == "4" else "ddp"
    (sharded_out, sharded), (ddp_out, ddp) = (run_of(name, fields, critic) for name in (engine, of_ddp))
    assert sharded["engine"] == f"DistributedType.{kind}" != ddp["engine"]
    assert ("Replicate(), Shard" in sharded["placements"]) == (engine == "hsdp")
    assert len(sharded["straight"]) == len(ddp["straight"]) == 6
    for entry, whole in zip(sharded["straight"], ddp["straight"], strict=True):
        if kind == "DEEPSPEED" and "grad_norm" in whole:  # it knows the norm of both together
            of_critic = whole["value/grad_norm"]
            whole = {n: x for n, x in whole.items() if n != "value/grad_norm"}
            whole["grad_norm"] = math.hypot(whole["grad_norm"], of_critic)
        assert entry.keys() == whole.keys()
        for name, value in whole.items():
            assert entry[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for step, near in ((1, 1e-6), (2, 1e-6), (4, 1e-5)):  # a step's rounding grows in the next ones' gradients
        found, expected = (saved_weights(out / "straight" / f"checkpoint-{step}") for out in (sharded_out, ddp_out))
        torch.testing.assert_close(found, expected, rtol=0, atol=near)
    assert sharded["resumed"] == sharded["straight"]
    first, resumed = (saved_weights(sharded_out / name) for name in ("straight/checkpoint-1", "resumed/checkpoint-4"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in found.items())
    assert any(not torch.equal(first[name], tensor) for name, tensor in found.items())


def test_fsdp2_resumes_on_another_number_of_processes_and_not_on_another_engine(run_of, tmp_path):
    fields = {**PIECES, "rollout_size": 16}
    of_two, _ = run_of("fsdp2", fields)
    for other in ("fsdp2 of 4", "fsdp2 of 1"):
        run = launch(tmp_path / other, "shared", other, fields, of_two)
        assert run.returncode == 0, run.stderr
        found, expected = (
            saved_weights(out / "checkpoint-4") for out in (tmp_path / other / "resumed", of_two / "straight")
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    run = launch(tmp_path, "shared", "ddp", fields, of_two)
    assert "was written with engine='FSDP', this run has 'DDP or one process', so it cannot resume" in run.stderr


@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
def test_engines_train_in_bfloat16(run_of, engine):
    """DeepSpeed turns all weights to that type, the value head's too; what the model gives stays float32."""
    out, found = run_of(engine, {"bf16": True})
    first, last = (saved_weights(out / "straight" / f"checkpoint-{n}") for n in (1, 4))
    assert last["value_head.weight"].dtype == (torch.float32 if engine == "fsdp2" else torch.bfloat16)
    assert all(not torch.equal(first[name], tensor) for name, tensor in last.items())
    losses = [entry["loss"] for entry in found["straight"] if "loss" in entry]
    assert len(losses) == 4
    assert all(abs(loss) < 1 for loss in losses)
    assert found["resumed"] == found["straight"]
    first_ratio = "policy/first_ratio_deviation"
    deviations = [entry[first_ratio] for entry in found["straight"] if first_ratio in entry]
    assert len(deviations) == 2
    assert max(deviations) < 1e-6
    for name in ("logprob", "ref_logprob", "value"):
        given = torch.tensor([x for trace in found["traces"] for x in trace["columns"][name]])
        assert not torch.equal(given, given.bfloat16().float()), name


def test_deepspeed_clips_at_max_grad_norm(run_of):
    """With SGD, whose step is the gradient times the learning rate."""
    moved = {}
    for norm in (0.0, 0.05):
        fields = {"max_grad_norm": norm, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
        out, found = run_of("zero2", fields)
        before, after = (saved_weights(out / "straight" / f"checkpoint-{n}") for n in (1, 2))
        moved[norm] = sum(float((after[name] - x).square().sum()) for name, x in before.items()) ** 0.5
        norms = [entry["grad_norm"] for entry in found["straight"] if "grad_norm" in entry]
        assert norms[1] > 0.1
        assert moved[norm] == pytest.approx(norm or norms[1], rel=1e-3)


def test_a_step_of_deepspeed_that_is_not_finite_ends_the_run(tmp_path):
    pytest.importorskip("deepspeed")
    run = launch(tmp_path, "shared", "zero2", {**UNCLIPPED, "optim": "sgd", "learning_rate": 1e38})
    assert run.returncode != 0
    assert "NonFiniteError" in run.stderr
    assert "in step 2, on process 0, " in run.stderr
    assert "is not finite; DeepSpeed has made the step" in run.stderr


def test_traces_of_a_sharded_run_lack_the_update(run_of):
    ddp, fsdp = run_of("ddp", PIECES)[1]["traces"], run_of("fsdp2", PIECES)[1]["traces"]
    for sharded, whole in zip(fsdp, ddp, strict=True):
        assert sharded["columns"]["value"] == pytest.approx(whole["columns"]["value"], rel=1e-3, abs=1e-4)
        assert (sharded["updated_step"], whole["updated_step"]) == (None, 4)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_sharded_run_gathers_trained_weights_only(run_of, engine):
    found = run_of(engine, {"bf16": True})[1]
    assert found["saved"] == found["trained"]


@pytest.mark.parametrize(("engine", "fields"), [("fsdp2", PIECES), ("zero3", UNCLIPPED)])
def test_a_vllm_server_samples_from_a_sharded_policy(tmp_path, engine, fields):
    """The server computes with plain PEFT, from the folders that the run writes."""
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    ragged_model().save_pretrained(tmp_path / "base")
    server = PeftVLLM(tmp_path / "base")
    try:
        of_server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        run = launch(tmp_path, "shared", engine, fields | of_server)
    finally:
        server.server.stop()
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "result_0.json").read_text())
    first, second = (entry for entry in result["straight"] if "mismatch/max" in entry)
    assert max(first["mismatch/max"], second["mismatch/max"]) < 1e-4
    assert second["kl_k3"] > 1e-3, "a stale adapter would show"
    assert result["resumed"] == result["straight"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_run_ends_with_actor_and_critic_of_the_best_checkpoint(run_of, engine):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": False}
    out, found = run_of(engine, {**PIECES, **best, "eval_steps": 1})
    assert Path(found["best"]).name != "checkpoint-4"
    end, expected, last = (
        saved_weights(folder) for folder in (out / "end", Path(found["best"]), out / "straight/checkpoint-4")
    )
    assert all(torch.equal(end[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(last[name], tensor) for name, tensor in expected.items())


BUDGET, VLLM = {"max_tokens_per_micro_batch": 100}, {"use_vllm": True, "vllm_mode": "colocate"}
EPOCHS = {"num_critic_epochs": 8, "critic_epochs": 8}
ORDER = {"critic_update": "after_actor", "critic_follows": True}
PRETRAINING = {"critic_pretraining_completions": 512}


def config(args: dict) -> SimpleNamespace:
    """The fields that `check_engine` asks."""
    fields = {"max_tokens_per_micro_batch": None, "use_vllm": False, "rollouts_ahead": 0, "critic_warmup": 0}
    fields |= {"critic_pretraining_completions": 0, "critic_epochs": 4, "num_ppo_epochs": 4, "num_critic_epochs": None}
    fields |= {"critic_update": "together", "critic_follows": False}
    fields |= {"world_size": 2, "ddp_find_unused_parameters": True, "debug": [], "gradient_checkpointing_kwargs": None}
    return SimpleNamespace(**{**fields, "vf_coef": 0.1, "max_grad_norm": 1.0, "n_gpu": 1, **args})


def engine(
    kind: DistributedType, fsdp2: bool = True, zero: int = 0, clipping: float | str = "auto", parallelism=None, **fsdp
):
    """As much of an Accelerator as `check_engine` asks."""
    plugin = SimpleNamespace(zero_stage=zero, deepspeed_config={"gradient_clipping": clipping})
    fsdp = {"state_dict_type": StateDictType.FULL_STATE_DICT, "activation_checkpointing": False, **fsdp}
    state = SimpleNamespace(deepspeed_plugin=plugin, fsdp_plugin=SimpleNamespace(mixed_precision_policy=None, **fsdp))
    return SimpleNamespace(distributed_type=kind, is_fsdp2=fsdp2, state=state, parallelism_config=parallelism)


def model(critic: str, **adapter) -> SimpleNamespace:
    """As much of an ActorCritic."""
    return SimpleNamespace(critic=SimpleNamespace(kind=critic), peft_config={"default": LoraConfig(**adapter)})


NONE, FSDP, MULTI_GPU, MULTI_CPU = (
    engine(kind)
    for kind in (DistributedType.NO, DistributedType.FSDP, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
)
FSDP_1 = engine(DistributedType.FSDP, fsdp2=False)
TENSOR_PARALLEL = engine(DistributedType.FSDP, parallelism=ParallelismConfig(dp_shard_size=2, tp_size=2))
HYBRID = engine(DistributedType.FSDP, parallelism=ParallelismConfig(dp_shard_size=2, dp_replicate_size=2))
PIECEWISE = engine(DistributedType.FSDP, state_dict_type=StateDictType.SHARDED_STATE_DICT)
CHECKPOINTS = engine(DistributedType.FSDP, activation_checkpointing=True)
ZERO_2, WITH_OPTIMIZER, NO_NORM = (engine(DistributedType.DEEPSPEED, zero=2) for _ in range(3))
NO_NORM.state.deepspeed_plugin.deepspeed_config["zero_optimization"] = {"stage": 2, "compute_grad_norm": False}
WITH_OPTIMIZER.state.deepspeed_plugin.deepspeed_config["optimizer"] = {"type": "Adam"}
CLIPS = engine(DistributedType.DEEPSPEED, zero=2, clipping=0.5)
ALL_USED = {"ddp_find_unused_parameters": False}
ONE_OF_BOTH = " some steps train only the actor or the critic"
FIND_UNUSED = " .*set ddp_find_unused_parameters=True"


@pytest.mark.parametrize(
    ("accelerator", "critic", "funcs", "args", "message"),
    [
        (NONE, "adapter", [], {"n_gpu": 2}, "sees 2 GPUs, .*--num_processes 2, or"),
        (FSDP, "shared", [RewardAdapter], {}, "a reward adapter .* merge it into its base"),
        (TENSOR_PARALLEL, "shared", [], {}, "config.tp_size=2: .* set dp_shard_size and dp_replicate_size only"),
        (FSDP_1, "shared", [], {}, "FSDP version 1 is not supported; set"),
        (FSDP, "shared", [], {"critic_warmup": 1}, "critic_warmup=1 .*cannot load a checkpoint.*use DDP"),
        (PIECEWISE, "shared", [], {}, "SHARDED_STATE_DICT neither adapter nor critic would be saved; set it to FULL"),
        (CHECKPOINTS, "shared", [], {}, r"adapter would be empty; .* set activation_checkpointing=True"),
        (FSDP, "shared", [], {"vf_coef": 0.0}, "vf_coef=0 .*cannot load a checkpoint.*or DDP"),
        (FSDP, "shared", [], VLLM, "'colocate' needs whole .* set vllm_mode='server'"),
        (FSDP, "shared", [], EPOCHS, "num_critic_epochs=8 .*leave it out, or use DDP"),
        (FSDP, "shared", [], PRETRAINING, "completions=512 .*leave it out, or use DDP"),
        (ZERO_2, "adapter", [], BUDGET, "max_tokens_per_micro_batch needs DDP"),
        (ZERO_2, "adapter", [], {"critic_warmup": 3}, "critic_warmup=3" + ONE_OF_BOTH),
        (ZERO_2, "adapter", [], EPOCHS, "num_critic_epochs=8" + ONE_OF_BOTH),
        (ZERO_2, "adapter", [], ORDER, "critic_update=after_actor" + ONE_OF_BOTH),
        (ZERO_2, "adapter", [], PRETRAINING, "completions=512" + ONE_OF_BOTH),
        (MULTI_GPU, "adapter", [], EPOCHS | ALL_USED, "num_critic_epochs=8" + FIND_UNUSED),
        (MULTI_GPU, "adapter", [], PRETRAINING | ALL_USED, "completions=512" + FIND_UNUSED),
        (WITH_OPTIMIZER, "adapter", [], {}, "DeepSpeed's config has an optimizer, which ignores"),
        (NO_NORM, "adapter", [], {}, "compute_grad_norm=False in DeepSpeed's config hides gradients"),
        (CLIPS, "adapter", [], {}, "gradient_clipping=0.5 and max_grad_norm=1.0 are not the same"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(accelerator, critic, funcs, args, message):
    funcs = [object.__new__(kind) for kind in funcs]
    for given in (funcs, [TolerantReward(func) for func in funcs]):
        with pytest.raises(ValueError, match=message):
            check_engine(accelerator, model(critic), given, config(args), has_agent=False)


def test_fsdp2_does_not_take_single_trained_tokens():
    with pytest.raises(ValueError, match="FSDP2 cannot shard trainable_token_indices; leave it out"):
        check_engine(engine(DistributedType.FSDP), model("shared", trainable_token_indices=[3]), [], config({}), False)


def test_fsdp2_leaves_outputs_and_sums_of_gradients_in_float32():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    accelerator = engine(DistributedType.FSDP)
    accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    check_engine(accelerator, model("shared"), [], config({}), has_agent=False)
    kept = accelerator.state.fsdp_plugin.mixed_precision_policy
    assert (kept.param_dtype, kept.reduce_dtype, kept.output_dtype) == (torch.bfloat16, torch.float32, None)


@pytest.mark.parametrize(
    ("accelerator", "critic", "funcs", "args"),
    [
        (MULTI_GPU, "adapter", [RewardAdapter], BUDGET | VLLM),
        (HYBRID, "adapter", [], BUDGET),
        (FSDP, "adapter", [], BUDGET | VLLM | {"vllm_mode": "server"}),
        (engine(DistributedType.DEEPSPEED, zero=3), "adapter", [], {}),
        (engine(DistributedType.DEEPSPEED, zero=3), "model", [], {}),
        (ZERO_2, "adapter", [RewardAdapter], VLLM),
        (engine(DistributedType.DEEPSPEED, zero=2, clipping=1.0), "adapter", [], {}),
        (MULTI_GPU, "adapter", [], {"critic_warmup": 3}),
        (MULTI_GPU, "adapter", [], EPOCHS | PRETRAINING),
    ],
)
def test_what_an_engine_can_do_is_not(accelerator, critic, funcs, args):
    check_engine(accelerator, model(critic), [object.__new__(kind) for kind in funcs], config(args), False)
    clips_at = accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"]
    assert (clips_at == 1.0) == (accelerator.distributed_type == DistributedType.DEEPSPEED)
