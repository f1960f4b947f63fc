"""Print reports, none of which ends a run."""

import io
import logging
import sys
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a script may have replaced it by an object without `isatty`."""
    return getattr(stream, "isatty", bool)()


def show(prints: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call a function that prints, while the progress bar is cleared.

    From then on stdout replaces characters that it cannot encode. An error of a stream, such as a closed pipe, becomes
    a warning.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with tqdm.external_write_mode():
            prints(*args, **kwargs)
    except (OSError, ValueError) as error:
        logger.warning("a report could not be printed; training continues: %s", error)
