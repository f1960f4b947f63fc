"""Draws the curves of one or several runs, also of those that are still going on.

python -m hfppo.reporting out/arithmetic
python -m hfppo.reporting runs/* --output comparison
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hfppo.reporting.log_file import group_runs
from hfppo.reporting.picture import NAME, draw


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hfppo.reporting",
        description="Curves of runs. Folders that differ in a trailing seed alone, kl0-seed0 and kl0-seed1, are drawn "
        "as one line, their mean, in a band from the lowest to the highest.",
    )
    parser.add_argument("folders", nargs="+", type=Path, help="output_dir of each run")
    parser.add_argument(
        "--output",
        type=Path,
        help="name of the files, without .html; by default curves, in the folder of a single run",
    )
    args = parser.parse_args(argv)
    output = args.output or (args.folders[0] if len(args.folders) == 1 else Path()) / NAME
    try:
        groups = group_runs(args.folders)
        runs = ", ".join(f"{g.name} ({len(g.logs)} runs)" if len(g.logs) > 1 else g.name for g in groups)
        draw(groups, runs, output)
    except (FileNotFoundError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{output}.html and {output}.png show {runs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
