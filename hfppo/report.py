"""Put the pages of several runs beside each other, or show all traces of one.

    python -m hfppo.report out/a out/b out/c --html report.html

Runs that differ in the seed alone are drawn as thin lines and their mean.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfppo.reporting.run_page import PAGE, read_page, render_page
from hfppo.reporting.traces import list_trace_files, read_traces


def collect_runs(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the pages of the output folders have; of several runs without completions.

    Raises:
        OSError: a folder has no page.
        ValueError: a file is not the page of a run.
    """
    runs = [{**run, "name": folder} for folder in folders for run in read_page(Path(folder) / PAGE)]
    if len(runs) > 1:
        return [{**run, "traces": []} for run in runs]
    recorded = [vars(trace) for file in list_trace_files(folders[0]) for trace in read_traces(file)]
    return [{**runs[0], "traces": recorded or runs[0]["traces"]}]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; errors in its arguments or files end it with one line."""
    parser = argparse.ArgumentParser(
        "python -m hfppo.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="output_dir", help=f"a run's output folder, with its {PAGE}")
    parser.add_argument("--html", default="report.html", metavar="FILE", help="where to write; default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        Path(options.html).write_text(render_page(collect_runs(options.folders)), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(options.html)


if __name__ == "__main__":
    main()
