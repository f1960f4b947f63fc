"""Two processes that are killed, told to end, or given folders that do not fit."""

import json
from pathlib import Path

import pytest

from helpers.processes import HELPERS, TWO_PROCESSES, run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict]:
    """What tests/helpers/interrupted_processes.py writes, by process."""
    out: Path = tmp_path_factory.mktemp("interrupted")
    script = HELPERS / "interrupted_processes.py"
    # Without this, torch's second life gets the addresses of the first (pytorch#135712).
    finished = run_python(
        *TWO_PROCESSES, "--max_restarts", "1", script, out, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", timeout=120
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads((out / f"result_{rank}.json").read_text()) for rank in range(2)]


def test_a_restarted_run_resumes_from_its_last_checkpoint(both):
    for result in both:
        assert result["straight"][0] == 8
        assert result["killed"] == result["straight"]
