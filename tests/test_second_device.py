"""What is meant for a GPU, on a device that no tensor of the CPU may meet."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from second_device import build
from torch.testing import assert_close

TESTS = Path(__file__).parent
PATH = os.pathsep.join([str(TESTS), str(TESTS.parent / "recipes"), str(TESTS.parent)])
ENV = {**os.environ, "PYTHONPATH": PATH, "HF_HUB_OFFLINE": "1", "WORLD_SIZE": "1"}


def run(*command: str | Path) -> str:
    done = subprocess.run([sys.executable, *command], env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def second_device(tmp_path_factory) -> list[Path]:
    """What to run a script with."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return [TESTS / "second_device.py", build(tmp_path_factory.mktemp("library"))]


@pytest.fixture(scope="module")
def results(second_device, tmp_path_factory) -> tuple[dict, dict]:
    """What tests/two_processes.py, as one process, writes on the CPU and on the device."""
    found = []
    for before in ([], second_device):
        out = tmp_path_factory.mktemp("out")
        run(*before, TESTS / "two_processes.py", out)
        found.append(json.loads((out / "result_0.json").read_text()))
    assert [result["device"] for result in found] == ["cpu", "second:0"]
    return found[0], found[1]


def test_resume_equals_the_straight_run_bit_for_bit(results):
    on_device = results[1]
    assert all(resumed == on_device["straight"] for resumed in on_device["resumed"])
    assert all(resumed == on_device["straight_logs"] for resumed in on_device["resumed_logs"])


def test_gradients_are_those_of_the_cpu(results):
    on_cpu, on_device = results
    assert max(abs(x) for gradient in on_cpu["gradients"].values() for x in gradient) > 1e-3
    for name, gradient in on_device["gradients"].items():
        assert_close(torch.tensor(gradient), torch.tensor(on_cpu["gradients"][name]), rtol=1e-4, atol=1e-6, msg=name)


def test_rollouts_metrics_evaluations_and_traces_are_those_of_the_cpu(results):
    on_cpu, on_device = results
    assert on_device["completions"] == on_cpu["completions"]
    assert on_device["evaluation"] == pytest.approx(on_cpu["evaluation"])
    logs = [[result["straight_logs"], *result["variants_logs"]] for result in (on_device, on_cpu)]
    for found, expected in zip(*logs, strict=True):
        for entry, of_cpu in zip(found, expected, strict=True):
            assert entry == pytest.approx(of_cpu, rel=1e-4, abs=1e-5)
    for trace, expected in zip(on_device["traces"], on_cpu["traces"], strict=True):
        assert trace["completion_ids"] == expected["completion_ids"]
        for name, column in expected["columns"].items():
            assert trace["columns"][name] == (column if name == "token" else pytest.approx(column, rel=1e-4, abs=1e-5))


def test_a_micro_batch_rarely_waits_for_the_device_and_no_more_with_more_rows(second_device, tmp_path):
    waits = json.loads(run(*second_device, TESTS / "second_device_waits.py", tmp_path).splitlines()[-1])
    assert set(waits["2"]) == set(waits["8"])
    assert max(waits["2"]) <= 6
