"""Two processes, one of which meets a fault: both do the same, and none waits for the other for ever."""

import json
import subprocess
from pathlib import Path

import pytest

from helpers.processes import HELPERS, TWO_PROCESSES, run_python

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def died(tmp_path_factory) -> tuple[subprocess.CompletedProcess, list[dict], Path]:
    """tests/helpers/faulty_processes.py; its last run ends by a reward function that hangs on the second process."""
    out = tmp_path_factory.mktemp("faulty")
    finished = run_python(*TWO_PROCESSES, HELPERS / "faulty_processes.py", out)
    results = [out / f"result_{rank}.json" for rank in range(2)]
    assert all(path.is_file() for path in results), finished.stderr[-3000:]
    return finished, [json.loads(path.read_text()) for path in results], out


def test_what_one_process_leaves_out_both_leave_out(died):
    first, second = (result["skip"] for result in died[1])
    assert first == second
    assert first["ppo_state"]["rollouts"] == 2  # of 4 steps
    assert first["failed"] == pytest.approx([1 / 8, 1 / 8])


def test_both_processes_stop_and_name_the_one_that_found_it(died):
    results = died[1]
    assert results[0]["stop"] == results[1]["stop"]
    assert "values is not finite in row 1 of rollout 1 on process 1" in results[0]["stop"]["rollout"]
    assert "in step 2, on process 1, policy/loss in row 0 of micro-batch 0" in results[0]["stop"]["step"]


def test_a_reward_function_that_hangs_on_one_process_ends_both_with_its_message(died):
    finished = died[0]
    assert finished.returncode != 0
    assert "[rank1]: TimeoutError: reward function 'hangs' gave no answer within 0.5 s" in finished.stderr
