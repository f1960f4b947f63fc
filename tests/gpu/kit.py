"""Measure hfppo on a machine with one GPU, in at most 35 minutes.

    python tests/gpu/kit.py --out DIR [--only tests,vllm] [--wheels WHEELS]
    python tests/gpu/rows.py DIR          # tables of what it measured
    python tests/gpu/kit.py --out DIR --small          # on a CPU: shows that the kit runs

Each section of `sections.py` is a process with a time limit. It writes DIR/<section>.json after every case, so that a
cut leaves what was done; "status" in it is "running", "done", "not run", "failed" or "cut". The machine needs pytest
and what `pyproject.toml` lists under `dependencies`; hfppo itself need not be installed. A section whose own packages
are missing says so in its JSON. Nothing is downloaded. Where no package registry can be reached, `--wheels` installs
the wheels of a folder, without their dependencies, for the time of the run.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from sections import SECTIONS, Job, find_missing

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "vllm", "bitsandbytes", "flash-attn")
SCRATCH = "scratch-"  # what the names of temporary folders begin with


def describe_machine() -> dict[str, Any]:
    """Return device and versions."""
    import torch
    from accelerate import PartialState

    found = {"torch device": str(PartialState().device)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device: dict[str, Any] = {"device": f"{platform.machine()} CPU, {os.cpu_count()} cores"}
    if torch.cuda.is_available():
        of_gpu = torch.cuda.get_device_properties(0)
        device = {"device": of_gpu.name, "memory, GB": of_gpu.total_memory / 1e9, "CUDA": torch.version.cuda}
    return {**device, "python": platform.python_version(), **found}


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace a JSON file in one step."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    partial.replace(path)


def measure(name: str, options: argparse.Namespace) -> None:
    """Run a section in this process and write its JSON after every case."""
    section, path = SECTIONS[name], options.out / f"{name}.json"
    result = {"section": name, "small": options.small, "date": str(date.today()), "machine": describe_machine()}
    if missing := find_missing(section, options.small):
        write(path, {**result, "status": "not run", "reason": f"needs {', '.join(missing)}"})
        return
    figures: dict[str, Any] = {}
    ended = {"status": "done"}
    start = time.monotonic()
    write(path, {**result, "status": "running", "figures": figures})
    with tempfile.TemporaryDirectory(dir=options.out, prefix=SCRATCH) as folder:
        try:
            for found in section.run(Job(options.small, Path(folder))):
                figures |= found
                write(path, {**result, "status": "running", "figures": figures})
        except Exception as error:
            traceback.print_exc()
            ended = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    write(path, {**result, **ended, "seconds": time.monotonic() - start, "figures": figures})


def run_group(names: list[str], command: list[str], environment: dict[str, str], out: Path, limit: float) -> None:
    """Run sections in another process, and complete their JSON if it ends early.

    Args:
        limit: seconds.
    """
    for name in names:
        (out / f"{name}.json").unlink(missing_ok=True)
    # In a process group of its own, so that what it starts ends with it.
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    status, reason = "cut", "interrupted"
    try:
        code = process.wait(limit)
        status, reason = "failed", f"the process ended with code {code}; see its output"
    except subprocess.TimeoutExpired:
        reason = f"stopped after {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # nothing was left running
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for name in names:
            path = out / f"{name}.json"
            result = json.loads(path.read_text()) if path.is_file() else {"section": name, "figures": {}}
            if result.get("status", "running") == "running":
                write(path, {**result, "status": status, "reason": reason})


def environment_of(wheels: str | None, folder: Path) -> dict[str, str]:
    """Return the sections' environment: one GPU, this repository and the wheels, which are installed into a folder."""
    places = [
        ROOT,
        *(ROOT / name for name in ("docs", "tests", "recipes/arithmetic", "tests/benchmarks", "tests/gpu")),
    ]
    if wheels is not None:
        files = sorted(map(str, Path(wheels).glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(folder), *files], check=True)
        places.insert(0, folder)
    path = os.pathsep.join([*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # cuBLAS reads this at a process's first product, which may come before Trainer sets it for deterministic kernels.
    own["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, **own}


def main(options: argparse.Namespace) -> int:
    """Run the chosen sections; return 1 if one failed or was cut."""
    if options.section:
        for name in options.section.split(","):
            measure(name, options)
        return 0
    names = options.only.split(",") if options.only else list(SECTIONS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    options.out.mkdir(parents=True, exist_ok=True)
    # A small run spends most of its time on imports: all sections are one process.
    groups = [names] if options.small else [[name] for name in names]
    # The command that started this process, which may be a program that runs this file.
    again = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    try:
        environment = environment_of(options.wheels, Path(tempfile.mkdtemp(dir=options.out, prefix=SCRATCH)))
        for group in groups:
            print(f"== {', '.join(group)}", flush=True)
            limit = 60 * sum(SECTIONS[name].minutes for name in group)
            run_group(group, [*again, *sys.argv[1:], "--section", ",".join(group)], environment, options.out, limit)
    finally:
        for leftover in options.out.glob(f"{SCRATCH}*"):
            shutil.rmtree(leftover)
    results = {name: json.loads((options.out / f"{name}.json").read_text()) for name in names}
    print("\n".join(f"{name}: {result['status']}" for name, result in results.items()))
    return int(any(result["status"] in ("failed", "cut") for result in results.values()))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--only", help=f"some of the sections, in this order: {','.join(SECTIONS)}")
    parser.add_argument("--small", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--wheels", help="folder of wheels to install for the run")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # those that a process of the kit runs
    options = parser.parse_args()
    if unknown := set(options.only.split(",") if options.only else ()) - SECTIONS.keys():
        parser.error(f"--only {options.only}: there is no section {', '.join(sorted(unknown))}; see --help")
    return options


if __name__ == "__main__":
    sys.exit(main(parse()))
