"""Processes that tests start."""

import gc
import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
RECIPES = sorted({path.parent for path in (ROOT / "recipes").rglob("*.py")})  # folders
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


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


def freeze_imports() -> None:
    """Keep the garbage collector off what the imports made.

    Trainer runs it at the beginning of each training, where it would take longer than the training of a test.
    """
    gc.collect()
    gc.freeze()
