"""What a notebook shows of a run, in a real kernel."""

import html
import re
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[1] / "recipes/arithmetic"


@pytest.fixture
def run(tmp_path):
    """Run cells in one kernel; returns the outputs of each code cell."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("base", "train.jsonl", "test.jsonl"):
        (tmp_path / name).symlink_to(RECIPE / name)

    def executed(notebook, **replaced: str) -> list:
        made = notebook if isinstance(notebook, nbformat.NotebookNode) else nbformat.read(notebook, as_version=4)
        for old, new in replaced.items():
            (cell,) = [cell for cell in made.cells if cell.cell_type == "code" and f"{old}=" in cell.source]
            cell.source = re.sub(rf"\b{old}=\d+", f"{old}={new}", cell.source)
        nbclient.NotebookClient(made, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
        return [cell.outputs for cell in made.cells if cell.cell_type == "code"]

    return executed


def html_of(outputs: list) -> str:
    return "".join(output.data.get("text/html", "") for output in outputs if "data" in output)


def rows(table: str) -> list[list[str]]:
    """The cells of an HTML table."""
    lines = re.findall(r"<tr.*?>(.*?)</tr>", table, flags=re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", line)] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [8, pytest.param(64, marks=pytest.mark.nightly)])
def test_the_notebook_of_the_arithmetic_run(run, tmp_path, steps):
    outputs = run(RECIPE / "arithmetic.ipynb", max_steps=str(steps))
    *_, before, training, after, table, _ = outputs
    shown = html_of(training)
    assert f"{steps // 4} rollouts of 64 completions (64 per process), 4 optimizer steps each" in shown
    assert f"[{steps}/{steps} " in shown
    heads, *logs = rows(shown)
    assert heads[:4] == ["step", "reward", "KL", "β"]
    assert {"length", "time"} <= set(heads)
    assert [row[0] for row in logs] == [str(step) for step in range(4, steps + 1, 4)]
    assert all(re.fullmatch(r"[01]\.\d{3}", row[1]) for row in logs)
    gained = float(after[-1].data["text/plain"]) - float(before[-1].data["text/plain"])
    assert gained > (0.2 if steps == 64 else 0.0)
    lines = [line.split() for line in html.unescape(re.sub("<.*?>", "", html_of(table))).splitlines()]
    heads, first = next(at for at in zip(lines, lines[2:], strict=False) if at[0][:1] == ["token"])
    assert heads[:3] == ["token", "log", "π_old"]
    assert first[0] == "是"
    assert (tmp_path / "out/notebook/adapter_model.safetensors").is_file()
    assert not [output for cell in outputs for output in cell if output.output_type == "error"]
