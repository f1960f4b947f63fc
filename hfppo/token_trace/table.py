"""The token table: the numbers of actor, reference, reward and critic for each token of one completion."""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hfppo.functional import token_kl
from hfppo.rollout import Rollout
from hfppo.support.printable import escape_control_characters
from hfppo.token_trace.tokens import token_texts

# Fields of a row by their column headings; UPDATE_COLUMNS appear only after the update.
COLUMNS = {
    "logprob": "log π_old",
    "ref_logprob": "log π_ref",
    "kl": "KL",
    "reward": "reward",
    "value": "value",
    "return_": "return",
    "advantage": "advantage",
}
UPDATE_COLUMNS = {"new_logprob": "log π_new", "ratio": "ratio"}


@dataclass(frozen=True)
class TokenRow:
    """One completion token. Log-probs and KL are in nats; None where the run does not have the number, or not yet."""

    token: str
    logprob: float
    ref_logprob: float | None
    kl: float | None
    reward: float | None
    value: float | None
    return_: float | None
    advantage: float | None
    counted: bool = True  # False: the losses leave this token out
    new_logprob: float | None = None  # log π after the last update on the rollout
    ratio: float | None = None  # π_new/π_old
    clipped: bool | None = None  # whether the token is then clipped, so that its gradient is 0


@dataclass(frozen=True)
class TokenTable:
    """One completion of a rollout as a table, which `rich.print` prints."""

    prompt: str
    score: float | None  # None: unknown
    rows: list[TokenRow]

    @classmethod
    def from_rollout(
        cls, rollout: Rollout, index: int, tokenizer: PreTrainedTokenizerBase, kl_estimator: str = "k1"
    ) -> "TokenTable":
        """Return the table of the completion at `index`; `kl_estimator` is that of the run's configuration."""
        kl = None
        if rollout.ref_logprobs is not None:
            kl = token_kl(rollout.old_logprobs, rollout.ref_logprobs, kl_estimator)
        columns = (  # in the order of TokenRow's fields
            rollout.old_logprobs,
            rollout.ref_logprobs,
            kl,
            rollout.rewards,
            rollout.values,
            rollout.returns,
            rollout.advantages,
            rollout.loss_mask,
        )
        length = int(rollout.mask[index].sum())
        numbers = [[None] * length if c is None else c[index, :length].tolist() for c in columns]
        texts = token_texts(rollout.completion_ids[index, :length].tolist(), tokenizer)
        return cls(
            prompt=str(tokenizer.decode(rollout.prompt_ids[index][rollout.prompt_mask[index]])),
            score=float(rollout.scores[index]),
            rows=[TokenRow(text, *row) for text, row in zip(texts, zip(*numbers, strict=True), strict=True)],
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        score = "unknown" if self.score is None else f"{self.score:g}"
        title = Text(f"{escape_control_characters(self.prompt)}   score {score}")
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
        updated = any(row.new_logprob is not None for row in self.rows)
        columns = COLUMNS | UPDATE_COLUMNS if updated else COLUMNS
        table.add_column("token")
        for name in columns.values():
            table.add_column(name, justify="right")
        if updated:
            table.add_column("clipped")
        for row in self.rows:
            numbers = (getattr(row, name) for name in columns)
            cells = ["–" if x is None else f"{x:.4f}" for x in numbers]
            clipped = [{None: "–", True: "yes", False: "no"}[row.clipped]] if updated else []
            table.add_row(
                Text(escape_control_characters(row.token)), *cells, *clipped, style="" if row.counted else "dim"
            )
        yield table
