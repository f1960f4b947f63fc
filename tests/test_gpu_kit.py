"""The GPU kit without a GPU: its small run, what a cut leaves, and the rows."""

import json
import os
from pathlib import Path

import pytest
import rows
from cases import CASES
from sections import SECTIONS

from helpers.processes import ROOT, environment, run_python

KIT = ROOT / "tests/gpu/kit.py"
# The kit with sections that take no time, or that end as sections may end.
STAND_IN = """
import os, sys, time
import kit
import sections
from sections import Section

def quick(job):
    yield {"case": {"seconds": 1.5}}

def stuck(job):
    yield {}
    time.sleep(600)

def crash(job):
    yield from quick(job)
    os._exit(3)

def error(job):
    yield from quick(job)
    raise ValueError("no such thing")

limits = {"quick": 1, "stuck": 0.02, "crash": 1, "error": 1, "lacking": 1}
for name, minutes in limits.items():
    needs = ("no_such_package",) if name == "lacking" else ()
    kit.SECTIONS[name] = Section(globals().get(name, quick), name, minutes, ("seconds",), needs)
kit.describe_machine = dict
sections.cuda_is_there = lambda: True
sys.exit(kit.main(kit.parse()))
"""


def read(out: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_a_section_that_ends_badly_stops_no_other(tmp_path):
    script, path = tmp_path / "stand_in.py", os.pathsep.join([environment()["PYTHONPATH"], str(KIT.parent)])
    script.write_text(STAND_IN)
    sections = "stuck,crash,error,lacking,quick"
    done = run_python(script, "--out", tmp_path / "out", "--only", sections, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr[-4000:]
    found = read(tmp_path / "out")
    status = {name: (result["status"], result.get("reason")) for name, result in found.items()}
    assert status == {
        "stuck": ("cut", "stopped after 1 s"),
        "crash": ("failed", "the process ended with code 3; see its output"),
        "error": ("failed", "ValueError: no such thing"),
        "lacking": ("not run", "needs no_such_package"),
        "quick": ("done", None),
    }
    assert all(found[name]["figures"]["case"] == {"seconds": 1.5} for name in ("crash", "error", "quick"))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_whole_kit_runs_in_small(tmp_path, capsys):
    done = run_python(KIT, "--out", tmp_path / "out", "--small", timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = read(tmp_path / "out")
    assert found.keys() == SECTIONS.keys()
    expected = dict.fromkeys(SECTIONS, "done") | ({"vllm_tests": "not run"} if "reason" in found["vllm_tests"] else {})
    assert {name: result["status"] for name, result in found.items()} == expected
    for name, result in found.items():
        cases = [case for case in result.get("figures", {}).values() if "reason" not in case]
        columns = {column for case in cases for column in case}
        only_on_cuda = {"reserved, GB", "peak above the start, MB"}
        assert not cases or set(SECTIONS[name].columns) - only_on_cuda <= columns, name
    assert {case["outcome"] for case in found["tests"]["figures"].values()} == {"passed", "skipped"}
    assert found["first_rollout"]["figures"]["nf4, flash attention"] == {"reason": "needs CUDA and flash attention"}
    assert {case["base"] for case in found["first_rollout"]["figures"].values() if "base" in case} == {"unchanged"}
    assert list(found["first_rollout"]["figures"]) == list(CASES)
    phases = found["first_rollout"]["figures"]["defaults"]["phases"]
    assert phases.keys() == {"sampling", "passes", "update"}
    assert all(phase["estimate, kB per token"] > 0 for phase in phases.values())
    rows.main(tmp_path / "out")
    assert "| not run |" not in capsys.readouterr().out
    assert phases["sampling"]["tokens"] == phases["passes"]["tokens"] == 8 * (24 + 8)  # the longest prompt has 24
