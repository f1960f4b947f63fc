"""Two processes that are killed, told to end, or given folders that do not fit."""

import re

import pytest

from helpers.processes import run_two_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict]:
    """What tests/helpers/interrupted_processes.py writes, by process."""
    # Without this, torch's second life gets the addresses of the first (pytorch#135712).
    given = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "timeout": 120}
    out = tmp_path_factory.mktemp("interrupted")
    return run_two_processes("interrupted_processes.py", out, launch=("--max_restarts", "1"), **given)


def test_a_restarted_run_resumes_from_its_last_checkpoint(both):
    for result in both:
        assert result["straight"][0] == 8
        assert result["killed"] == result["straight"]


def test_a_signal_to_one_process_saves_on_both_between_the_same_steps(both):
    for result in both:
        assert result["told_at"] == 6  # the step in which it came is made
        assert result["told"] == result["straight"]


def test_each_process_hashes_the_files_that_it_wrote(both):
    first, second = (set(result["hashed"]) for result in both)
    assert second == {"ppo_state_1.json", "ppo_state_1.safetensors", "rng_state_1.pth"}
    assert {"ppo_state_0.json", "rng_state_0.pth", "adapter_model.safetensors"} < first
    assert not first & second


def test_folders_of_their_own_are_refused_by_both(both):
    first, second = (result["own"] for result in both)
    assert first == second
    assert re.match(r"output_dir='.*own_1' of process 1 on .* is another folder than '.*own_0' of process 0", first)
