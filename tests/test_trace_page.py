"""The page of traces: safe with any text, and, in a browser, what it shows."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hfppo.token_trace import TokenRow, TokenTable
from hfppo.token_trace.page import render_page
from hfppo.token_trace.record import Trace

EVIL = '</script><script>document.title="hacked"</script><img src=x onerror="document.title=1"><!--'
TOKENS = ["是", "的", EVIL, "↵", "<E4>"]


def trace(rollout: int, prompt: str, shift: float) -> Trace:
    rows = [
        TokenRow(
            token=token,
            logprob=-0.5 - t,
            ref_logprob=-0.75 - t,
            kl=0.25,
            reward=-0.025,
            value=0.1 * t + shift,
            td_error=0.01 * t - 0.02,
            return_=0.9,
            advantage=(-1) ** t * (t + 1) * 0.25 + shift,
            counted=t != 4,
            new_logprob=-0.4 - t,
            ratio=1.1052 if t else 1.35,
            clipped=t == 0,
        )
        for t, token in enumerate(TOKENS)
    ]
    return Trace(rollout, 4 * rollout, 0.1, False, [1], [2] * 5, TokenTable(prompt, 1.0, rows), 4 * rollout + 4)


@pytest.fixture
def traces() -> list[Trace]:
    return [trace(number, prompt, number / 8) for number in (1, 3, 5) for prompt in (f"{EVIL} 1+1\n=", "请问2+2=")]


@pytest.fixture
def page_file(traces, tmp_path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(render_page(traces), encoding="utf-8")
    return path


def test_texts_are_data_and_never_markup(traces):
    made = render_page(traces)
    assert made.count("</script>") == 2  # the data's and the program's
    assert "<img" not in made
    data = re.search(r'<script id="traces">const traces = (.*?);</script>', made, re.DOTALL)[1]
    assert json.loads(data)[0]["prompt"] == f"{EVIL} 1+1\n="
    assert json.loads(data)[0]["columns"]["token"] == TOKENS


def test_page_names_no_address(traces):
    assert re.findall(r"https?://|url\(|@import|src=(?!x onerror)", render_page([replace(traces[1])])) == []


def tokens(view, completion: int = 0):
    return view.locator("article").nth(completion).locator(".token")


def detail(view) -> dict[str, str]:
    names, numbers = (view.locator(f"#detail {tag}").all_text_contents() for tag in ("dt", "dd"))
    return dict(zip(names, numbers, strict=True))


@pytest.mark.browser
def test_tokens_and_all_their_numbers_are_shown(open_page, page_file):
    view = open_page(page_file)
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
    assert view.title() == "hfppo: token traces"


@pytest.mark.browser
def test_slider_moves_through_the_rollouts_and_keeps_the_chosen_token(open_page, page_file):
    view = open_page(page_file)
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
    unknown = dict.fromkeys(("reward", "td_error", "return_", "advantage", "new_logprob", "ratio", "clipped"))
    rows = [replace(row, **unknown, value=float("nan")) for row in traces[0].table.rows]
    alone = replace(traces[0], updated_step=None, table=TokenTable("x", None, rows))
    (tmp_path / "one.html").write_text(render_page([alone]), encoding="utf-8")
    view = open_page(tmp_path / "one.html")
    assert not view.locator("#rollout").is_visible()
    assert list(detail(view)) == ["log π_old", "log π_ref", "KL", "value"]
    assert detail(view)["value"] == "NaN"
    assert "score unknown" in view.locator(".facts").text_content()
    assert view.locator("#where").text_content() == "Rollout 1 · step 4 · β 0.1"
