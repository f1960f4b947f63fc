"""python -m hfppo.token_trace: what a checkpoint says about a prompt, or the page of a run's recorded traces."""

import argparse
import logging
import sys
import warnings
from pathlib import Path

import rich
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hfppo.config import PPOConfig
from hfppo.token_trace.from_checkpoint import Question, trace_prompt
from hfppo.token_trace.page import page, write_page
from hfppo.token_trace.record import Trace

DESCRIPTION = """\
What actor, reference, reward and critic put out for a prompt, token by token.

  python -m hfppo.token_trace out/checkpoint-120 "请问1+1=2？" --score 1
  python -m hfppo.token_trace out/checkpoint-120 "请问1+1=2？" --completion "不对，等于3！" --score 0
  python -m hfppo.token_trace out --html traces.html          what TokenTraceCallback has recorded
"""
COLUMNS = """\
columns:
  log π_old   log-probability of the token under the checkpoint's actor, in nats; 0 is certain, -2.3 is one in ten
  log π_ref   the same under the reference, which is the base without the adapter
  KL          log π_old - log π_ref, by the run's kl_estimator
  reward      -β·KL, and on the last token the score as well
  value       what the critic expects from this token on, before it sees the token
  return      what the value would be fitted to
  advantage   above 0 an update would make the token likelier; not whitened here, so it is the plain estimate
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m hfppo.token_trace", None, DESCRIPTION, COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("folder", help="a checkpoint of PPOTrainer; without a prompt, the output folder of a run")
    made.add_argument("prompt", nargs="?", help="the prompt, as it would stand in the dataset")
    made.add_argument(
        "--score",
        type=float,
        help="the score that the completion is taken to get; without it, reward, return and advantage stay unknown",
    )
    made.add_argument("--completion", help="look at this completion instead of sampling one")
    made.add_argument("--seed", type=int, help="sample another completion; by default the run's seed")
    made.add_argument("--chat", action="store_true", help="the prompt is a user's message, for the chat template")
    made.add_argument("--base", help="id or path of the base, if it is not where the adapter says")
    made.add_argument("--ref_model", help="id or path of the reference, if the run had another one than its base")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows the same")
    return made


def explained(trace: Trace, args: PPOConfig, question: Question) -> list[str]:
    """What stands below a table."""
    lines = [
        f"step {trace.step}, rollout {trace.rollout}: β = {trace.kl_coef:g}, γ = {args.gamma:g}, λ = {args.lam:g}"
    ]
    reference = question.ref_model or "the base with the adapter disabled"
    if trace.table.rows[0].ref_logprob is not None:
        lines.append(f"reference: {reference}; if the run had another, give --ref_model")
    if question.score is None:
        lines.append("reward, return and advantage need a score: add --score 1, say")
    if not args.needs_critic:
        lines.append(f"{args.advantage_estimator} has no critic; one completion alone may have no advantage")
    if trace.truncated:
        lines.append("the completion was cut by max_completion_length")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Run the command; an error that the user can mend ends it with one line."""
    options = vars(parser().parse_args(arguments))
    folder, html = options.pop("folder"), options.pop("html")
    try:
        if html is not None and html.is_dir():  # before the work that the page would be lost after
            raise ValueError(f"--html {html} is a folder; give a file in it, such as {html / 'traces.html'}")
        if options["prompt"] is None:
            print(write_page(folder, html))
            return
        question = Question(**options)
        trace, args = trace_prompt(folder, question)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    rich.print(trace.table, *explained(trace, args, question), sep="\n")
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page([trace]), encoding="utf-8")
        print(html)


if __name__ == "__main__":
    # Only the table is to be seen, and our own warnings: loading a model says much that is of no use here.
    set_verbosity_error()
    disable_progress_bar()
    logging.basicConfig(level=logging.ERROR, format="warning: %(message)s")
    logging.getLogger("hfppo").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    main()
