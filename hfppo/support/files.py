"""Files beside a run: its log, curves, traces and completions."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def ignore_write_errors(file: Path) -> Iterator[None]:
    """Inside, a file is written or removed that no run should end for; where it cannot be, a warning says so."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written; the run goes on: %s", file, error)


@contextmanager
def write_atomically(file: Path) -> Iterator[Path]:
    """Inside, a file is written under the path that is given; afterwards it has its name, or is as it was."""
    aside = file.with_name(f"_{file.name}")  # a push leaves it out, and so is not surprised that it vanishes
    try:
        yield aside
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
