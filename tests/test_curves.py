"""The log on disk, the groups of runs, and what the picture and the page show of them."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import TrainerCallback

from hfppo import LogFileCallback, PlotCallback
from hfppo.reporting.__main__ import main
from hfppo.reporting.curves_page import nice_ticks, page
from hfppo.reporting.log_file import Group, group_runs, read_log
from hfppo.reporting.panels import DASHES, PANELS, panels
from hfppo.reporting.picture import draw

FOUR_STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def entry(step: int, **metrics: float) -> dict:
    return {"step": step, "epoch": step / 10, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def write_run(folder: Path, log: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
    return folder


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text).group(1))


# The log on disk


def test_the_file_is_the_log_history(make_trainer):
    trainer = make_trainer(FOUR_STEPS)
    trainer.train()
    assert len(trainer.state.log_history) == 5  # and the times at the end
    assert read_log(trainer.args.output_dir) == trainer.state.log_history
    trainer.log({"afterwards": 1.0})
    assert read_log(trainer.args.output_dir) == trainer.state.log_history


def test_a_run_that_goes_on_from_an_earlier_checkpoint_has_no_line_twice(make_trainer):
    make_trainer(FOUR_STEPS).train()
    resumed = make_trainer({**FOUR_STEPS, "max_steps": 6})
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    log = read_log(resumed.args.output_dir)
    assert log == resumed.state.log_history
    assert [e["step"] for e in log if "loss" in e] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_in_an_old_folder_begins_a_new_file(make_trainer):
    make_trainer({"max_steps": 3}).train()
    trainer = make_trainer({"max_steps": 2})
    trainer.train()
    assert [e["step"] for e in read_log(trainer.args.output_dir) if "loss" in e] == [1, 2]


def test_an_evaluation_before_training_leaves_an_old_file_alone(make_trainer, dataset):
    make_trainer({"max_steps": 2}).train()
    trainer = make_trainer(eval_dataset=dataset.select(range(2)))
    before = read_log(trainer.args.output_dir)
    trainer.evaluate()
    assert read_log(trainer.args.output_dir) == before


def test_a_log_is_read_while_its_last_line_is_being_written(tmp_path):
    run = write_run(tmp_path / "run", [entry(1, reward=0.5)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_log(run) == [entry(1, reward=0.5)]


def test_without_the_file_the_last_checkpoint_is_read(make_trainer):
    trainer = make_trainer(FOUR_STEPS)
    trainer.remove_callback(LogFileCallback)
    trainer.train()
    assert [e["step"] for e in read_log(trainer.args.output_dir)] == [1, 2, 3, 4]


def test_a_folder_without_a_log_says_what_to_give(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "give the output_dir of a run" in capsys.readouterr().err


# Groups


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    names = ["kl0-seed0", "kl0-seed11", "kl1_seed0", "base", "deep/seed1", "deep/seed2", "seedling"]
    folders = [write_run(tmp_path / name, [entry(1, reward=0.0)]) for name in names]
    (tmp_path / "empty").mkdir()
    found = {group.name: len(group.logs) for group in group_runs([*folders, tmp_path / "empty"])}
    assert found == {"kl0": 2, "kl1": 1, "base": 1, "deep": 2, "seedling": 1}
    assert [group.name for group in group_runs(folders[4:6])] == ["deep"]


def test_a_group_is_the_mean_of_its_runs_between_the_lowest_and_the_highest():
    first = [entry(2, reward=0.0), entry(4, reward=0.5), entry(6, reward=1.0)]
    second = [entry(2, reward=1.0), entry(4, reward=0.0), entry(4, eval_reward=0.5)]
    series = Group("both", [first, second]).series("reward")
    assert series.steps == [2, 4]  # 6 is not yet in both
    assert series.values == [0.5, 0.25]
    assert (series.lowest, series.highest) == ([0.0, 0.0], [1.0, 0.5])


def test_several_runs_show_one_line_each_and_a_run_alone_all_of_its_metrics():
    log = [entry(1, reward=0.1, kl=0.2, kl_k3=0.3)]
    alone = {panel.title: [line.label for line in lines] for panel, lines in panels([Group("a", [log])])}
    assert alone == {"Score": ["reward"], "KL to the reference": ["kl", "kl_k3"]}
    beside = panels([Group("a", [log]), Group("b", [log])])
    assert {panel.title: [line.label for line in lines] for panel, lines in beside} == {
        "reward": ["a", "b"],
        "kl": ["a", "b"],
    }


def test_no_line_is_dropped_and_none_looks_like_another():
    groups = [Group(str(n), [[entry(1, reward=n)]]) for n in range(12)]
    ((_, lines),) = panels(groups)
    assert [line.label for line in lines] == [str(n) for n in range(12)]
    assert len({(line.color, line.dashes) for line in lines}) == 12
    assert len({line.color for line in lines[: len(DASHES)]}) == 6


def test_every_panel_shows_metrics_that_are_logged():
    from hfppo.metrics import METRICS

    of_trainer = {"grad_norm", "learning_rate"}
    for panel in PANELS:
        for name in panel.metrics:
            if not name.startswith("eval_"):
                assert name.replace("*", "{function}") in METRICS.keys() | of_trainer


# The page and the picture


def test_the_numbers_of_the_page_are_those_of_the_log_history(make_trainer):
    trainer = make_trainer(FOUR_STEPS)
    trainer.train()
    text = (Path(trainer.args.output_dir) / "curves.html").read_text()
    shown = iter(data_of(text)["panels"])
    titles = []
    for panel, lines in panels([Group("out", [trainer.state.log_history])]):
        titles.append(panel.title)
        for line, data in zip(lines, next(shown), strict=True):
            logged = {e["step"]: e[line.label] for e in trainer.state.log_history if line.label in e}
            assert dict(zip(data["steps"], data["values"], strict=True)) == logged
    assert next(shown, None) is None
    assert {"Score", "KL to the reference", "Throughput", "Time", "Learning rate"} <= set(titles)
    last = {name: value for e in trainer.state.log_history for name, value in e.items()}
    cells = dict(re.findall(r"<tr><th>([^<]+)</th><td>(.*?)</td></tr>", text))
    assert cells == {name: f"{last[name]:.4g}" for name in last if name not in ("step", "epoch")}


def test_what_the_run_is_called_is_escaped():
    log = [{"step": 1, "reward": 1.0, "rewards/</script><b>/mean": 1.0, "rewards/f/mean": 0.0}]
    text = page(panels([Group("<i>", [log])]), "<i>&", [Group("<i>", [log])])
    assert "<i>" not in text
    assert text.count("</script>") == 2
    assert text.count("<b>") == 3  # the values of the legends
    assert "rewards/</script><b>/mean" in unescape(text)


def test_numbers_that_are_not_finite_leave_gaps():
    log = [entry(1, reward=float("nan")), entry(2, reward=1.0), entry(3, reward=float("inf"))]
    text = page(panels([Group("a", [log])]), "a", [Group("a", [log])])
    assert data_of(text)["panels"][0][0]["values"] == [None, 1.0, None]
    assert "nan" not in re.search(r"<svg.*</svg>", text).group(0)


def test_numbers_that_differ_by_rounding_alone_are_drawn():
    log = [entry(1, reward=0.0986365270158993), entry(2, reward=0.09863652701589931)]
    assert "<polyline" in page(panels([Group("a", [log])]), "a", [Group("a", [log])])


def test_the_page_grows_with_the_run_and_the_picture_comes_at_the_end(make_trainer, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("hfppo.reporting.picture.find_spec", find_spec)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                folder = Path(args.output_dir)
                seen.append((data_of((folder / "curves.html").read_text())["last"], (folder / "curves.png").exists()))

    trainer = make_trainer(FOUR_STEPS, callbacks=[Look()])
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert seen == [(2, False)]
    assert data_of((folder / "curves.html").read_text())["last"] == 4
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_run_is_silent_and_the_command_says_what_to_do(make_trainer, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    trainer = make_trainer({"max_steps": 2})
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert (folder / "curves.html").is_file()
    assert not (folder / "curves.png").exists()
    assert "matplotlib" not in capsys.readouterr().err
    assert main([str(folder)]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_removed_callbacks_leave_no_files(make_trainer):
    trainer = make_trainer({"max_steps": 2})
    trainer.remove_callback(PlotCallback)
    trainer.remove_callback(LogFileCallback)
    trainer.train()
    assert not [p for p in Path(trainer.args.output_dir).glob("*") if p.name.startswith(("curves", "metrics"))]


def test_the_command_compares_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, offset in (("a-seed0", 0.0), ("a-seed1", 0.2), ("b", 1.0)):
        write_run(tmp_path / name, [entry(n, reward=offset + n) for n in (1, 2)])
    runs = [str(tmp_path / name) for name in ("a-seed0", "a-seed1", "b")]
    assert main([*runs, "--output", str(tmp_path / "kl0.1")]) == 0
    assert "a (2 runs), b" in capsys.readouterr().out
    a, b = data_of((tmp_path / "kl0.1.html").read_text())["panels"][0]
    assert (a["values"], b["values"]) == ([1.1, 2.1], [2.0, 3.0])
    assert (tmp_path / "kl0.1.png").is_file()


def test_a_metric_that_one_of_several_runs_has_is_given_its_name(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    named = []
    legend = Axes.legend

    def noting(axes, *args, **kwargs):
        named.append([line.get_label() for line in axes.get_lines()])
        return legend(axes, *args, **kwargs)

    monkeypatch.setattr(Axes, "legend", noting)
    runs = [Group("a", [[entry(1, reward=0.1, kl=0.2)]]), Group("b", [[entry(1, reward=0.3)]])]
    draw(runs, "both", tmp_path / "curves")
    assert named == [["a", "b"], ["a"]]
    named.clear()
    draw(runs[1:], "one", tmp_path / "curves")
    assert named == []


def test_nothing_logged_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ValueError, match="nothing has been logged yet"):
        draw([Group("a", [[]])], "a", tmp_path / "curves")


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0.0, 1.0, [0, 0.5, 1]), (-3.0, 17.0, [-5, 0, 5, 10, 15, 20]), (0, 160, [0, 50, 100, 150, 200])],
)
def test_ticks_are_round_numbers_that_hold_the_range(low, high, wanted):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert ticks == pytest.approx(wanted)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(scheme, tmp_path, open_page):
    """It reads on a phone in either scheme, asks for nothing, and shows the value under the pointer."""
    log = [entry(n, reward=n / 10, kl=0.01 * n, policy__clip_frac=0.125) for n in (10, 20, 30)]
    groups = [Group("a-run-with-quite-a-long-name-" * 3, [log])]
    file = tmp_path / "curves.html"
    file.write_text(page(panels(groups), groups[0].name, groups))
    tab = open_page(file, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert [b.text_content() for b in tab.locator("b").all()] == ["3", "0.3", "0.125"]
    box = tab.locator("figure > svg").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * (52 + (350 - 52) * 21 / 30) / 360, box["y"] + box["height"] / 2)
    assert tab.locator("b").first.text_content() == "2 @ 20"
    ink, paper = (
        luminance(tab.evaluate(f"getComputedStyle(document.body).{c}")) for c in ("color", "backgroundColor")
    )
    assert (ink < paper) == (scheme == "light")
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7  # the contrast that WCAG asks for at AAA


def luminance(color: str) -> float:
    """The relative luminance of "rgb(r, g, b)", 0 to 1."""
    parts = [int(x) / 255 for x in re.findall(r"\d+", color)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_page_is_utf8_in_any_locale(tmp_path):
    run = write_run(tmp_path / "run", [entry(1, reward=0.5, kl_coef=0.05), entry(2, reward=0.6, kl_coef=0.05)])
    ascii_only = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run(
        [sys.executable, "-m", "hfppo.reporting", str(run)], env=ascii_only, check=True, capture_output=True
    )
    (written,) = run.glob("*.html")
    assert "β" in written.read_text(encoding="utf-8")


def test_steps_rise():
    log = [{"step": step, "reward": 0.0} for step in (8, 1000, 9, 64)]
    assert Group("a", [log]).series("reward").steps == [8, 9, 64, 1000]
