"""The GPU kit without a GPU: its small run, what a cut leaves, and the rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rows
from cases import CASES
from sections import SECTIONS

from helpers.processes import ROOT, environment

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
    (job.folder / "checkpoint").touch()
    yield {"first": {"pid": os.getpid()}}
    time.sleep(600)

def crash(job):
    yield from quick(job)
    os._exit(3)

def error(job):
    yield from quick(job)
    raise ValueError("no such thing")

limits = {"quick": 1, "stuck": float(os.environ["STUCK_MINUTES"]), "crash": 1, "error": 1, "lacking": 1}
for name, minutes in limits.items():
    needs = ("no_such_package",) if name == "lacking" else ()
    kit.SECTIONS[name] = Section(globals().get(name, quick), name, minutes, ("seconds",), needs)
kit.describe_machine = dict
sections.cuda_is_there = lambda: True
sys.exit(kit.main(kit.parse()))
"""


def start(only: str, out: Path, stuck_minutes: float) -> subprocess.Popen:
    """Start the kit with the stand-ins for its sections."""
    script = out.parent / "stand_in.py"
    script.write_text(STAND_IN)
    env = environment(STUCK_MINUTES=str(stuck_minutes))
    env["PYTHONPATH"] += os.pathsep + str(KIT.parent)
    return subprocess.Popen([sys.executable, script, "--out", out, "--only", only], env=env)


def read(out: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_a_section_that_ends_badly_stops_no_other(tmp_path, capsys):
    out = tmp_path / "out"
    assert start("stuck,crash,error,lacking,quick", out, 0.02).wait(300) == 1
    found = read(out)
    status = {name: (result["status"], result.get("reason")) for name, result in found.items()}
    assert status == {
        "stuck": ("cut", "stopped after 1 s"),
        "crash": ("failed", "the process ended with code 3; see its output"),
        "error": ("failed", "ValueError: no such thing"),
        "lacking": ("not run", "needs no_such_package"),
        "quick": ("done", None),
    }
    assert all(found[name]["figures"]["case"] == {"seconds": 1.5} for name in ("crash", "error", "quick"))


def run_kit(out: Path, *options: str | Path, launcher: tuple[str | Path, ...] = ()) -> str:
    """Run the kit in a process, as users do, and return its output."""
    env = environment()
    env["PYTHONPATH"] += os.pathsep + str(KIT.parent)
    command = [sys.executable, *launcher, KIT, "--out", out, *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_the_whole_kit_runs_in_small(tmp_path):
    run_kit(tmp_path / "out", "--small")
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
    assert phases["sampling"]["tokens"] == phases["passes"]["tokens"] == 8 * (24 + 8)  # the longest prompt has 24


def test_rows_show_figures_reasons_and_what_is_open(tmp_path, capsys):
    """Also of a section whose process is gone, which the JSON still calls running."""
    figures = {"critic='adapter'": {"s per rollout": 12.3456, "peak, GB": 40.0}, "critic='shared'": {"reason": "no"}}
    result = {"small": True, "date": "2026-01-02", "machine": {"device": "GPU", "torch": "2.11"}, "figures": figures}
    (tmp_path / "ppo.json").write_text(json.dumps({**result, "status": "running"}))
    phases = {"defaults": {"phases": {"update": {"peak, GB": 3.5, "waits": 2}}}}
    (tmp_path / "first_rollout.json").write_text(
        json.dumps({"small": True, **result, "status": "done", "figures": phases})
    )
    (tmp_path / "vllm.json").write_text(
        json.dumps({**result, "status": "not run", "reason": "needs vllm", "figures": {}})
    )
    rows.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "- defaults, update: peak, GB 3.5, waits 2" in lines
    assert lines[0].startswith("SMALL RUN")
    assert lines[2] == "GPU: torch 2.11; 2026-01-02."
    at = next(i for i, line in enumerate(lines) if line.startswith("| PPO"))
    assert lines[at + 2].split(" | ")[:2] == ["| critic='adapter'", "12.3"]
    assert lines[at + 2].endswith(" | 40 |")
    assert lines[at + 3].startswith("| critic='shared' (no) |")
    assert lines[at + 4].startswith("| cut |")
    assert any(line.startswith("| needs vllm |") for line in lines)
    assert sum(line.startswith("| not run |") for line in lines) == len(SECTIONS) - 3
