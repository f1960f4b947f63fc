"""The token table: the numbers of actor, reference, reward and critic for each token of one completion."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hfppo.functional import token_kl, turn_starts
from hfppo.reporting.token_texts import token_texts
from hfppo.rollout import Rollout
from hfppo.support.printable import escape_control_characters

# Names and headings of the numbers. Log-probs and KL are in nats, δ = reward + γ·V(s_{t+1}) − value.
HEADINGS = {
    "logprob": "log π_old",
    "ref_logprob": "log π_ref",
    "kl": "KL",
    "reward": "reward",
    "value": "value",
    "td_error": "δ",
    "return_": "return",
    "advantage": "advantage",
    "new_logprob": "log π_new",  # after the last update on the rollout
    "ratio": "ratio",  # π_new/π_old
    "clipped": "clipped",  # whether the token is then clipped, so that its gradient is 0
}


@dataclass(frozen=True, kw_only=True)
class TokenTable(JupyterMixin):
    """One completion of a rollout as a table: `rich.print` prints it, and a notebook shows it.

    An empty line separates the model's turns. The numbers of a rollout fit in 80 characters; with the numbers after
    the update, the table needs about 100.

    `columns` has a list by tokens for each name: "token", the text; those of `HEADINGS`, None where the run does not
    have the number, or not yet, and for the tokens of tools and environments; "counted", whether the losses count the
    token; in a completion of several turns "turn", the model's turn from 1; and in an agent's episode "conversation",
    from 0, the first one after the prompt.
    """

    prompt: str
    score: float | None  # None: unknown
    columns: dict[str, list]

    @classmethod
    def from_rollout(
        cls, rollout: Rollout, index: int, tokenizer: PreTrainedTokenizerBase, kl_estimator: str = "k1"
    ) -> Self:
        """Return the table of the completion at `index`; `kl_estimator` is the run's."""
        real, old, ref = rollout.real[index], rollout.old_logprobs, rollout.ref_logprobs
        sampled = rollout.mask[index][real].tolist()
        numbers = {
            "logprob": old,
            "ref_logprob": ref,
            "kl": None if ref is None else token_kl(old, ref, kl_estimator),
            "reward": rollout.rewards,
            "value": rollout.values,
            "td_error": rollout.td_errors,
            "return_": rollout.returns,
            "advantage": rollout.advantages,
            "turn": None if rollout.context is None else turn_starts(rollout.mask).cumsum(dim=1),
        }
        columns = {
            "token": token_texts(rollout.completion_ids[index][real].tolist(), tokenizer),
            **{name: [None] * len(sampled) for name in HEADINGS},
            **{name: mask_context(sampled, x[index][real].tolist()) for name, x in numbers.items() if x is not None},
            "counted": rollout.loss_mask[index][real].tolist(),
        }
        if rollout.conversation is not None:
            columns["conversation"] = rollout.conversation[index][real].tolist()
        prompt = tokenizer.decode(rollout.prompt_ids[index][rollout.prompt_mask[index]])
        return cls(prompt=str(prompt), score=float(rollout.scores[index]), columns=columns)

    @property
    def rows(self) -> list[SimpleNamespace]:
        """The tokens one by one, each with its entries of the columns as attributes."""
        tokens = zip(*self.columns.values(), strict=True)
        return [SimpleNamespace(**dict(zip(self.columns, token, strict=True))) for token in tokens]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        score = "unknown" if self.score is None else f"{self.score:g}"
        title = Text(f"{escape_control_characters(self.prompt)}   score {score}")
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        tokens = [Text(escape_control_characters(token)) for token in self.columns["token"]]
        table.add_column("token", min_width=min(max((token.cell_len for token in tokens), default=0), 12))
        shown = [name for name in HEADINGS if any(x is not None for x in self.columns.get(name, []))]
        for name in shown:
            table.add_column(HEADINGS[name], justify="right", no_wrap=" " not in HEADINGS[name])
        turn = 1
        for token, row in zip(tokens, self.rows, strict=True):
            if (getattr(row, "turn", None) or turn) > turn:
                table.add_section()
                turn = row.turn
            cells = [format_cell(getattr(row, name)) for name in shown]
            table.add_row(token, *cells, style="" if row.counted else "dim")
        # Measured in a wide terminal, since a measured width never exceeds the terminal's.
        if Measurement.get(console, options.update(max_width=1000), table).minimum > options.max_width:
            table.padding = 0
        for segment in console.render(table, options):  # without characters that the terminal cannot show
            yield segment._replace(text=segment.text.encode(options.encoding, "replace").decode(options.encoding))


def format_cell(value: float | bool | None) -> str:
    """Return a number of a row as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4f}"


def mask_context(sampled: list[bool], numbers: list) -> list:
    """Return the numbers of the tokens that the model sampled, and None for the others."""
    return [x if is_own else None for x, is_own in zip(numbers, sampled, strict=True)]
