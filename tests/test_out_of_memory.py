"""Memory that runs out: what the error says, and that the run goes on in smaller pieces."""

import re
import shutil

import pytest
import torch
from torch.testing import assert_close

import hfppo.collect.collector
import hfppo.trainer
from helpers.runs import count_digits, final_state
from hfppo import PPOConfig
from hfppo.support.http_client import ServerError
from hfppo.support.out_of_memory import ADVICE, OutOfMemory, explain_out_of_memory

CONFIG = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3, "max_steps": 8}
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
DRIVER = torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
MPS = RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 GB, max allowed: 18 GB)")


def fails_at(call: int, function, error):
    """The function, which raises at its call of the given number."""
    number = iter(range(1, 1000))

    def failing(*args, **kwargs):
        if next(number) == call:
            raise error
        return function(*args, **kwargs)

    return failing


@pytest.mark.parametrize(
    "error", [CUDA, CUBLAS, DRIVER, CPU, MPS, MemoryError()], ids=["CUDA", "cuBLAS", "driver", "CPU", "MPS", "Python"]
)
def test_every_kind_is_explained(error):
    said = "memory ran out during the phase 'generation'. What helps: a smaller local_rollout_forward_batch_size"
    with pytest.raises(OutOfMemory, match=said) as raised, explain_out_of_memory("generation"):
        raise error
    assert raised.value.__cause__ is error
    assert isinstance(raised.value, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a device-side assert"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("the sandbox ran out of memory"),
        RuntimeError("the judge said: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ServerError("http://judge answered 500, after all retries: 'CUDA out of memory'; see its log", 500),
        ServerError("MPS backend out of memory", 500),
    ],
    ids=str,
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(RuntimeError) as raised, explain_out_of_memory("rewards"):
        raise error
    assert raised.value is error


def test_the_error_names_the_last_checkpoint(make_trainer, monkeypatch, tmp_path):
    trainer = make_trainer(CONFIG)
    sampler = trainer.collector.sampler
    monkeypatch.setattr(sampler, "_sample", fails_at(2, sampler._sample, CUDA))
    with pytest.raises(OutOfMemory, match="memory ran out during the phase 'generation'") as raised:
        trainer.train()
    assert f"The last checkpoint is {tmp_path}/out/checkpoint-3: resume" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("owner", "name", "call", "phase"),
    [
        (hfppo.collect.collector, "forward_passes", 1, "passes"),
        (hfppo.trainer, "ppo_loss", 3, "update"),
        (torch.optim.AdamW, "step", 1, "update"),
    ],
    ids=["passes", "loss", "optimizer"],
)
def test_the_phase_is_named(make_trainer, monkeypatch, owner, name, call, phase):
    monkeypatch.setattr(owner, name, fails_at(call, getattr(owner, name), CUDA))
    with pytest.raises(OutOfMemory, match=f"memory ran out during the phase '{phase}'"):
        make_trainer().train()


def test_the_advice_names_fields():
    words = {word for advice in ADVICE.values() for word in re.findall(r"\w+_\w+", advice)}
    later = {"activation_checkpointing"}  # of transformers 5.20
    entries = {"gpu_memory_utilization", "enable_sleep_mode"}  # of vllm_engine_kwargs
    assert words - later - entries <= PPOConfig.__dataclass_fields__.keys()


def test_reward_functions_are_a_phase_of_their_own(make_trainer):
    with pytest.raises(OutOfMemory, match=r"during the phase 'rewards'\. .* max_completion_length"):
        make_trainer(reward_funcs=fails_at(1, count_digits, CUDA)).train()


def test_an_evaluation_is_a_phase_of_its_own(make_trainer, monkeypatch, dataset):
    config = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(config, eval_dataset=dataset)
    sampler = trainer.collector.sampler
    monkeypatch.setattr(sampler, "_sample", fails_at(2, sampler._sample, CUDA))
    with pytest.raises(OutOfMemory, match=r"during the phase 'evaluation'\. .* per_device_eval_batch_size"):
        trainer.train()


def test_the_run_goes_on_bit_for_bit_and_in_smaller_pieces_up_to_rounding(make_trainer, monkeypatch, tmp_path):
    straight = make_trainer({**CONFIG, "save_strategy": "no"})
    straight.train()
    with monkeypatch.context() as patched:
        patched.setattr(hfppo.trainer, "ppo_loss", fails_at(11, hfppo.trainer.ppo_loss, CUDA))  # the actor's of step 6
        with pytest.raises(OutOfMemory):
            make_trainer(CONFIG).train()
    shutil.copytree(tmp_path / "out", tmp_path / "smaller")
    again = make_trainer(CONFIG)
    again.train(resume_from_checkpoint=True)
    pieces = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    pieces |= {"local_rollout_forward_batch_size": 4, "output_dir": str(tmp_path / "smaller")}
    smaller = make_trainer({**CONFIG, **pieces})
    smaller.train(resume_from_checkpoint=True)
    assert smaller.state.global_step == 8
    expected, same, close = final_state(straight), final_state(again), final_state(smaller)
    assert_close(same, expected, rtol=0, atol=0)
    assert_close(close, expected, rtol=1e-3, atol=1e-4)
