"""Show the numbers of actor, reference, reward and critic for each token of a completion.

    python -m hfppo.token_trace out "请问1+1=2？" --score 1               the last checkpoint of a run
    python -m hfppo.token_trace out/checkpoint-120 "请问1+1=2？" --completion "不对，等于3！" --score 0

docs/traces.md explains the columns.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

import rich
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hfppo.config import PPOConfig
from hfppo.reporting.run_page import render_page, run_data
from hfppo.reporting.traces import Trace
from hfppo.token_trace.from_checkpoint import trace_prompt


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hfppo.token_trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", help="the output folder of a run, or one of its checkpoints")
    add("prompt", help="the prompt, as in the dataset")
    add("--critic_prompt", help="what the critic reads in place of the prompt, if it was trained so")
    add("--score", type=float, help="score of the completion; without it, reward, return and advantage are unknown")
    add("--completion", help="trace this completion instead of sampling one")
    add("--seed", type=int, help="sample another completion; by default the run's seed")
    add("--chat", action="store_true", help="the prompt is a user's message, for the chat template")
    add("--base", help="id or path of the base, if it is not where the adapter says")
    add("--ref_model", help="id or path of the reference, if it was not the base")
    add("--html", type=Path, metavar="FILE", help="write a page that shows the same")
    return parser


def describe_trace(trace: Trace, args: PPOConfig, ref_model: str | None) -> list[str]:
    """Return the lines below a table."""
    lines = [
        f"step {trace.step}, rollout {trace.rollout}: β = {trace.kl_coef:g}, γ = {args.gamma:g}, λ = {args.lam:g}"
    ]
    if trace.columns["ref_logprob"][0] is not None:
        reference = ref_model or "the base with the adapter disabled"
        lines.append(f"reference: {reference}; if the run had another, give --ref_model")
    if trace.score is None:
        lines.append("reward, return and advantage need a score: add --score 1, say")
    if trace.truncated:
        lines.append("the completion was cut by max_completion_length")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors in its arguments or files end it with one line."""
    options = vars(make_parser().parse_args(arguments))
    folder, html = options.pop("folder"), options.pop("html")
    try:
        trace, args = trace_prompt(folder, **options)
        rich.print(trace, *describe_trace(trace, args, options["ref_model"]), sep="\n")
        if html is not None:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(render_page([run_data(folder, [trace])]), encoding="utf-8")
            print(html)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # characters that the terminal lacks
    # Show only the table and this package's own warnings, not the output of loading a model.
    set_verbosity_error()
    disable_progress_bar()
    logging.basicConfig(level=logging.ERROR, format="warning: %(message)s")
    logging.getLogger("hfppo").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    main()
