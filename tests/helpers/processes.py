"""Processes that tests start."""

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
RECIPES = sorted({path.parent for path in (ROOT / "recipes").rglob("*.py")})  # folders
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
FSDP2 = {
    **{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
    **{"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"},
}


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with a path to the tests, the recipes and this package, and no Hub."""
    path = os.pathsep.join(map(str, [ROOT / "tests", *RECIPES, ROOT]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}


def run_python(
    *command: object, cwd: Path | None = None, timeout: int = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this command line in `environment(**variables)`; return what it printed, whatever its code."""
    words, own = [sys.executable, *map(str, command)], environment(**variables)
    return subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, timeout=timeout)


def run_two_processes(script: str, out: Path, *arguments: object, launch: tuple[str, ...] = (), **given) -> list[dict]:
    """Run a script of this folder under torchrun; return what each process has written into a folder.

    Args:
        out: the folder, the script's first argument.
        launch: more arguments of torchrun.
        given: see `run_python`.
    """
    finished = run_python(*TWO_PROCESSES, *launch, HELPERS / script, out, *arguments, **given)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads((out / f"result_{rank}.json").read_text()) for rank in range(2)]


def free_port() -> int:
    """Return a port of the loopback device that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def freeze_imports() -> None:
    """Keep the garbage collector off what the imports made.

    Trainer runs it at the beginning of each training, where it would take longer than the training of a test.
    """
    gc.collect()
    gc.freeze()
