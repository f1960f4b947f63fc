"""What a notebook shows of a run, in a real kernel."""

import html
import re
from pathlib import Path

import pytest

from hfppo.reporting.run_page import read_page

RECIPE = Path(__file__).parents[1] / "recipes/arithmetic"


def run(folder: Path, steps: int) -> list:
    """Run the notebook in a folder for some steps; return the outputs of each code cell."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("base", "train.jsonl", "test.jsonl"):
        (folder / name).symlink_to(RECIPE / name)
    made = nbformat.read(RECIPE / "arithmetic.ipynb", as_version=4)
    cells = [cell for cell in made.cells if cell.cell_type == "code"]
    (cell,) = [cell for cell in cells if "max_steps=" in cell.source]
    cell.source = re.sub(r"\bmax_steps=\d+", f"max_steps={steps}", cell.source)
    nbclient.NotebookClient(made, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in cells]


def html_of(outputs: list) -> str:
    return "".join(output.data.get("text/html", "") for output in outputs if "data" in output)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [8, pytest.param(64, marks=pytest.mark.nightly)])
def test_the_notebook_of_the_arithmetic_run(tmp_path, steps):
    outputs = run(tmp_path, steps)
    *_, before, training, after, table, _ = outputs
    assert html_of(training).count("<iframe") == 1, "one page, drawn again in its place"
    text = "".join(output.text for output in training if output.output_type == "stream")
    assert f"{steps // 4} rollouts of 64 completions (64 per process), 4 optimizer steps each" in text
    (tmp_path / "shown.html").write_text(html.unescape(re.search('srcdoc="([^"]*)"', html_of(training))[1]))
    (page,) = read_page(tmp_path / "shown.html")
    assert page["step"] == steps
    assert [step for step, _ in page["curves"]["reward"]] == list(range(4, steps + 1, 4))
    gained = float(after[-1].data["text/plain"]) - float(before[-1].data["text/plain"])
    assert gained > (0.2 if steps == 64 else 0.0)
    lines = [line.split() for line in html.unescape(re.sub("<.*?>", "", html_of(table))).splitlines()]
    heads, first = next(at for at in zip(lines, lines[2:], strict=False) if at[0][:1] == ["token"])
    assert heads[:3] == ["token", "log", "π_old"]
    assert first[0] == "是"
    assert (tmp_path / "out/notebook/adapter_model.safetensors").is_file()
    assert not [output for cell in outputs for output in cell if output.output_type == "error"]
