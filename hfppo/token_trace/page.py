"""The HTML page of token traces: one file that needs nothing else."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from hfppo.support.files import write_atomically
from hfppo.token_trace.record import TRACES, Trace, list_trace_files, read_traces


def render_page(traces: Iterable[Trace]) -> str:
    """Return the page that shows the traces. It loads nothing else. Texts are data, never markup."""
    template = files("hfppo.token_trace").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment()
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.from_string(template).render(traces=[trace.to_json() for trace in traces])


def write_page(output_dir: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run's recorded traces and return its path, by default `index.html` next to the traces.

    Raises:
        FileNotFoundError: the run has no traces.
    """
    found = list_trace_files(output_dir)
    if not found:
        raise FileNotFoundError(
            f"{output_dir} has no traces ({TRACES}/*.jsonl); train with callbacks=[TokenTraceCallback()], or "
            "give a checkpoint and a prompt"
        )
    path = Path(output_dir) / TRACES / "index.html" if path is None else Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary:
        temporary.write_text(render_page(t for file in found for t in read_traces(file)), encoding="utf-8")
    return path
