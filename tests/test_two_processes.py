"""Two and four DDP processes, and a device that is not the CPU: what one process on the CPU does, and exact resume."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from helpers.processes import HELPERS, run_python
from helpers.second_device import build

pytestmark = pytest.mark.slow


def run(*command: str | Path) -> str:
    """What Python prints."""
    done = run_python(*command, WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_on(processes: int, out: Path) -> list[dict]:
    """Return the results that tests/helpers/two_processes.py writes, one of each process."""
    # `accelerate launch --cpu` starts one process, or needs mpirun for several.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    run(*(launch if processes > 1 else []), HELPERS / "two_processes.py", out)
    results = [json.loads((out / f"result_{rank}.json").read_text()) for rank in range(processes)]
    assert results[0]["processes"] == processes
    return results


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict:
    """The result of one process."""
    return train_on(1, tmp_path_factory.mktemp("one-process"))[0]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def several(request, tmp_path_factory) -> list[dict]:
    """The results of several processes."""
    return train_on(request.param, tmp_path_factory.mktemp("several-processes"))


@pytest.fixture(scope="module")
def second_device(tmp_path_factory) -> list[str | Path]:
    """What to run a script with."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return [HELPERS / "second_device.py", build(tmp_path_factory.mktemp("library"))]


@pytest.fixture(scope="module")
def on_second_device(second_device, tmp_path_factory) -> dict:
    """What tests/helpers/two_processes.py writes, as one process on the second device."""
    out = tmp_path_factory.mktemp("second-device")
    run(*second_device, HELPERS / "two_processes.py", out)
    result = json.loads((out / "result_0.json").read_text())
    assert (result["processes"], result["device"]) == (1, "second:0")
    return result


def assert_resumed_exactly(result: dict) -> None:
    assert len(result["resumed"]) == 2
    assert all(resumed == result["straight"] for resumed in result["resumed"])
    assert all(resumed == result["straight_logs"] for resumed in result["resumed_logs"])
    assert result["chosen"][0] == result["chosen"][1]
    assert result["chosen_logs"][0] == result["chosen_logs"][1]


def assert_like_one(result: dict, one: dict) -> None:
    """Gradients, metrics and evaluations are those of one process on the CPU."""
    assert result["gradients"].keys() == one["gradients"].keys()
    for name, gradient in result["gradients"].items():
        assert_close(torch.tensor(gradient), torch.tensor(one["gradients"][name]), rtol=1e-4, atol=1e-6, msg=name)
    for entry, expected in zip(result["straight_logs"], one["straight_logs"], strict=True):
        assert entry == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert sum("candidates/chosen" in entry for entry in one["chosen_logs"][0]) > 1
    of_variants = [[*results["variants_logs"], results["chosen_logs"][0]] for results in (result, one)]
    for found, expected in zip(*of_variants, strict=True):
        assert len(found) == len(expected) > 3
        for entry, of_one in zip(found, expected, strict=True):
            assert entry == pytest.approx(of_one, rel=1e-4, abs=1e-5)
    assert result["evaluation"] == pytest.approx(one["evaluation"])
    assert result["completions"] == one["completions"]


def assert_same_traces(result: dict, one: dict) -> None:
    for trace, expected in zip(result["traces"], one["traces"], strict=True):
        assert trace["completion_ids"] == expected["completion_ids"]
        for name, column in expected["columns"].items():
            numbers = column if name == "token" else pytest.approx(column, rel=1e-4, abs=1e-5)
            assert trace["columns"][name] == numbers, name


def test_one_process_and_several_resume_bit_for_bit(one, several):
    for result in (one, *several):
        assert_resumed_exactly(result)


def test_several_processes_hold_the_same_weights(several):
    for name in ("straight", "straight_logs", "evaluation", "chosen", "chosen_logs", "critic_first", "pretraining"):
        assert all(result[name] == several[0][name] for result in several)


def test_several_processes_end_their_group_once(one, several):
    """And wait, or gloo's threads would abort some of them, most often of four."""
    assert one["ends_at_exit"] == 0
    assert [result["ends_at_exit"] for result in several] == [1] * len(several)


def test_several_processes_do_what_one_does(one, several):
    assert max(abs(x) for gradient in one["gradients"].values() for x in gradient) > 1e-3
    assert any(entry["completions/mean_length"] < 4 for entry in one["straight_logs"] if "loss" in entry)
    assert len(one["completions"]) == 7, "neither cut nor repeated, though it does not divide by two"
    for result in several:
        assert_like_one(result, one)
    assert [trace["updated_step"] for trace in one["traces"]] == [1, 1]
    assert_same_traces(several[0], one)


@pytest.mark.nightly
def test_a_second_device_does_what_the_cpu_does(one, on_second_device):
    assert_resumed_exactly(on_second_device)
    assert_like_one(on_second_device, one)
    assert_same_traces(on_second_device, one)


@pytest.mark.nightly
def test_a_micro_batch_rarely_waits_for_the_device_whatever_its_rows(second_device, tmp_path):
    waits = json.loads(run(*second_device, HELPERS / "on_second_device.py", tmp_path).splitlines()[-1])
    # Twice for each of the two passes, and twice for the actor's head. The first step tries the critic's attention.
    assert set(waits["2"][1:]) == set(waits["8"][1:]) == {6}


@pytest.mark.nightly
def test_a_rollout_ahead_where_the_model_is_placed_late(second_device, tmp_path):
    rewards = json.loads(run(*second_device, HELPERS / "ahead_on_second_device.py", tmp_path).splitlines()[-1])
    assert len(rewards) == 2
