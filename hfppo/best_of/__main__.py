"""Sample completions of a prompt, and show them ranked by the critic, with the value before each token.

    python -m hfppo.best_of out "请问12+7=20？" -n 8
    python -m hfppo.best_of me/sums "请问12+7=20？" -n 8

docs/critic.md explains the numbers.
"""

import argparse
import logging
import sys
import warnings

import rich
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hfppo.best_of.value_ranker import Ranked, ValueRanker
from hfppo.support.printable import escape_control_characters


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hfppo.best_of", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", help="output folder or checkpoint of PPOTrainer, or the id of a repository it was pushed to")
    add("prompt", help="the prompt, as it would stand in the dataset")
    add("-n", type=int, default=8, help="completions to sample (%(default)s)")
    add("--max_completion_length", type=int, default=256, help="of a completion, in tokens (%(default)s)")
    add("--temperature", type=float, default=1.0, help="that of the run (%(default)s)")
    add("--seed", type=int, default=0, help="of the draws (%(default)s)")
    add("--chat", action="store_true", help="the prompt is a user's message, for the chat template")
    return parser


def make_table(ranked: list[Ranked]) -> Table:
    """Return a table of completions, with the value before each token."""
    table = Table("value", "log π per token", "completion, with the value before each token", show_lines=True)
    for one in ranked:
        text = Text()
        for token, value in zip(one.tokens, one.values, strict=True):
            text.append(escape_control_characters(token, {"\n": "⏎"}), "bold")
            text.append(f" {value:.2f}  ", "dim")
        table.add_row(f"{one.value:.3f}", f"{one.mean_logprob:.3f}", text)
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors in its arguments or files end it with one line."""
    options = vars(make_parser().parse_args(arguments))
    folder, prompt, chat = options.pop("folder"), options.pop("prompt"), options.pop("chat")
    try:
        ranker = ValueRanker.from_pretrained(folder)
        ranked = ranker.best_of([{"role": "user", "content": prompt}] if chat else prompt, **options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    rich.print(make_table(ranked))


if __name__ == "__main__":
    # Show only the table and this package's own warnings, not what loading a model prints.
    set_verbosity_error()
    disable_progress_bar()
    logging.basicConfig(level=logging.ERROR, format="warning: %(message)s")
    logging.getLogger("hfppo").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    main()
