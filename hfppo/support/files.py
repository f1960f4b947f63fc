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


def write_atomically(file: Path, text: str) -> None:
    """Write a temporary file and put it in the place of `file`; half characters become "?"."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"_{file.name}")  # a push to the Hub ignores names with _
    try:
        aside.write_text(text, encoding="utf-8", errors="replace")
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
