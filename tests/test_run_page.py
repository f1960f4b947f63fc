"""The page of a run: safe with any text, small, written as the run goes, and, in a browser, what it shows."""

import random
import re
from dataclasses import replace
from fnmatch import filter as match_names
from pathlib import Path

import pytest

from helpers.runs import Killed
from hfppo import HealthCallback, RunPageCallback, TokenTraceCallback, report
from hfppo.metrics import METRICS
from hfppo.reporting import run_page
from hfppo.reporting.run_page import MOST_POINTS, MOST_ROLLOUTS, TEMPLATE, curves, read_page, render_page, run_data
from hfppo.reporting.traces import Trace, list_trace_files, read_traces

EVIL = '</script><script>document.title="hacked"</script><img src=x onerror="document.title=1"><!--'
NASTY = [
    EVIL,
    "{{ runs }}",
    "const runs = [];",
    "\ud800",
    "\u2028",
    "\\u003c",
    "&lt;",
    "`${1}`",
    "\0\x1b[31m",
]
TOKENS = ["是", "的", EVIL, "↵", "<E4>"]


def row(t: int, token: str, shift: float) -> dict:
    before = {"logprob": -0.5 - t, "ref_logprob": -0.75 - t, "kl": 0.25, "reward": -0.025, "value": 0.1 * t + shift}
    credit = {"td_error": 0.01 * t - 0.02, "return_": 0.9, "advantage": (-1) ** t * (t + 1) * 0.25 + shift}
    after = {"counted": t != 4, "new_logprob": -0.4 - t, "ratio": 1.1052 if t else 1.35, "clipped": t == 0}
    return {"token": token, **before, **credit, **after}


def trace(rollout: int, prompt: str, shift: float) -> Trace:
    rows = [row(t, token, shift) for t, token in enumerate(TOKENS)]
    columns = {name: [one[name] for one in rows] for name in rows[0]}
    place = {"rollout": rollout, "step": 4 * rollout, "updated_step": 4 * rollout + 4, "kl_coef": 0.1}
    ids = {"truncated": False, "prompt_ids": [1], "completion_ids": [2] * 5}
    return Trace(prompt=prompt, score=1.0, columns=columns, **place, **ids)


@pytest.fixture
def traces() -> list[Trace]:
    return [trace(number, prompt, number / 8) for number in (1, 3, 5) for prompt in (f"{EVIL} 1+1\n=", "请问2+2=")]


