"""Print reports. Whatever stdout and stderr are, a report ends no run."""

import io
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
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
        with ExitStack() as restored, redirect_stdout(stdout), tqdm.external_write_mode():
            if isinstance(stdout, io.TextIOWrapper):
                restored.callback(stdout.reconfigure, errors=stdout.errors)
                stdout.reconfigure(errors="replace")
            prints(*args, **kwargs)
    except (OSError, ValueError) as error:
        logger.warning("a report could not be printed; training continues: %s", error)
