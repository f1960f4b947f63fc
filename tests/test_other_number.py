"""A run that resumes on another number of processes ends as the straight run does, to rounding."""

import json
from pathlib import Path

import pytest

from helpers.processes import HELPERS, run_python

pytestmark = pytest.mark.slow


def train(processes: int, out: Path, *start: object) -> dict:
    """What tests/helpers/other_number.py writes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    finished = run_python(*(launch if processes > 1 else []), HELPERS / "other_number.py", out, *start, WORLD_SIZE="1")
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = json.loads((out / "result.json").read_text())
    assert {run["processes"] for run in result.values()} == {processes}
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in ("two", "one", "two-of-one", "four", "one-of-four")}


@pytest.fixture(scope="module")
def two(folders) -> dict:
    """The straight run."""
    return train(2, folders["two"])


def assert_same_end(found: dict, straight: dict) -> None:
    assert found.keys() == straight.keys()
    for case, run in straight.items():
        for name, numbers in run["weights"].items():
            assert found[case]["weights"][name] == pytest.approx(numbers, rel=0, abs=1e-6), (case, name)
        for entry, expected in zip(found[case]["logs"], run["logs"], strict=True):
            assert entry == pytest.approx(expected, rel=1e-4, abs=1e-5), case


def test_two_processes_then_one_then_two(two, folders):
    assert_same_end(train(1, folders["one"], folders["two"], 0), two)
    assert_same_end(train(2, folders["two-of-one"], folders["one"], 5), two)


@pytest.mark.nightly
def test_two_processes_then_four_then_one(two, folders):
    assert_same_end(train(4, folders["four"], folders["two"], 0), two)
    assert_same_end(train(1, folders["one-of-four"], folders["four"], 5), two)