@pytest.fixture
def page_file(traces, tmp_path) -> Path:
    path = tmp_path / "page.html"
    points = [(step, step / 10) for step in (8, 16, 24)]
    more = {"step": 24, "max_steps": 40, "curves": {"reward": points, "kl": [(8, float("nan")), (24, 0.5)]}}
    run = run_data("out", traces, **more, warnings=[EVIL], settings={"lam": 0.9, "seed": 1}, versions={"hfppo": "1"})
    path.write_text(render_page([run]), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", NASTY)
def test_texts_are_data_and_never_markup(tmp_path, text):
    run = run_data(text, [replace(trace(1, text, 0.0), kind=text)], warnings=[text], settings={text: text})
    run_page.write_page(file := tmp_path / "run.html", render_page([run]))
    made = file.read_text()
    assert made.count("<script>") == made.count("</script>") == 2  # the data's and the program's
    assert "<img" not in made
    (read,) = read_page(file)
    seen = text.replace("\ud800", "?")
    assert [read["name"], read["warnings"], read["settings"]] == [seen, [seen], {seen: seen}]
    assert read["traces"][0]["prompt"] == seen
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|src=(?!x onerror)", made) == []


def test_fuzzed_texts_are_data_and_never_markup(tmp_path):
    draw = random.Random(0)
    parts = [*NASTY, "</script", "<!--", "-->", "<svg/onload=", "javascript:", "\\", "\r\n", '"']
    texts = ["".join(draw.choices(parts, k=draw.randint(2, 6))) for _ in range(200)]
    run = run_data("out", [trace(n, text, 0.0) for n, text in enumerate(texts)], warnings=texts)
    run_page.write_page(file := tmp_path / "run.html", render_page([run]))
    made, (read,) = file.read_text(), read_page(file)
    assert made.count("<script>") == made.count("</script>") == 2
    assert [part for part in ("<img", "<svg/", "<!--") if part in made] == []
    assert read["warnings"] == [text.replace("\ud800", "?") for text in texts]
    assert {one["prompt"] for one in read["traces"]} <= {*read["warnings"]}


def test_every_chart_shows_metrics_that_are_logged():
    lists = re.findall(r"metrics: \[(.+)\]},$", TEMPLATE.read_text(), flags=re.MULTILINE)
    patterns = [pattern for some in lists for pattern in re.findall(r'"(.+?)"', some)]
    assert len(patterns) > len(lists) > 10
    known = [name.replace("{part}", "epoch_1") for name in METRICS]
    known += ["grad_norm", "learning_rate", "eval_reward", "eval_easy_reward"]
    assert [pattern for pattern in patterns if not match_names(known, pattern)] == []


def test_long_runs_keep_the_mean_of_neighbours():
    history = [{"step": step, "reward": float(step % 2)} for step in range(1, 10_001)]
    assert list(made := curves(history)) == ["reward"]
    assert len(made["reward"]) == MOST_POINTS
    assert made["reward"][0] == (20, 0.5)
    assert curves([{"step": 1, "reward": float("nan")}])["reward"][0][1] != 0


@pytest.mark.usefixtures("run_page")
def test_the_page_of_a_run_that_is_killed_and_resumed(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(run_page, "WRITE_EVERY", 0.0)
    monkeypatch.setattr(run_page, "SHARE_OF_TIME", 1e9)
    config = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "logging_steps": 1, "lam": 0.9}
    straight = make_trainer(config | {"output_dir": str(tmp_path / "straight/out")})
    straight.train()
    killed = make_trainer(config, callbacks=[Killed(10)])  # after the third rollout's first log
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    (run,) = read_page(page := tmp_path / "out/run.html")
    assert (run["step"], run["max_steps"], run["settings"]["lam"]) == (9, 12, 0.9)
    assert [step for step, _ in run["curves"]["policy/loss"]] == list(range(1, 10))
    make_trainer(config).train(resume_from_checkpoint=True)
    (resumed,), (whole,) = read_page(page), read_page(tmp_path / "straight/out/run.html")
    assert resumed["traces"] == whole["traces"] == run_page.shorten(whole["traces"])
    assert [t["rollout"] for t in whole["traces"]] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    for name, curve in whole["curves"].items():
        assert name.startswith(("time/", "train_")) or resumed["curves"][name] == curve, name
    for number, damaged in ((4, ""), (5, "const runs = [{}];")):
        page.write_text(damaged)
        make_trainer(config | {"max_steps": 4 * number}).train(resume_from_checkpoint=True)
        assert [t["rollout"] for t in read_page(page)[0]["traces"]] == [number] * 4


@pytest.mark.usefixtures("run_page")
def test_completions_are_thinned_and_warnings_shown(make_trainer, tmp_path, monkeypatch):
    health = HealthCallback()
    health.found = {"kl": "a warning"}
    page, trainer = RunPageCallback(health), make_trainer()
    monkeypatch.setattr(run_page, "MOST_TOKENS", 2)
    rollout = trainer.rollout(["请问1+1="] * 2)
    for number in range(1, 40):
        ppo_state = replace(trainer.ppo_state, rollouts=number)
        given = {"rollout": rollout, "ppo_state": ppo_state, "processing_class": trainer.processing_class}
        page.on_rollout_end(trainer.args, trainer.state, trainer.control, **given)
    assert [one.rollout for one in page._traces] == list(range(1, 40, 4))
    assert [len(one.rows) for one in page._traces] == [2] * 10
    assert all(run_page.stride(n) * MOST_ROLLOUTS >= n for n in range(1, 1000))
    page._write(trainer.args, trainer.state)
    assert read_page(tmp_path / "out/run.html")[0]["warnings"] == ["a warning"]
    page.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert read_page(tmp_path / "out/run.html")[0]["traces"] == [], "a push takes no texts along"
    page._write(trainer.args, trainer.state)
    assert read_page(tmp_path / "out/run.html")[0]["traces"] == []


@pytest.mark.usefixtures("run_page")
def test_the_report_of_one_run_has_its_recorded_traces(make_trainer, tmp_path, capsys):
    make_trainer({"max_steps": 4}, callbacks=[TokenTraceCallback(num_completions=1)]).train()
    (file,) = list_trace_files(tmp_path / "out")
    report.main([str(tmp_path / "out"), "--html", str(tmp_path / "report.html")])
    (run,) = read_page(tmp_path / "report.html")
    assert run["traces"] == [vars(made) for made in read_traces(file)]
    with pytest.raises(SystemExit, match=r"run\.html"):
        report.main([str(tmp_path)])


@pytest.fixture
def several(tmp_path) -> list[str]:
    """Pages of two runs with other seeds, and of one with another λ."""
    folders = []
    for name, lam, seed, offset in (("a", 0.9, 0, 0.0), ("b", 0.9, 1, 1.0), ("c", 1.0, 0, 5.0)):
        folders.append(str(tmp_path / name))
        Path(folders[-1]).mkdir()
        curve = {"reward": [(2, offset + 2), (4, offset + 4)]}
        run = run_data(name, [trace(1, "p", 0.0)], curves=curve, settings={"lam": lam, "seed": seed, "same": 1})
        Path(folders[-1], "run.html").write_text(render_page([run]))
    return folders


@pytest.mark.browser
def test_several_runs_are_lines_of_seeds_and_their_mean(open_page, several, tmp_path):
    report.main([*several, "--html", str(tmp_path / "report.html")])
    view = open_page(tmp_path / "report.html")
    assert view.locator("polyline.seed").count() == 2
    assert view.locator("polyline:not(.seed)").count() == 2
    assert view.locator(".series li").all_text_contents() == ["lam=0.9 4.5", f"{several[2]} 9"]
    rows = [row.all_text_contents() for row in (view.locator("#settings tr").nth(i).locator("td") for i in (1, 2))]
    assert sorted(rows) == [["0", "1", "0"], ["0.9", "0.9", "1"]]
    assert not view.locator("#completions-section").is_visible()


def tokens(view, completion: int = 0):
    return view.locator("article").nth(completion).locator(".token")


def detail(view) -> dict[str, str]:
    names, numbers = (view.locator(f"#detail {tag}").all_text_contents() for tag in ("dt", "dd"))
    return dict(zip(names, numbers, strict=True))


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1600])
def test_curves_warnings_and_settings(open_page, page_file, width):
    view = open_page(page_file, viewport={"width": width, "height": 800})
    assert view.title() == "hfppo: out"
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert view.locator("#status").text_content() == "step 24 of 40"
    assert view.locator("#warnings li").all_text_contents() == [EVIL]
    captions = ["Score per completion", "KL to the reference, nats per token"]
    assert view.locator("figcaption").all_text_contents() == captions
    assert view.locator("#settings td").all_text_contents() == ["0.9", "1", "1"]
    chart = view.locator("figure svg").first
    value = view.locator(".series span").first
    assert value.text_content() == "2.4"
    box = chart.bounding_box()
    chart.hover(position={"x": 2, "y": box["height"] / 2})
    assert value.text_content() == "0.8"
    chart.focus()
    view.keyboard.press("ArrowRight")
    assert value.text_content() == "1.6"
    view.keyboard.press("Enter")
    assert view.locator("#where").text_content() == "Rollout 3 · step 12→16 · β 0.1", "the rollout of step 16"
    view.select_option("#language", "zh")
    assert view.locator("figcaption").first.text_content() == "每个回答的得分"


