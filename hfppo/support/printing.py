"""Print reports, none of which ends a run."""

import logging
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a script may have replaced it by an object without `isatty`."""
    return getattr(stream, "isatty", bool)()


def show(prints: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call a function that prints, while the progress bar is cleared.

    An error of a stream, such as a closed pipe or a character that it cannot encode, becomes a warning.
    """
    try:
        with tqdm.external_write_mode():
            prints(*args, **kwargs)
    except (OSError, ValueError) as error:
        logger.warning("a report could not be printed; training continues: %s", error)
