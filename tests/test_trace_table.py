"""The token table of one completion, from the worked example of the docs."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.nn.functional import pad

from hfppo import Rollout
from hfppo.functional import gae
from hfppo.reporting.token_table import HEADINGS
from hfppo.token_trace import TokenTable

TOKENS = "请问1+1=2？", "是的等于2！"  # without the comma, so that 6 rewards stand on 6 tokens
REWARDS = torch.tensor([[-0.01, -0.01, -0.01, -0.01, -0.01, 0.99]])
VALUES = torch.tensor([[0.85, 0.88, 0.90, 0.93, 0.96, 0.99]])
TD_ERRORS = [0.0112, 0.0010, 0.0107, 0.0104, 0.0101, 0.0000]  # −0.01 + 0.99 · 0.88 − 0.85 = 0.0112


@pytest.fixture
def rollout(tokenizer) -> Rollout:
    """One completion of six tokens behind two columns of padding on the left and one on the right."""
    prompt, completion = (torch.tensor([tokenizer(text)["input_ids"]]) for text in TOKENS)
    mask = torch.ones(1, 6, dtype=torch.bool)
    advantages, returns = gae(REWARDS, VALUES, mask, gamma=0.99, lam=0.95)
    td_errors = torch.tensor([TD_ERRORS])
    logprobs = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]])
    ref = torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]])

    of_tokens = {
        **{"completion_ids": completion, "mask": mask, "loss_mask": mask, "rewards": REWARDS, "values": VALUES},
        **{"rollout_logprobs": logprobs, "old_logprobs": logprobs, "ref_logprobs": ref, "td_errors": td_errors},
        **{"advantages": advantages, "returns": returns},
    }
    return Rollout(
        prompt_ids=pad(prompt, (2, 0)),
        prompt_mask=pad(torch.ones_like(prompt, dtype=torch.bool), (2, 0)),
        truncated=torch.tensor([False]),
        scores=torch.tensor([1.0]),
        **{name: pad(x, (0, 1)) for name, x in of_tokens.items()},
    )


def test_token_table_of_the_worked_example(rollout, tokenizer):
    table = TokenTable.from_rollout(rollout, 0, tokenizer)
    assert (table.prompt, table.score) == ("请问1+1=2？", 1.0)
    assert "".join(row.token for row in table.rows) == "是的等于2！"
    assert [row.kl for row in table.rows] == pytest.approx([0.03, 0.02, 0.03, 0.02, 0.03, 0.01], abs=1e-6)
    advantages = [0.03816, 0.02866, 0.02942, 0.01990, 0.01010, 0.0]
    assert [row.td_error for row in table.rows] == pytest.approx(TD_ERRORS, abs=1e-6)
    assert [row.advantage for row in table.rows] == pytest.approx(advantages, abs=6e-6)
    for row in table.rows:
        assert row.return_ == pytest.approx(row.value + row.advantage, abs=1e-6)


def test_table_in_a_terminal_of_80_columns(rollout, tokenizer):
    console = Console(file=io.StringIO(), width=80)
    table = TokenTable.from_rollout(rollout, 0, tokenizer)
    console.print(replace(table, columns=table.columns | {"kl": [-x for x in table.columns["kl"]]}))
    text = console.file.getvalue()
    assert "请问1+1=2？" in text
    assert "score 1" in text
    heads, first = (next(x for x in text.splitlines() if x.strip().startswith(word)) for word in ("token", "是"))
    assert heads.split()[-6:] == ["KL", "reward", "value", "δ", "return", "advantage"]
    assert first.split() == ["是", "-0.1200", "-0.1500", "-0.0300", "-0.0100", "0.8500", "0.0112", "0.8882", "0.0382"]
    assert "…" not in text


def test_turns_in_a_terminal_of_80_columns():
    numbers = {"logprob": -4.5123, "ref_logprob": -14.5, "kl": -0.0321, "reward": -0.0003, "value": -0.5123}
    numbers |= {"td_error": -0.2345, "return_": -1.2345, "advantage": -0.3345}
    end = "<|im_end|>"
    columns = {name: [numbers.get(name)] * 2 + [None] + [numbers.get(name)] for name in HEADINGS}
    columns |= {"token": [end, end, "see", end], "turn": [1, 1, None, 2], "counted": [True, True, False, True]}
    console = Console(file=io.StringIO(), width=80)
    console.print(TokenTable(prompt="Play.", score=1.0, columns=columns))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    row = ["<|im_end|>", "-4.5123", "-14.5000", "-0.0321", "-0.0003", "-0.5123", "-0.2345", "-1.2345", "-0.3345"]
    assert lines[-6:] == [row, row, ["see", *"––––––––"], [], row, []]


def test_table_in_a_notebook(rollout, tokenizer):
    table = TokenTable.from_rollout(rollout, 0, tokenizer)
    odd = {"token": ["<b>\x1b[2J"] * 6, "counted": [False] * 6, "value": [0.5] * 5 + [None]}
    table = replace(table, prompt="1<2?", columns=table.columns | odd)
    shown = table._repr_mimebundle_([], [])["text/html"]
    assert "1&lt;2?" in shown
    assert "&lt;b&gt;" in shown
    assert "–" in shown
    assert "\x1b" not in shown


def test_table_without_reference_and_critic(rollout, tokenizer):
    bare = replace(rollout, ref_logprobs=None, values=None, td_errors=None, returns=None)
    rows = TokenTable.from_rollout(bare, 0, tokenizer).rows
    assert {(row.ref_logprob, row.kl, row.value, row.td_error, row.return_) for row in rows} == {(None,) * 5}