@pytest.mark.browser
def test_tokens_and_all_their_numbers_are_shown(open_page, page_file):
    view = open_page(page_file)
    assert view.locator("#rollout").input_value() == "2"  # the last one
    view.locator("#rollout").fill("0")
    assert tokens(view).locator("span").all_text_contents() == TOKENS
    assert tokens(view).locator("small").all_text_contents() == ["0.375", "−0.375", "0.875", "−0.875", "1.375"]
    assert view.locator("article p").first.text_content() == f"{EVIL} 1+1\n="
    tokens(view, 1).nth(0).hover()
    before = {"log π_old": "−0.5000", "log π_ref": "−0.7500", "KL": "0.2500", "reward": "−0.0250", "value": "0.1250"}
    before |= {"δ": "−0.0200", "return": "0.9000", "advantage": "0.3750"}
    assert detail(view) == {**before, "log π_new": "−0.4000", "ratio": "1.3500", "clipped": "yes"}
    tokens(view, 1).nth(1).focus()
    assert detail(view)["log π_old"] == "−1.5000"
    assert "left out of the losses" not in view.locator("#meaning").text_content()
    view.keyboard.press("Tab")
    assert detail(view)["log π_old"] == "−2.5000"
    tokens(view, 1).nth(4).click()
    assert "left out of the losses" in view.locator("#meaning").text_content()


@pytest.mark.browser
def test_slider_moves_through_the_rollouts_and_keeps_the_chosen_token(open_page, page_file):
    view = open_page(page_file)
    view.locator("#rollout").fill("0")
    tokens(view, 1).nth(2).click()
    assert view.locator("#where").text_content() == "Rollout 1 · step 4→8 · β 0.1"
    view.locator("#rollout").focus()
    view.keyboard.press("ArrowRight")
    assert view.locator("#where").text_content() == "Rollout 3 · step 12→16 · β 0.1"
    assert detail(view)["value"] == "0.5750"
    view.keyboard.press("End")
    assert view.locator("#where").text_content() == "Rollout 5 · step 20→24 · β 0.1"
    assert detail(view)["advantage"] == "1.3750"
    assert tokens(view, 1).nth(2).get_attribute("aria-pressed") == "true"


@pytest.mark.browser
def test_page_of_one_trace_without_reward_has_no_slider_and_no_empty_columns(open_page, traces, tmp_path):
    names = ("reward", "td_error", "return_", "advantage", "new_logprob", "ratio", "clipped")
    columns = traces[0].columns | dict.fromkeys(names, [None] * 5) | {"value": [float("nan")] * 5}
    alone = replace(traces[0], updated_step=None, prompt="x", score=None, columns=columns)
    (tmp_path / "one.html").write_text(render_page([run_data("x", [alone])]), encoding="utf-8")
    view = open_page(tmp_path / "one.html")
    assert not view.locator("#rollout").is_visible()
    assert not any(view.locator(f"#{part}").is_visible() for part in ("curves", "warnings", "settings"))
    assert list(detail(view)) == ["log π_old", "log π_ref", "KL", "value"]
    assert detail(view)["value"] == "NaN"
    assert "score unknown" in view.locator(".facts").text_content()
    assert view.locator("#where").text_content() == "Rollout 1 · step 4 · β 0.1"
