"""Two and four DDP processes: resume bit for bit, the gradients of one process, the same weights on all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[dict]]:
    """What tests/two_processes.py writes, by the number of processes."""
    found = {}
    for processes in (1, 2, 4):
        out = tmp_path_factory.mktemp(f"processes-{processes}")
        # `accelerate launch --cpu` starts one process, or needs mpirun for several.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        path = os.pathsep.join([str(TESTS), str(TESTS.parent / "recipes"), str(TESTS.parent)])
        run = subprocess.run(
            [*command, str(TESTS / "two_processes.py"), str(out)],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        found[processes] = [json.loads((out / f"result_{rank}.json").read_text()) for rank in range(processes)]
        assert found[processes][0]["processes"] == processes
    return found


def test_resume_equals_the_straight_run_bit_for_bit(results):
    for result in (*results[1], *results[2], *results[4]):
        assert len(result["resumed"]) == 3
        assert all(resumed == result["straight"] for resumed in result["resumed"])
        assert all(resumed == result["straight_logs"] for resumed in result["resumed_logs"])


def test_both_processes_hold_the_same_weights(results):
    first, second = results[2]
    assert first["straight"] == second["straight"]
    assert first["straight_logs"] == second["straight_logs"]


def test_gradients_of_several_processes_are_those_of_one(results):
    one = results[1][0]["gradients"]
    assert max(abs(x) for g in one.values() for x in g) > 1e-3
    for result in (*results[2], *results[4]):
        for name, gradient in result["gradients"].items():
            assert_close(torch.tensor(gradient), torch.tensor(one[name]), rtol=1e-4, atol=1e-6, msg=name)


def test_metrics_of_several_processes_are_those_of_one(results):
    one = results[1][0]["straight_logs"]
    assert any(entry["completions/mean_length"] < 4 for entry in one if "loss" in entry)
    for result in (*results[2], *results[4]):
        for entry, expected in zip(result["straight_logs"], one, strict=True):
            assert entry == pytest.approx(expected, rel=1e-5, abs=1e-5)
        for found, expected in zip(result["variants_logs"], results[1][0]["variants_logs"], strict=True):
            assert len(found) == len(expected) > 3
            for entry, of_one in zip(found, expected, strict=True):
                assert entry == pytest.approx(of_one, rel=1e-4, abs=1e-5)


def test_traces_of_several_processes_are_those_of_one(results):
    one = results[1][0]["traces"]
    assert [trace["updated_step"] for trace in one] == [1, 1]
    for trace, expected in zip((*results[2][0]["traces"], *results[4][0]["traces"]), one * 2, strict=True):
        assert trace["completion_ids"] == expected["completion_ids"]
        for name, column in expected["columns"].items():
            numbers = column if name == "token" else pytest.approx(column, rel=1e-4, abs=1e-5)
            assert trace["columns"][name] == numbers, name


def test_evaluation_of_seven_prompts_neither_cuts_nor_repeats_one(results):
    one, two = results[1][0]["evaluation"], results[2][0]["evaluation"]
    assert results[2][1]["evaluation"] == two
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == pytest.approx(value), name
    assert len(results[1][0]["completions"]) == 7
    assert results[2][0]["completions"] == results[2][1]["completions"] == results[1][0]["completions"]
