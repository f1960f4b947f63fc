"""Two and four DDP processes, and a device that is not the CPU: what one process on the CPU does, and exact resume."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from helpers.processes import HELPERS, environment
from helpers.second_device import build


def run(*command: str | Path) -> str:
    """What Python prints."""
    env = {"WORLD_SIZE": "1", **environment()}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[dict]]:
    """What tests/helpers/two_processes.py writes, by the number of processes."""
    found = {}
    for processes in (1, 2, 4):
        out = tmp_path_factory.mktemp(f"processes-{processes}")
        # `accelerate launch --cpu` starts one process, or needs mpirun for several.
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        run(*launch, HELPERS / "two_processes.py", out)
        found[processes] = [json.loads((out / f"result_{rank}.json").read_text()) for rank in range(processes)]
        assert found[processes][0]["processes"] == processes
    return found


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
    assert len(result["resumed"]) == 3
    assert all(resumed == result["straight"] for resumed in result["resumed"])
    assert all(resumed == result["straight_logs"] for resumed in result["resumed_logs"])


def assert_like_one(result: dict, one: dict) -> None:
    """Gradients, metrics and evaluations are those of one process on the CPU."""
    assert result["gradients"].keys() == one["gradients"].keys()
    for name, gradient in result["gradients"].items():
        assert_close(torch.tensor(gradient), torch.tensor(one["gradients"][name]), rtol=1e-4, atol=1e-6, msg=name)
    for entry, expected in zip(result["straight_logs"], one["straight_logs"], strict=True):
        assert entry == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for found, expected in zip(result["variants_logs"], one["variants_logs"], strict=True):
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


def test_resume_equals_the_straight_run_bit_for_bit(results):
    for result in (*results[1], *results[2], *results[4]):
        assert_resumed_exactly(result)


def test_both_processes_hold_the_same_weights(results):
    first, second = results[2]
    assert first["straight"] == second["straight"]
    assert first["straight_logs"] == second["straight_logs"]
    assert first["evaluation"] == second["evaluation"]


def test_several_processes_wait_once_at_their_end(results):
    """Or gloo's threads would abort some of them, most often of four."""
    waits = {processes: [result["waits_at_exit"] for result in of_all] for processes, of_all in results.items()}
    assert waits == {1: [[]], 2: [[0.5]] * 2, 4: [[0.5]] * 4}


def test_several_processes_do_what_one_does(results):
    (one,) = results[1]
    assert max(abs(x) for gradient in one["gradients"].values() for x in gradient) > 1e-3
    assert any(entry["completions/mean_length"] < 4 for entry in one["straight_logs"] if "loss" in entry)
    assert len(one["completions"]) == 7, "neither cut nor repeated, though it does not divide by two"
    for result in (*results[2], *results[4]):
        assert_like_one(result, one)


def test_traces_of_several_processes_are_those_of_one(results):
    (one,) = results[1]
    assert [trace["updated_step"] for trace in one["traces"]] == [1, 1]
    for result in (results[2][0], results[4][0]):
        assert_same_traces(result, one)


def test_a_second_device_does_what_the_cpu_does(results, on_second_device):
    assert_resumed_exactly(on_second_device)
    assert_like_one(on_second_device, results[1][0])
    assert_same_traces(on_second_device, results[1][0])


def test_a_micro_batch_rarely_waits_for_the_device_whatever_its_rows(second_device, tmp_path):
    waits = json.loads(run(*second_device, HELPERS / "on_second_device.py", tmp_path).splitlines()[-1])
    assert set(waits["2"]) == set(waits["8"]) == {5}
