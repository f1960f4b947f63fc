"""Errors as tables: a message for each fault, and whether the fault is there."""

from collections.abc import Mapping


def raise_first(faults: Mapping[str, object]) -> None:
    """Raise ValueError with the first message whose condition is true."""
    for message, is_there in faults.items():
        if is_there:
            raise ValueError(message)
