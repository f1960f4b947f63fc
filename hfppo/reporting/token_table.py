"""The token table: the numbers of actor, reference, reward and critic for each token of one completion."""

from dataclasses import dataclass, field, fields
from typing import Any, Self

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


def column(heading: str) -> Any:
    """Make a field of `TokenRow` that is a column of the table, with its heading."""
    return field(default=None, metadata={"heading": heading})


@dataclass(frozen=True)
class TokenRow:
    """One completion token. Log-probs and KL are in nats; None where the run does not have the number, or not yet.

    The tokens of tools and environments have no number at all.
    """

    token: str
    logprob: float | None = column("log π_old")
    ref_logprob: float | None = column("log π_ref")
    kl: float | None = column("KL")
    reward: float | None = column("reward")
    value: float | None = column("value")
    td_error: float | None = column("δ")  # δ = reward + γ·V(s_{t+1}) − value
    return_: float | None = column("return")
    advantage: float | None = column("advantage")
    turn: int | None = None  # the model's turn, from 1, in a completion of several turns
    conversation: int | None = None  # of an agent's episode, from 0; the first one follows the prompt
    counted: bool = True  # False: the losses leave this token out
    new_logprob: float | None = column("log π_new")  # after the last update on the rollout
    ratio: float | None = column("ratio")  # π_new/π_old
    clipped: bool | None = column("clipped")  # whether the token is then clipped, so that its gradient is 0


COLUMNS = {f.name: f.metadata["heading"] for f in fields(TokenRow) if f.metadata}


@dataclass(frozen=True)
class TokenTable(JupyterMixin):
    """One completion of a rollout as a table: `rich.print` prints it, and a notebook shows it.

    An empty line separates the model's turns. The numbers of a rollout fit in 80 characters; with the numbers after
    the update, the table needs about 100.
    """

    prompt: str
    score: float | None  # None: unknown
    rows: list[TokenRow]

    @classmethod
    def from_rollout(
        cls, rollout: Rollout, index: int, tokenizer: PreTrainedTokenizerBase, kl_estimator: str = "k1"
    ) -> Self:
        """Return the table of the completion at `index`; `kl_estimator` is the run's."""
        old, ref = rollout.old_logprobs, rollout.ref_logprobs
        tensors = {
            "logprob": old,
            "ref_logprob": ref,
            "kl": None if ref is None else token_kl(old, ref, kl_estimator),
            "reward": rollout.rewards,
            "value": rollout.values,
            "td_error": rollout.td_errors,
            "return_": rollout.returns,
            "advantage": rollout.advantages,
            "counted": rollout.loss_mask,
            "conversation": rollout.conversation,
            "turn": None if rollout.context is None else turn_starts(rollout.mask).cumsum(dim=1),
        }
        real = rollout.real[index]
        columns = {name: x[index][real].tolist() for name, x in tensors.items() if x is not None}
        texts = token_texts(rollout.completion_ids[index][real].tolist(), tokenizer)
        rows = []
        for t, sampled in enumerate(rollout.mask[index][real].tolist()):
            numbers = {name: column[t] for name, column in columns.items() if sampled or name == "conversation"}
            rows.append(TokenRow(texts[t], **{"counted": False, **numbers}))
        prompt = tokenizer.decode(rollout.prompt_ids[index][rollout.prompt_mask[index]])
        return cls(str(prompt), float(rollout.scores[index]), rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        score = "unknown" if self.score is None else f"{self.score:g}"
        title = Text(f"{escape_control_characters(self.prompt)}   score {score}")
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        tokens = [Text(escape_control_characters(row.token)) for row in self.rows]
        table.add_column("token", min_width=min(max((token.cell_len for token in tokens), default=0), 12))
        shown = [name for name in COLUMNS if any(getattr(row, name) is not None for row in self.rows)]
        for name in shown:
            table.add_column(COLUMNS[name], justify="right", no_wrap=" " not in COLUMNS[name])
        turn = 1
        for row, token in zip(self.rows, tokens, strict=True):
            if row.turn is not None and row.turn > turn:
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
