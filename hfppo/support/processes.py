"""What all processes of a run must have alike."""

import socket
from collections.abc import Mapping

from accelerate.utils import gather_object


def check_alike(facts: Mapping[str, object]) -> None:
    """Raise if a fact differs between processes; a collective call.

    Args:
        facts: values by name; a missing one counts as None.
    Raises:
        ValueError: a fact differs; on all processes.
    """
    (host, first), *others = gather_object([(socket.gethostname(), dict(facts))])
    for process, (other, found) in enumerate(others, 1):
        for name in {**first, **found}:
            if (here := first.get(name)) != (there := found.get(name)):
                raise ValueError(
                    f"{name} is {here!r:.300} on process 0 ({host}), but {there!r:.300} on process {process} "
                    f"({other}); give all processes the same: the trainer itself shares the rows out among them"
                )
