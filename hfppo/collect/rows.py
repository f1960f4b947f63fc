"""The rows of a rollout or evaluation: each with its prompt, its group and its seeds."""

from collections.abc import Iterable
from dataclasses import replace

from hfppo.config import PPOConfig
from hfppo.data.prompt_stream import PromptStream
from hfppo.data.prompts import Prompts, Row
from hfppo.state import ENVIRONMENT_STREAM, EVAL_STREAM, SAMPLING_STREAM, stream_seed


def prompt_rows(prompts: Prompts | PromptStream, positions: range, args: PPOConfig) -> list[Row]:
    """Return the first completion of each prompt at positions of the order, a function of seed and position."""
    numbers = [position * args.num_generations for position in positions]
    return [
        Row(
            *prompt,
            number=number,
            group=position,
            seed=stream_seed(args.seed, SAMPLING_STREAM, number),
            environment_seed=stream_seed(args.seed, ENVIRONMENT_STREAM, position) % 2**32,
        )
        for number, position, prompt in zip(numbers, positions, prompts.at(positions, args.seed), strict=True)
    ]


def all_completions(rows: Iterable[Row], args: PPOConfig) -> list[Row]:
    """Return all completions of prompts, given the first one of each."""
    return [
        replace(row, number=number, seed=stream_seed(args.seed, SAMPLING_STREAM, number))
        for row in rows
        for number in range(row.number, row.number + args.num_generations)
    ]


def eval_rows(prompts: Prompts, seed: int) -> list[Row]:
    """Return a row for each prompt, with the same seeds in every evaluation."""
    return [
        Row(
            *prompts[n],
            number=n,
            group=n,
            seed=stream_seed(seed, EVAL_STREAM, n),
            environment_seed=stream_seed(seed, EVAL_STREAM, ENVIRONMENT_STREAM, n) % 2**32,
        )
        for n in range(len(prompts))
    ]


def group_equal_rows(rows: list[Row]) -> list[Row]:
    """Return the rows in groups of equal rows."""
    groups: dict[str, int] = {}
    return [replace(row, group=groups.setdefault(repr((row.prompt_ids, row.columns)), row.group)) for row in rows]
