"""A run on another number of processes, from the start or from a checkpoint, is the same run to rounding.

The tests draw a few configurations; `CONFIGURATIONS=40 pytest -m slow tests/test_other_number.py` looks further.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.processes import HELPERS, run_python

pytestmark = pytest.mark.slow
CASES = [
    "within a rollout",
    "ahead",
    "pretrained",
    "chosen",
    "game",
    *range(int(os.environ.get("CONFIGURATIONS", "3"))),
]
Runs = dict[str | int, dict[str, Any]]  # by case


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Callable[..., list[Runs]]:
    """Make tests/helpers/other_number.py train: from the start, and from the checkpoints of earlier calls."""
    root = tmp_path_factory.mktemp("runs")

    def train_on(processes: int, name: str, *starts: str) -> list[Runs]:
        out = root / name
        out.mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes] * (processes > 1)
        finished = run_python(
            *launch, HELPERS / "other_number.py", out, json.dumps(CASES), *(root / start for start in starts),
            WORLD_SIZE="1", timeout=60 * len(CASES),
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr[-3000:]
        result = torch.load(out / "result")
        assert {run["processes"] for runs in result.values() for run in runs} == {processes}
        return [{case: runs[i] for case, runs in result.items()} for i in range(1 + len(starts))]

    return train_on


def assert_same_run(found: Runs, straight: Runs, within: float) -> None:
    """Compare texts of all processes, weights, moments of the optimizer, and logs."""
    assert found.keys() == straight.keys() == set(CASES)
    for case, run in straight.items():
        rows = run["rows"][len(run["rows"]) - len(found[case]["rows"]) :]
        assert found[case]["rows"] == rows, case
        for name, tensor in run["weights"].items():
            difference = float((found[case]["weights"][name] - tensor).abs().max())
            assert difference <= within * max(1.0, float(tensor.abs().max())), (case, name, difference)
        for entry, expected in zip(found[case]["logs"], run["logs"], strict=True):
            near = pytest.approx(expected, rel=100 * within, abs=10 * within, nan_ok=True)
            assert entry == near, case


@pytest.fixture(scope="module")
def one(train) -> Runs:
    return train(1, "one")[0]


@pytest.fixture(scope="module")
def two(train, one) -> list[Runs]:
    """A straight run, one resumed on the same number, and one from one process."""
    return train(2, "two", "two", "one")


def test_one_process_and_two_make_the_same_run(one, two):
    straight, same_number, from_one = two
    assert_same_run(straight, one, 1e-5)
    assert_same_run(same_number, straight, 0)
    assert_same_run(from_one, one, 1e-6)


def test_a_run_of_two_processes_resumes_on_one(train, two):
    assert_same_run(train(1, "one of two", "two")[1], two[0], 1e-6)


@pytest.mark.nightly
def test_four_processes_make_the_same_run(train, two):
    straight, of_two = train(4, "four", "two")
    assert_same_run(straight, two[0], 1e-5)
    assert_same_run(of_two, two[0], 1e-6)
    assert_same_run(train(1, "one of four", "four")[1], straight, 1e-6)
