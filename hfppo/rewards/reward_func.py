"""The contract of reward functions, the same as in TRL's GRPOTrainer.

    func(prompts=…, completions=…, completion_ids=…, **dataset_columns, trainer_state=…, log_extra=…, log_metric=…)
        -> list[float | None] | list[list[float]]

All arguments are passed by keyword. For text prompts the completions are strings, for conversations lists of one
message. One number per completion is its score; with None the completion has no score of this function. A list of
numbers per completion, as long as its `completion_ids`, rewards each token. `async def` functions run concurrently.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerState

from hfppo.sample import Sample, Text

RewardFunc = Callable[..., Any]
Numbers = dict[str, list[float]]  # by name

OWN_COLUMNS = ("prompt", "completion", "completion_ids")  # columns of a dataset that reward functions do not get


@dataclass
class Log:
    """Values that one reward function logs. Each function has its own log, so the order does not depend on speed."""

    columns: dict[str, list[object]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)
    failed: list[bool] | None = None  # whether each completion's reward is a fallback; None if it cannot be one

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Add a column of one value per completion; passed as `log_extra`."""
        self.columns.setdefault(str(column), []).extend(values)

    def metric(self, name: str, value: float) -> None:
        """Add a number to a metric; passed as `log_metric`."""
        self.numbers.setdefault(name, []).append(float(value))


@dataclass(frozen=True)
class RewardBatch:
    """B completions to score."""

    samples: Sequence[Sample]
    tokenizer: PreTrainedTokenizerBase | None = None  # the policy's
    trainer_state: TrainerState | None = None

    @property
    def prompts(self) -> list[Text]:
        """The prompts as text or conversations."""
        return [sample.row.columns["prompt"] for sample in self.samples]

    @property
    def completions(self) -> list[Text]:
        """The completions as text or messages."""
        return [sample.text for sample in self.samples]

    @property
    def completion_ids(self) -> list[list[int]]:
        """The completions' token ids, EOS and the tokens of tools and environments included."""
        return [sample.ids for sample in self.samples]

    @property
    def columns(self) -> dict[str, list[object]]:
        """The dataset's other columns, and the environments."""
        names = [name for name in self.samples[0].row.columns if name not in OWN_COLUMNS]
        columns = {name: [sample.row.columns[name] for sample in self.samples] for name in names}
        if any(sample.environment is not None for sample in self.samples):
            columns["environments"] = [sample.environment for sample in self.samples]
        return columns

    def arguments(self, log: Log) -> dict[str, object]:
        """Return the keywords of the contract."""
        own = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        copies = copy.deepcopy(own)  # a function may change them in place, and training needs them
        logs = {"log_extra": log.extra, "log_metric": log.metric}
        return {**self.columns, **copies, "trainer_state": self.trainer_state, **logs}

    def continuations(self) -> Sequence[Text]:
        """Return the completions as continuations of their prompts' text.

        Some tokenizers decode a completion without the space that it begins with. An assistant's message that the
        prompt has begun is continued too; any other message is text of its own.
        """
        if self.tokenizer is None:
            return self.completions
        return [
            continue_text(sample.text, sample.row.prompt_ids, sample.ids, self.tokenizer)
            if isinstance(prompt, str) or prompt[-1]["role"] == "assistant"
            else sample.text
            for prompt, sample in zip(self.prompts, self.samples, strict=True)
        ]


def continue_text(completion: Text, prompt_ids: list[int], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Return a completion with the text that its tokens add to the text of the prompt.

    A message that is not the text of all tokens, such as one with parsed calls, stays as it is.
    """
    alone, before, whole = tokenizer.batch_decode([ids, prompt_ids, prompt_ids + ids], skip_special_tokens=True)
    added = whole.removeprefix(before) if whole.startswith(before) else alone
    if isinstance(completion, str):
        return added
    first, *others = completion
    return [{**first, "content": added}, *others] if first["content"] == alone else completion


def call_func(func: RewardFunc, batch: RewardBatch, log: Log) -> Any:
    """Call a reward function; the result of an asynchronous one is awaitable."""
    return func.score_batch(batch, log) if isinstance(func, BatchReward) else func(**batch.arguments(log))


class BatchReward:
    """A reward function of this package: it gets more than the contract's keywords, apart from dataset columns."""

    def score_batch(self, batch: RewardBatch, log: Log) -> Any:
        """Return a reward for each completion, or an awaitable of them; by default of the prompts' continuations."""
        return self(batch.prompts, batch.continuations(), **batch.columns)  # type: ignore[operator]


class RewardWrapper(BatchReward):
    """A reward function around another, with the name of `func`; asynchronous if `func` is."""

    func: RewardFunc

    @property
    def name(self) -> str:
        """The name of the innermost function."""
        return plain_name(self)


def unwrap(func: object) -> Any:
    """Return the innermost function of nested wrappers and `functools.partial` objects."""
    while isinstance(func, functools.partial | RewardWrapper):
        func = func.func
    return func


def plain_name(func: object) -> str:
    """Return a function's name, or the class name of a callable object."""
    func = unwrap(func)
    return getattr(func, "__name__", type(func).__name__)


def is_async(func: object) -> bool:
    """Return whether calling it gives a coroutine, also for objects with an async `__call__`."""
    func = unwrap(func)
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def check_output(name: str, output: object, lengths: list[int]) -> list[float | list[float]]:
    """Return a reward function's output as floats or lists of floats, with NaN for None.

    Args:
        name: the function, for the error.
        lengths: tokens of each completion.
    Raises:
        TypeError, ValueError: a wrong type or number of values, or a value that is not finite.
    """
    return [check_reward(name, row, value, lengths[row]) for row, value in enumerate(rows_of(name, output, lengths))]


def rows_of(name: str, output: Any, lengths: list[int]) -> list[Any]:
    """Return a reward function's output as a list with one entry per completion."""
    if hasattr(output, "tolist"):  # a tensor, an array, a pandas Series
        # (B, 1) is read as one score per completion: a model with one label returns it. Token rewards have that shape
        # only if every completion is one token, and both readings then agree.
        output = (output[:, 0] if getattr(output, "ndim", 1) == 2 and output.shape[1] == 1 else output).tolist()
    if not isinstance(output, Sequence) or isinstance(output, str):
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
    if hasattr(value, "tolist") and math.prod(value.shape) != 1:
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
    value = value.item() if hasattr(value, "item") else value  # of NumPy or torch
    if not isinstance(value, Real):
        raise TypeError(f"reward function {name!r}, row {row}: {value!r} is not a number; return None to skip a row")
    number = float(value)
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"reward function {name!r}, row {row}: {number} is not finite; return None to skip a row")
    return number
