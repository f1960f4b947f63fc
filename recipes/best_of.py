"""Sample several completions of a prompt, and show them ranked by the critic that a run has saved.

    python recipes/best_of.py out/arithmetic "请问12+7=20？" -n 8 --max_completion_length 12
    python recipes/best_of.py me/sums "请问12+7=20？" -n 8

The value of a completion is the critic's prediction before the last token, when all but the end has been read.
docs/critic.md says when ranking by it helps. PPO-MCTS, arXiv:2309.15028, uses the value of every token.
"""

import argparse
import sys
import tempfile
from typing import Any

import rich
from rich.table import Table
from rich.text import Text

from hfppo import PPOConfig, PPOTrainer, TokenTable


def load_run(folder: str, **settings: Any) -> PPOTrainer:
    """Return a trainer with the actor and the critic of a run, to complete prompts with and not to train.

    Args:
        folder: an output folder or a checkpoint, or the id of a repository.
        settings: of PPOConfig, such as `temperature`.
    """
    return PPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),  # no score is needed
        args=PPOConfig(output_dir=tempfile.mkdtemp(), report_to="none", kl_coef=0.0, disable_tqdm=True, **settings),
        critic=folder,
    )


def best_of(trainer: PPOTrainer, prompt: str | list[dict[str, str]], n: int) -> list[TokenTable]:
    """Sample n completions of a prompt, and return their numbers, the highest value first.

    The draws follow from the trainer's seed; completion i is the same for every n.
    """
    rollout = trainer.rollout([prompt] * n)
    tables = [TokenTable.from_rollout(rollout, i, trainer.processing_class) for i in range(n)]
    return sorted(tables, key=lambda table: table.rows[-1].value, reverse=True)


def show(tables: list[TokenTable]) -> Table:
    """Return a table of completions, with the value before each token."""
    shown = Table("value", "log π per token", "completion, with the value before each token", show_lines=True)
    for table in tables:
        text = Text()
        for row in table.rows:
            text.append(row.token, "bold")
            text.append(f" {row.value:.2f}  ", "dim")
        logprob = sum(row.logprob for row in table.rows) / len(table.rows)
        shown.add_row(f"{table.rows[-1].value:.3f}", f"{logprob:.3f}", text)
    return shown


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", help="output folder or checkpoint of PPOTrainer, or the id of a repository it was pushed to")
    add("prompt", help="the prompt, as in the dataset")
    add("-n", type=int, default=8, help="completions to sample (%(default)s)")
    add("--chat", action="store_true", help="the prompt is a user's message, for the chat template")
    add("--max_completion_length", type=int, default=256, help="in tokens (%(default)s)")
    add("--temperature", type=float, default=1.0, help="the run's (%(default)s)")
    add("--critic_layers", type=int, help="the run's (all)")
    add("--seed", type=int, default=0, help="of the draws (%(default)s)")
    settings = vars(parser.parse_args(arguments))
    folder, prompt, n, chat = (settings.pop(name) for name in ("folder", "prompt", "n", "chat"))
    trainer = load_run(folder, **settings)
    rich.print(show(best_of(trainer, [{"role": "user", "content": prompt}] if chat else prompt, n)))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # characters that the terminal lacks
    main()
