"""Terminals and locales of any kind: a report is printed with replacements, and ends no run."""

import io
import sys

import pytest
import rich

from helpers.processes import run_python
from hfppo import TokenTable
from hfppo.support.printing import is_terminal, show

RUN = """
import sys
from datasets import Dataset
from helpers.runs import small_trainer
from hfppo import TokenTraceCallback
import hfppo.reporting.progress as progress

progress.LINE_EVERY = 0.0
real, mode = sys.__stdout__, sys.argv[1]
if mode == "none":
    sys.stdout = sys.stderr = None
data = Dataset.from_dict({"prompt": ["请问1+1=？"] * 8})
config = {"disable_tqdm": False, "log_completions": True, "max_steps": 2}
config |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
callbacks = [TokenTraceCallback()]
given = {"callbacks": callbacks, "compute_metrics": lambda p: {"好": "字"}}
trainer = small_trainer(sys.argv[2], config, train_dataset=data, eval_dataset=data.select(range(2)), **given)
trainer.train()
real.write("TRAINED\\n")
real.flush()
"""
ASCII = {"PYTHONIOENCODING": "ascii"}
LOCALE = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}  # files too


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "environment"), [("plain", ASCII | LOCALE), ("none", {})])
def test_a_run_ends_whatever_it_prints_to(tmp_path, mode, environment):
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    done = run_python(tmp_path / "run.py", mode, tmp_path / "out", **environment)
    assert done.stdout.endswith("TRAINED\n"), done.stderr[-2000:]
    if mode == "plain":
        assert "step 1  reward" in done.stdout
        assert "??1+1=?" in done.stdout  # a prompt of the printed completions


class Ascii(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


def test_a_token_table_replaces_what_a_terminal_cannot_show(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Ascii())
    columns = {"token": ["好"], "logprob": [-0.5], "ref_logprob": [-0.5], "counted": [True]}
    rich.print(TokenTable(prompt="请问", score=1.0, columns=columns))
    assert "-0.5000" in sys.stdout.text()
    assert "??   score 1" in sys.stdout.text()


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError("nobody reads")


def test_a_character_that_stdout_lacks_is_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Ascii())
    show(print, "β")
    assert sys.stdout.text() == "?\n"


def test_a_stream_that_takes_nothing_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdout", Broken())
    show(print, "text")
    assert "nobody reads" in caplog.text


def test_streams_without_isatty_are_no_terminals():
    assert not any(map(is_terminal, (None, object(), io.StringIO())))
