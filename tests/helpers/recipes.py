"""Recipes that run from a copy of their own files, where no other recipe can be imported."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import ROOT

RECIPES = ROOT / "recipes"
SHORT = (
    *("--max_steps", "2", "--per_device_train_batch_size", "4", "--logging_steps", "1"),
    *("--use_cpu", "true", "--disable_tqdm", "true", "--report_to", "none"),
)


def modules_in(folder: Path) -> list[str]:
    """Return the names of the imported modules whose files lie in a folder."""
    return [name for name, module in sys.modules.items() if str(folder) in (getattr(module, "__file__", None) or "")]


def run_copy(script: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Copy a recipe into an empty folder, run it there with its YAML file for two steps, and return its results.

    Args:
        script: path in `recipes`; a script in a folder is copied with it, another one with its YAML file.
        folder: where `copy` and `out`, the output folder, are made.
        flags: come after those of SHORT, and may replace them.
    """
    source, copy, out = RECIPES / script, folder / "copy", folder / "out"
    if source.parent != RECIPES:
        shutil.copytree(source.parent, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        copy.mkdir(parents=True, exist_ok=True)
        for path in (source, source.with_suffix(".yaml")):
            shutil.copy(path, copy)
    hidden = {name: sys.modules.pop(name) for name in modules_in(RECIPES)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(copy), *(path for path in sys.path if not path.startswith(str(RECIPES)))])
        config = ["--config", source.with_suffix(".yaml").name, *SHORT, "--output_dir", str(out)]
        patch.setattr(sys, "argv", [source.name, *config, *flags])
        patch.chdir(copy)
        try:
            runpy.run_path(str(copy / source.name), run_name="__main__")
        finally:
            for name in modules_in(copy):
                del sys.modules[name]
            sys.modules.update(hidden)
    return json.loads((out / "all_results.json").read_text())
