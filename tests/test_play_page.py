"""docs/play.html computes an update again, in the browser, as `hfppo.functional` does."""

import json
import re
from pathlib import Path

import pytest
import torch

import hfppo
from hfppo import functional as F

PAGE = Path(hfppo.__file__).parent.parent / "docs/play.html"
OF_THE_RUN = json.loads(re.search(r"const completions = (.*?);\n", PAGE.read_text(encoding="utf-8"))[1])
BY_HAND = {  # the six tokens of docs/worked_example.md
    "logprob": [-0.12, -0.08, -0.15, -0.10, -0.05, -0.02],
    "ref_logprob": [-0.15, -0.10, -0.18, -0.12, -0.08, -0.03],
    "new_logprob": [-0.04, -0.06, -0.08, -0.02, -0.04, -0.02],
    "value": [0.85, 0.88, 0.90, 0.93, 0.96, 0.99],
    "new_value": [0.87, 0.89, 0.92, 0.94, 0.97, 0.99],
}
COMPLETIONS = [BY_HAND, *({**of_run, "new_value": of_run["value"]} for of_run in OF_THE_RUN)]
VERY_WRONG = {**BY_HAND, "logprob": [-4.0] * 6}  # tokens that have become far more likely
OFF = {"whiten": False, "dual": False, "grpo": False, "others": "0, 0, 1"}
SETTINGS = [
    {**OFF, "score": 1.0, "beta": 0.01, "gamma": 0.99, "lam": 0.95, "clip": 0.2, "update": 1.0},
    {**OFF, "score": 0.0, "beta": 1.0, "gamma": 0.9, "lam": 0.0, "clip": 0.05, "update": 3.0},
    {**OFF, "score": 0.3, "beta": 0.5, "gamma": 0.55, "lam": 1.0, "clip": 0.5, "update": 0.0},
    {**OFF, "score": 1.0, "beta": 0.1, "gamma": 1.0, "lam": 0.5, "clip": 0.05, "update": 2.0}
    | {"whiten": True, "dual": True},
    {**OFF, "score": 0.0, "beta": 0.0, "gamma": 1.0, "lam": 0.95, "clip": 0.2, "update": 3.0}
    | {"grpo": True, "dual": True},
]


def expected(completion: dict, settings: dict) -> dict[str, torch.Tensor]:
    """The same columns, (T,) each, by the package."""
    old, ref, new, values, new_values = (
        torch.tensor([completion[name]], dtype=torch.float64)
        for name in ("logprob", "ref_logprob", "new_logprob", "value", "new_value")
    )
    mask = torch.ones(old.shape, dtype=torch.bool)
    gamma, clip = settings["gamma"], settings["clip"]
    kl = F.token_kl(old, ref, "k1")
    rewards = F.token_rewards(torch.tensor([settings["score"]], dtype=torch.float64), kl, mask, settings["beta"])
    advantages, returns = F.gae(rewards, values, mask, gamma, settings["lam"])
    following = torch.cat([values[:, 1:], torch.zeros(1, 1)], dim=1)
    if settings["grpo"]:
        others = [float(score) for score in settings["others"].split(",")]
        group = torch.zeros(1 + len(others), old.shape[1], dtype=torch.float64)
        group[0], group[1:, -1] = rewards[0], torch.tensor(others, dtype=torch.float64)
        same = torch.zeros(len(group), dtype=torch.long)
        advantages = F.grpo(group, torch.ones_like(group, dtype=torch.bool), same)[:1]
    if settings["whiten"]:
        advantages = F.whiten(advantages, mask)
    now = (old + settings["update"] * (new - old)).clamp(max=0)
    loss = F.policy_loss(now, old, advantages, F.Clip(clip, clip, 3.0 if settings["dual"] else None))
    clipped = F.clip_fractions(now, old, advantages, F.Clip(clip, clip, 3.0 if settings["dual"] else None))
    predicted = values + settings["update"] * (new_values - values)
    value_loss = F.value_loss(predicted, returns)
    columns = {"kl": kl, "reward": rewards, "advantage": advantages, "returns": returns, "loss": loss}
    columns |= {"delta": rewards + gamma * following - values, "value_loss": value_loss}
    columns |= {"ratio": (now - old).exp(), "clipped": clipped.low | clipped.high | clipped.dual}
    return {name: column[0] for name, column in columns.items()}


def test_the_page_names_no_address():
    assert re.findall(r"https?://|url\(|@import|src=", PAGE.read_text(encoding="utf-8")) == []


@pytest.mark.browser
def test_the_page_computes_what_the_package_computes(open_page):
    view = open_page(PAGE)
    cases = [[completion, settings] for completion in (*COMPLETIONS, VERY_WRONG) for settings in SETTINGS]
    found = view.evaluate("cases => cases.map(([completion, settings]) => compute(completion, settings))", cases)
    for case, columns in zip(cases, found, strict=True):
        for name, column in expected(*case).items():
            assert columns[name] == pytest.approx(column.tolist(), abs=1e-6), (name, case)
