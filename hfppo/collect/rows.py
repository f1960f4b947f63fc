"""The rows of a rollout or evaluation: each with its prompt, its group and its seeds."""

from dataclasses import replace

from hfppo.config import PPOConfig
from hfppo.data.prompt_stream import PromptStream
from hfppo.data.prompts import Prompts, Row
from hfppo.state import ENVIRONMENT_STREAM, EVAL_STREAM, SAMPLING_STREAM, stream_seed


def training_rows(prompts: Prompts | PromptStream, first: int, args: PPOConfig) -> list[Row]:
    """Return one process's rows of a rollout, a function of the seed and of their numbers.

    Args:
        first: number of the first row among all completions of the run.
    """
    numbers = range(first, first + args.rollout_size_per_process)
    groups = range(first // args.num_generations, numbers.stop // args.num_generations)
    prompts_by_group = dict(zip(groups, prompts.at(groups, args.seed), strict=True))
    return [
        Row(
            *prompts_by_group[group],
            number=number,
            group=group,
            seed=stream_seed(args.seed, SAMPLING_STREAM, number),
            environment_seed=stream_seed(args.seed, ENVIRONMENT_STREAM, group) % 2**32,
        )
        for number in numbers
        for group in [number // args.num_generations]
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
