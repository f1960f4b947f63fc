"""The pages of docs/ name everything public, state the defaults as they are, and their code runs."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

import hfppo
import hfppo.functional
from hfppo import PPOConfig
from hfppo.metrics import METRICS

ROOT = Path(hfppo.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
INHERITED = {f.name: f.default for f in fields(TrainingArguments)}
STATED = {f.name: f.default for f in fields(PPOConfig) if INHERITED.get(f.name, f) != f.default}


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def first_cells(page: Path) -> list[list[str]]:
    """The cells of each table row that begins with a word in backticks, the backticks taken off."""
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row] for row in rows]


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_field_is_in_the_configuration_with_its_default():
    table = {name: default for name, default, *_ in first_cells(DOCS / "configuration.md")}
    assert table.keys() == STATED.keys()
    assert {name: ast.literal_eval(default) for name, default in table.items()} == STATED


def test_every_metric_and_no_other_has_a_line():
    names = [row[0] for row in first_cells(DOCS / "metrics.md")]
    assert len(names) == len(set(names))
    assert set(names) == METRICS.keys()


@pytest.mark.parametrize("owner", [hfppo, hfppo.functional], ids=lambda module: module.__name__)
def test_every_public_name_is_on_some_page(owner):
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in owner.__all__ if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page):
    for block in python_blocks(page):
        ast.parse(block)


@pytest.mark.slow
def test_quickstart_runs(tmp_path, monkeypatch, capsys):
    """Its blocks, one after the other in one namespace, where the recipes lie beside."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(DOCS / "quickstart.md")
    assert len(blocks) == 5
    namespace: dict = {"__name__": "quickstart"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"quickstart.md, block {number}", "exec"), namespace)
    assert namespace["trainer"].state.global_step == 12
    shown = capsys.readouterr().out
    assert "advantage" in shown  # the token table
    assert "rollout 3: 64 completions" in shown  # the callback, after the resume
    assert "请问1+1=2？是的" in shown  # plain PEFT


@pytest.mark.slow
def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(DOCS), str(tmp_path / "html")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "html/quickstart.html").is_file()
