"""Files beside a run: its log, curves, traces and completions."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def expendable(file: Path) -> Iterator[None]:
    """Inside, a file is written or removed that no run should end for; where it cannot be, a warning says so."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written; the run goes on: %s", file, error)
