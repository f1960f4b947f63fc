"""The contract of reward functions, that of TRL's GRPOTrainer.

    func(prompts=…, completions=…, completion_ids=…, **dataset_columns, trainer_state=…, log_extra=…, log_metric=…)
        -> list[float | None] | list[list[float]]

All arguments are passed by keyword. For text prompts the completions are strings, for conversations lists of one
message. One number per completion is its score; None leaves the function out for that row. A list of numbers per
completion, as long as its `completion_ids`, rewards each token. `async def` functions run concurrently.
"""

import copy
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

RewardFunc = Callable[..., Any]


@dataclass(frozen=True)
class Private:
    """Data about a batch beyond the contract, for the package's own reward functions.

    A function that uses it has a method `call_privately`, which gets it as its only positional argument: among the
    keywords, a column of the dataset might have its name.
    """

    continuations: Sequence[Any] | None = None  # the completions as they continue their prompts; None: as they are
    episodes: Sequence[Any] = ()  # of tools and environments
    log_failures: Callable[[list[bool]], None] | None = None  # takes whether each reward is a fallback

    def rows(self, some: slice) -> "Private":
        """Return the data about some of the rows, without `log_failures`."""
        continuations = None if self.continuations is None else self.continuations[some]
        return Private(continuations, self.episodes[some])


def with_private(func: RewardFunc, private: Private) -> RewardFunc:
    """Return a function that takes the contract's keywords only."""
    call = getattr(func, "call_privately", None)
    return func if call is None else functools.partial(call, private)


class RewardWrapper:
    """A reward function around another one; it takes over that one's name, and is async if that one is."""

    func: RewardFunc


def unwrap(func: RewardFunc) -> RewardFunc:
    """Return the innermost function of nested wrappers and `functools.partial` objects."""
    while isinstance(func, functools.partial | RewardWrapper):
        func = func.func
    return func


def remove_wrappers(func: RewardFunc) -> RewardFunc:
    """Return the function inside nested wrappers; a `functools.partial` is kept, with the arguments it binds."""
    while isinstance(func, RewardWrapper):
        func = func.func
    return func


def plain_name(func: RewardFunc) -> str:
    """Return a function's name, or the class name of a callable object."""
    func = unwrap(func)
    return getattr(func, "__name__", type(func).__name__)


def is_async(func: RewardFunc) -> bool:
    """Return whether calling it gives a coroutine, also for objects with an async `__call__`."""
    func = unwrap(func)
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def bound_names(func: RewardFunc) -> set[str]:
    """Return the parameters that have a value already, such as `self`: a keyword of that name cannot be passed."""
    if isinstance(func, functools.partial):
        inner, given = func.func, len(func.args)
    elif inspect.ismethod(func):
        return first_parameters(func.__func__, 1)
    elif inspect.isroutine(func) or inspect.isclass(func):
        return set()
    else:
        return first_parameters(type(func).__call__, 1)
    return bound_names(inner) | first_parameters(inner, given)


def first_parameters(func: Callable[..., Any], count: int) -> set[str]:
    """Return the names of the first parameters that may be passed by keyword."""
    try:
        parameters = list(inspect.signature(func).parameters.values())[:count]
    except ValueError:  # some builtins have no signature
        return set()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}


def copy_values(value: Any) -> Any:
    """Return a copy of lists, dictionaries, arrays and tensors at any depth; other objects are shared.

    A reward function may change its arguments in place, and no other function must see that.
    """
    if type(value) is dict:
        return {key: copy_values(inner) for key, inner in value.items()}
    if type(value) is list:
        return [copy_values(inner) for inner in value]
    return copy.deepcopy(value) if isinstance(value, np.ndarray | Tensor) else value


class Log:
    """Values that one reward function logs. Each function has its own log, so the order does not depend on speed."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.numbers: dict[str, list[float]] = {}
        self.failed: list[bool] | None = None

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column of one value per completion; passed as `log_extra`."""
        self.columns.setdefault(column, []).extend(values)

    def metric(self, name: str, value: float) -> None:
        """Add a number to a metric; passed as `log_metric`."""
        self.numbers.setdefault(name, []).append(float(value))

    def failures(self, failed: list[bool]) -> None:
        """Note for each completion whether its reward is a fallback; for wrappers only."""
        self.failed = failed


def columns_of(logs: dict[str, Log], rows: int) -> dict[str, list[Any]]:
    """Return the columns of all logs; where two functions use one name, the function's name is added.

    Raises:
        ValueError: a column has more or fewer values than there are completions; names it and its function.
    """
    uses = Counter(column for log in logs.values() for column in log.columns)
    columns = {}
    for name, log in logs.items():
        for column, values in log.columns.items():
            if len(values) != rows:
                raise ValueError(
                    f"reward function {name!r} passed {len(values)} values for {rows} completions to log_extra as "
                    f"{column!r}; pass one each"
                )
            columns[column if uses[column] == 1 else f"{column} ({name})"] = values
    return columns


def merge_logs(logs: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Concatenate the lists of each name."""
    result: dict[str, list[Any]] = {}
    for log in logs:
        for name, values in log.items():
            result.setdefault(name, []).extend(values)
    return result


def check_output(name: str, output: Any, lengths: list[int]) -> list[float | list[float]]:
    """Return a reward function's output as floats or lists of floats, with NaN for None.

    Args:
        name: the function, for the error.
        lengths: tokens of each completion.
    Raises:
        TypeError, ValueError: a wrong type or number of values, or a value that is not finite; names function and row.
    """
    return [check_reward(name, row, value, lengths[row]) for row, value in enumerate(rows_of(name, output, lengths))]


def rows_of(name: str, output: Any, lengths: list[int]) -> list[Any]:
    """Return a reward function's output as a list with one entry per completion."""
    if hasattr(output, "tolist"):  # a tensor, an array, a pandas Series
        # (B, 1) are the logits of a model with one label; for completions of one token both readings are the same.
        output = (output[:, 0] if getattr(output, "ndim", 1) == 2 and output.shape[1] == 1 else output).tolist()
    is_list = isinstance(output, Sequence)
    if not is_list or isinstance(output, str):
        raise TypeError(f"reward function {name!r} returned {type(output).__name__}; return a list of numbers")
    values = list(output)
    if len(values) != len(lengths):
        raise ValueError(
            f"reward function {name!r} returned {len(values)} rewards for {len(lengths)} completions; return one each"
        )
    return values


def check_reward(name: str, row: int, value: Any, length: int) -> float | list[float]:
    """Return one reward as a float, or as a list with a float per token."""
    if value is None:
        return math.nan
    if hasattr(value, "tolist") and getattr(value, "ndim", 1) == 1 and len(value) != 1:
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != length:
            raise ValueError(
                f"reward function {name!r}, row {row}: {len(value)} token rewards for {length} completion tokens; "
                "return one per entry of completion_ids"
            )
        return [check_number(name, row, x) for x in value]
    return check_number(name, row, value)


def check_number(name: str, row: int, value: Any) -> float:
    """Return a number that is finite in float32, as a float."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"reward function {name!r}, row {row}: {value!r} is not a number; return None to skip a row")
    number = float(value)
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"reward function {name!r}, row {row}: {number} is not finite; return None to skip a row")
    return number
