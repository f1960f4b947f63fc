"""Print reports. Whatever stdout and stderr are, a report ends no run."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a script may have replaced it by an object without `isatty`."""
    return getattr(stream, "isatty", bool)()


def show(prints: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call a function that prints, while the progress bar is cleared.

    Characters that stdout cannot encode are replaced. Without a stdout its text is dropped. An error of a stream, such
    as a closed pipe, becomes a warning.
    """
    stdout = io.StringIO() if getattr(sys.stdout, "closed", True) else sys.stdout
    try:
        with replace_unknown_characters(stdout), redirect_stdout(stdout), tqdm.external_write_mode():
            prints(*args, **kwargs)
    except (OSError, ValueError) as error:
        logger.warning("a report could not be printed; training continues: %s", error)


@contextmanager
def replace_unknown_characters(stream: TextIO) -> Iterator[None]:
    """Let a stream replace the characters that its encoding lacks, in place of an error."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    errors = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        stream.reconfigure(errors=errors)
