"""The built package holds what an import needs, and only the package."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from helpers.processes import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build a wheel and a source distribution from a clean copy."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("hfppo", "recipes", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "build", "--no-isolation"], cwd=folder, check=True, capture_output=True)
    return folder / "dist"


@pytest.mark.slow
def test_both_distributions_hold_the_package_and_its_data(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "hfppo").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    assert {"hfppo/py.typed", "hfppo/reporting/card_template.md", "hfppo/reporting/run_page.html"} <= package
    assert {name for name in in_wheel if name.startswith("hfppo/")} == package
    assert any(name.endswith("/licenses/LICENSE") for name in in_wheel)
    assert package | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= in_source
    assert not [name for name in in_wheel | in_source if name.startswith(("tests", "recipes"))]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable clone"])
def test_what_is_installed_is_imported_in_a_new_environment(built, tmp_path, kind):
    """With the dependencies of the tests, beside a clone, whose folder has the package's name and is no package."""
    (wheel,), clone = built.glob("*.whl"), shutil.copytree(built.parent, tmp_path / "hfppo")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    environment = {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": "/usr/bin:/bin"}
    what = [str(wheel)] if kind == "wheel" else ["--no-build-isolation", "-e", str(clone)]
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *what]
    subprocess.run([python, *install], check=True, env=None if kind == "wheel" else environment)
    code = "import hfppo, hfppo.token_trace; print(hfppo.PPOConfig.__module__, hfppo.__file__)"
    found = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    module, file = found.stdout.split()[-2:]
    assert module == "hfppo.config"
    assert Path(file).is_relative_to(tmp_path / "venv" if kind == "wheel" else clone)


def test_pre_commit_runs_the_pinned_ruff():
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"ruff=={hooks['rev'].removeprefix('v')}" in extras["test"]
