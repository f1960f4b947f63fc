"""The picture of a run, and the page's code for several runs."""

import json
import re
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from hfppo.metrics import METRICS
from hfppo.reporting.plot import PANELS, draw_panels, select_panels

PNG = b"\x89PNG"
DOCS = Path(__file__).parents[1] / "docs"


def test_every_panel_shows_metrics_that_are_logged():
    names = {name for panel in PANELS.values() for name in panel if not name.startswith("eval_")}
    names = {name.replace("*", "{function}").replace("epoch_?", "{part}").replace("_?", "_{fifth}") for name in names}
    assert names <= METRICS.keys() | {"grad_norm", "learning_rate"}


def test_a_panel_has_the_metrics_that_match_in_its_own_order():
    history = [{"step": 1, "kl_k3": 0.2, "epoch": 0.1}, {"step": 2, "kl": 0.1, "eval_easy_reward": 1.0}]
    assert select_panels(history) == {
        "Score [per completion]": ["eval_easy_reward"],
        "KL to the reference [nats per token]": ["kl", "kl_k3"],
    }


@pytest.fixture
def drawn(monkeypatch) -> dict[str, dict[str, list[tuple]]]:
    """The points of every line that was drawn, by panel and metric."""
    lines: dict[str, dict[str, list[tuple]]] = {}
    savefig = Figure.savefig

    def note(figure, *args, **kwargs):
        for axes in figure.axes:
            lines[axes.get_title(loc="left")] = {
                line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()
            }
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", note)
    return lines


@pytest.mark.usefixtures("picture")
def test_the_picture_comes_at_the_end_and_holds_the_log_history(make_trainer, drawn):
    trainer = make_trainer({"max_steps": 4})
    trainer.train()
    file = Path(trainer.args.output_dir) / "curves.png"
    assert file.read_bytes().startswith(PNG)
    assert {"β", "Throughput [tokens per second]", "Learning rate"} <= drawn.keys()
    for lines in drawn.values():
        for name, points in lines.items():
            assert points == [(e["step"], e[name]) for e in trainer.state.log_history if name in e]
            assert points
    assert not [path for path in file.parent.iterdir() if path.name == "_curves.png"]


def test_names_and_numbers_of_any_kind_are_drawn(tmp_path, drawn):
    """Dollars begin no formula, and numbers that are not finite leave gaps."""
    history = [
        {"step": 1, "reward": float("nan"), r"rewards/$\frac$/mean": 1.0},
        {"step": 2, "reward": 1.0, "rewards/f/mean": 0.5},
        {"step": 3, "reward": float("inf")},
    ]
    before = dict(matplotlib.rcParams)
    draw_panels(select_panels(history), history, r"a_$\nope{$ <b>", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert [y for _, y in drawn["Score [per completion]"]["reward"]] == pytest.approx(
        [float("nan"), 1.0, float("inf")], nan_ok=True
    )
    assert drawn["Reward functions [unweighted]"].keys() == {r"rewards/$\frac$/mean", "rewards/f/mean"}
    assert dict(matplotlib.rcParams) == before, "the user's own figures look as they did"


def test_the_code_of_the_page_draws_the_mean_over_seeds(tmp_path, monkeypatch):
    for name, offset in (("a-seed0", 0.0), ("a-seed1", 1.0), ("b-seed0", 5.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        log = [{"step": step, "epoch": step / 10, "reward": offset + step, "kl": 0.1} for step in (2, 4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*log, {"step": 4, "eval_kl": 1}]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    page = (DOCS / "monitoring.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    namespace: dict = {}
    exec(code.replace('"kl", "policy/entropy", "value/explained_variance"', '"kl"'), namespace)
    assert (tmp_path / "comparison.png").read_bytes().startswith(PNG)
    lines = namespace["figure"].axes[0].get_lines()
    found = {line.get_label(): line.get_xydata().tolist() for line in lines}
    assert found == {"a": [[2, 2.5], [4, 4.5]], "b": [[2, 7], [4, 9]]}
