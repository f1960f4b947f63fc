"""The rows of a rollout or evaluation: each with its prompt, its group and its seeds."""

from collections.abc import Iterable
from dataclasses import replace

from hfppo.data.prompts import Columns, Row
from hfppo.state import ENVIRONMENT_STREAM, EVAL_STREAM, SAMPLING_STREAM, stream_seed

# The streams of random numbers for sampling, and for environments.
TRAINING = (SAMPLING_STREAM,), (ENVIRONMENT_STREAM,)
EVALUATION = (EVAL_STREAM,), (EVAL_STREAM, ENVIRONMENT_STREAM)


def make_rows(
    prompts: Iterable[tuple[int, tuple[Columns, list[int]]]],
    seed: int,
    streams: tuple[tuple[int, ...], tuple[int, ...]],
    completions: int = 1,
) -> list[Row]:
    """Return the completions to make of prompts, a function of seed and position.

    Args:
        prompts: each with its position in the order of prompts.
        streams: `TRAINING` or `EVALUATION`.
        completions: number for each prompt.
    """
    sampling, environment = streams
    return [
        Row(
            *prompt,
            number=number,
            group=position,
            seed=stream_seed(seed, *sampling, number),
            environment_seed=stream_seed(seed, *environment, position) % 2**32,
        )
        for position, prompt in prompts
        for number in range(position * completions, (position + 1) * completions)
    ]


def group_equal_rows(rows: list[Row]) -> list[Row]:
    """Return the rows in groups of equal rows."""
    groups: dict[str, int] = {}
    return [replace(row, group=groups.setdefault(repr((row.prompt_ids, row.columns)), row.group)) for row in rows]
