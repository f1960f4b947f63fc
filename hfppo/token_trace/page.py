"""Traces as one HTML page that needs nothing else."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hfppo.support.files import write_atomically
from hfppo.token_trace.record import TRACES, Trace, read_traces, recorded

PLACE = "{{traces}}"  # in page.html, once


def page(traces: Sequence[Trace]) -> str:
    """The page that shows the traces. It loads nothing; texts are data in it, never markup."""
    data = json.dumps([trace.to_json() for trace in traces], ensure_ascii=False)
    before, after = files("hfppo.token_trace").joinpath("page.html").read_text(encoding="utf-8").split(PLACE)
    return before + data.replace("<", "\\u003c") + after  # no "</script>" ends the data early


def write_page(output_dir: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run's recorded traces, by default beside them.

    Raises:
        FileNotFoundError: the run has none.
    """
    found = recorded(output_dir)
    if not found:
        raise FileNotFoundError(
            f"{output_dir} has no traces ({TRACES}/*.jsonl); train with callbacks=[TokenTraceCallback()], or "
            "give a checkpoint and a prompt"
        )
    path = Path(output_dir) / TRACES / "index.html" if path is None else Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as aside:
        aside.write_text(page([trace for file in found for trace in read_traces(file)]), encoding="utf-8")
    return path
