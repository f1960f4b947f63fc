"""Write files that training does not need: log, picture, traces and completions."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def ignore_write_errors(file: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a warning: failing to write this file must not stop training."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written; training continues: %s", file, error)


@contextmanager
def write_atomically(file: Path) -> Iterator[Path]:
    """Write atomically: yield a temporary path that replaces `file` on success and is removed on failure."""
    aside = file.with_name(f"_{file.name}")  # a push to the Hub ignores names with _
    try:
        yield aside
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
