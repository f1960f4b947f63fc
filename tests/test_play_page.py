"""docs/play.html computes an update again, in the browser, as `hfppo.functional` does."""

import json
import re
from pathlib import Path

import pytest
import torch

import hfppo
from hfppo import functional as F

PAGE = Path(hfppo.__file__).parent.parent / "docs/play.html"
COMPLETIONS = json.loads(re.search(r"const completions = (.*?);\n", PAGE.read_text(encoding="utf-8"))[1])
COLUMNS = {"advantage": "advantage", "return": "returns", "ratio": "ratio", "loss": "loss"}  # by their heads
SETTINGS = [
    {"score": 1.0, "beta": 0.02, "gamma": 1.0, "lam": 0.95, "clip": 0.2, "update": 1.0},
    {"score": 0.0, "beta": 1.0, "gamma": 0.9, "lam": 0.0, "clip": 0.05, "update": 3.0},
    {"score": 0.3, "beta": 0.5, "gamma": 0.55, "lam": 1.0, "clip": 0.5, "update": 0.0},
]


def expected(completion: dict, settings: dict[str, float]) -> dict[str, torch.Tensor]:
    """The same columns, (T,) each, by the package."""
    old, ref, new, values = (
        torch.tensor([completion[name]], dtype=torch.float64)
        for name in ("logprob", "ref_logprob", "new_logprob", "value")
    )
    mask = torch.ones(old.shape, dtype=torch.bool)
    kl = F.token_kl(old, ref, "k1")
    rewards = F.token_rewards(torch.tensor([settings["score"]], dtype=torch.float64), kl, mask, settings["beta"])
    advantages, returns = F.gae(rewards, values, mask, settings["gamma"], settings["lam"])
    now = old + settings["update"] * (new - old)
    loss = F.policy_loss(now, old, advantages, F.Clip(settings["clip"], settings["clip"]))
    clipped = F.clip_fractions(now, old, advantages, F.Clip(settings["clip"], settings["clip"]))
    columns = {"kl": kl, "reward": rewards, "advantage": advantages, "returns": returns, "loss": loss}
    columns |= {"ratio": (now - old).exp(), "clipped": clipped.low | clipped.high}
    return {name: column[0] for name, column in columns.items()}


def test_the_page_names_no_address():
    assert re.findall(r"https?://|url\(|@import|src=", PAGE.read_text(encoding="utf-8")) == []


def test_some_tokens_are_clipped_with_the_settings_of_this_test():
    assert any(expected(completion, SETTINGS[1])["clipped"].any() for completion in COMPLETIONS)


@pytest.mark.browser
def test_the_page_computes_what_the_package_computes(open_page):
    view = open_page(PAGE)
    cases = [[completion, settings] for completion in COMPLETIONS for settings in SETTINGS]
    found = view.evaluate("cases => cases.map(([completion, settings]) => compute(completion, settings))", cases)
    for case, columns in zip(cases, found, strict=True):
        for name, column in expected(*case).items():
            assert columns[name] == pytest.approx(column.tolist(), abs=1e-6), (name, case)


def table(view) -> dict[str, list[str]]:
    """The cells of each column by its head, and the class of each row."""
    cells = "[row.className, ...[...row.children].map(cell => cell.textContent)]"
    rows = view.evaluate(f"[...document.querySelectorAll('tr')].map(row => {cells})")
    return {name or "class": list(cells) for name, *cells in zip(*rows, strict=True)}


@pytest.mark.browser
def test_sliders_change_the_table(open_page):
    """At the width of a phone, which the page fits."""
    view = open_page(PAGE, viewport={"width": 360, "height": 800})
    assert view.evaluate("document.documentElement.scrollWidth") <= 360
    right, wrong = COMPLETIONS
    assert table(view)["token"] == right["token"]
    view.locator("#completion").select_option("1")
    start = SETTINGS[0] | {"score": wrong["score"]}
    for settings in (start, SETTINGS[1], start):
        shown, columns = table(view), expected(wrong, settings)
        for head, name in COLUMNS.items():
            numbers = [float(cell.replace("−", "-")) for cell in shown[head]]
            assert numbers == pytest.approx(columns[name].tolist(), abs=6e-5)
        assert [bool(name) for name in shown["class"]] == columns["clipped"].tolist()
        if settings is not start:
            view.locator("#reset").click()
        else:
            for name, value in SETTINGS[1].items():
                view.locator(f"#{name}").fill(f"{value:g}")
    view.locator("#language").select_option("zh")
    assert view.locator("h1").text_content() == "动手试试 PPO"
