"""Where the completions of a rollout go with `log_completions`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from helpers.runs import Keep, count_digits
from hfppo import PrintCompletionsCallback
from hfppo.reporting.completions import cell_text, make_column


def with_extras(completions, log_extra=None, **kwargs):
    log_extra("mixed", [1, "two"] * (len(completions) // 2))
    log_extra("mixed lists", [[1, "two"]] * len(completions))
    return count_digits(completions)


def test_each_rollout_leaves_a_table_in_the_output_folder(make_trainer):
    keep = Keep()
    trainer = make_trainer({"log_completions": True}, reward_funcs=with_extras, callbacks=[keep])  # two rollouts
    trainer.train()
    folder = Path(trainer.args.output_dir) / "completions"
    assert sorted(p.name for p in folder.iterdir()) == ["completions_00000.parquet", "completions_00004.parquet"]
    second = pd.read_parquet(folder / "completions_00004.parquet")
    names = ["prompt", "completion", "with_extras", "mixed", "mixed lists", "score", "advantage"]
    assert list(second) == ["step", *names]
    assert second["step"].tolist() == [4] * 8
    assert second["completion"].tolist() == keep.transcripts[1].completions
    assert second["prompt"].tolist() == keep.transcripts[1].prompts
    assert second["score"].tolist() == keep.rollouts[1].scores.tolist()
    assert second["mixed"].tolist() == ["1", "two"] * 4
    assert second["mixed lists"].tolist() == ["[1, 'two']"] * 8


@pytest.mark.parametrize("rows", [0, 3])
def test_as_many_completions_are_printed_as_were_asked_for(make_trainer, capsys, rows):
    callback = PrintCompletionsCallback(num_completions=rows)
    make_trainer({"max_steps": 1}, reward_funcs=lambda completions, **_: [0.25] * 8, callbacks=[callback]).train()
    assert capsys.readouterr().out.count(" 0.25 ") == 2 * rows  # the function's and the total


def test_the_printed_table_has_score_and_advantage_and_a_dash_for_none(make_trainer, capsys, monkeypatch):
    """With rloo an advantage is the score less the other completion's: 1 − 0.5, 0.5 − 1; 0 without another."""

    def first(completions, **kwargs):
        return [1.0, 0.5, None, 0.25, None, None, 0.0, 0.0]

    def second(completions, **kwargs):
        return [1.0, None, None, None, None, None, 3.0, 3.0]

    monkeypatch.setenv("COLUMNS", "200")
    config = {"max_steps": 1, "log_completions": True, "advantage_estimator": "rloo", "num_generations": 2}
    config |= {"kl_coef": 0.0, "reward_weights": [1.0, 0.0]}
    make_trainer(config, reward_funcs=[first, second]).train()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[2:] for row in rows if len(row) == 6 and row[-1]] == [
        ["1", "1", "1", "0.5"],
        ["0.5", "–", "0.5", "-0.5"],
        ["–", "–", "–", "–"],
        ["0.25", "–", "0.25", "0"],
        ["–", "–", "–", "–"],
        ["–", "–", "–", "–"],
        ["0", "3", "0", "0"],
        ["0", "3", "0", "0"],
    ]


def test_what_a_function_is_called_takes_no_column_from_another(make_trainer):
    def score(completions, log_extra=None, **kwargs):
        log_extra("prompt", ["mine"] * len(completions))
        log_extra("score", ["text"] * len(completions))
        return count_digits(completions)

    keep = Keep()
    config = {"log_completions": True, "max_steps": 1, "missing_eos_penalty": 1.0}
    trainer = make_trainer(config, reward_funcs=score, callbacks=[keep])
    trainer.train()
    table = pd.read_parquet(Path(trainer.args.output_dir) / "completions/completions_00000.parquet")
    assert list(table) == ["step", "prompt", "completion", "score_", "prompt_", "score__", "score", "advantage"]
    assert table["score"].tolist() == keep.rollouts[0].scores.tolist()
    assert table["score_"].tolist() == keep.transcripts[0].scores["score"]
    assert table["score_"].tolist() != table["score"].tolist()
    assert table["prompt"].tolist() == keep.transcripts[0].prompts


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "the sky"}}}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0.123456, "0.1235"),
        ("2+2?", "2+2?"),
        ([{"role": "assistant", "content": "4"}], "4"),
        ([{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}], "system: Add.\nuser: 2+2?"),
        ([{"role": "assistant", "content": "", "tool_calls": [CALL]}], "look(at='the sky')"),
        (
            [{"role": "assistant", "content": "Hm.", "tool_calls": [CALL, {"name": "wait"}]}],
            "Hm.\nlook(at='the sky')\nwait()",
        ),
        ([], "[]"),
        ([1, "two"], "[1, 'two']"),
    ],
)
def test_conversations_are_printed_as_text(value, wanted):
    assert cell_text(value) == wanted


@pytest.mark.parametrize("column", [[1, "a"], ["a", 1], [[1, "a"]], [2**70], [1j], [{}], [{"a": {}}], [[{}]]])
def test_what_a_table_cannot_hold_becomes_text(column):
    assert make_column(column) == [str(x) for x in column]


def test_half_a_character_is_written_as_its_number():
    assert make_column(["\ud800!", "请👩\u200d🚀"]) == ["\\ud800!", "请👩\u200d🚀"]


@pytest.mark.parametrize(("asked", "report_to"), [(True, ["trackio"]), (True, []), (False, ["trackio"])])
def test_trackers_that_are_reported_to_get_the_table_if_it_is_asked_for(make_trainer, monkeypatch, asked, report_to):
    logged = []
    tracker = SimpleNamespace(log=logged.append, Table=lambda dataframe: ("table", len(dataframe)))
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    trainer = make_trainer({"max_steps": 1, "log_completions": asked})
    trainer.args.report_to = report_to  # after Trainer has set up its own, which would start the real one
    trainer.train()
    tables = [entry for entry in logged if "completions" in entry]
    assert tables == [{"completions": ("table", 8)}] * (asked * len(report_to))
    assert (Path(trainer.args.output_dir) / "completions").exists() is asked
