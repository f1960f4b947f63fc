"""Log entries with values of any kind: reports take the numbers and leave the rest alone."""

import json
from collections.abc import Mapping
from typing import Any

from transformers.trainer_utils import denumpify_detensorize


def plain_entry(entry: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a log entry as JSON has it: numbers of NumPy and torch as Python's, other objects and names as text."""
    named = {str(name): denumpify_detensorize(value) for name, value in entry.items()}
    return json.loads(json.dumps(named, default=str, skipkeys=True))


def numbers_of(entry: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numbers of a log entry, without text, lists, dictionaries and None."""
    return {name: value for name, value in plain_entry(entry).items() if isinstance(value, int | float)}
