"""The token table: what actor, reference, reward and critic put out for one completion, token by token."""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hfppo.functional import token_kl
from hfppo.rollout import Rollout


@dataclass(frozen=True)
class TokenRow:
    """One completion token. Log-probabilities and KL in nats; None where the run has no reference or no critic."""

    token: str
    logprob: float
    ref_logprob: float | None
    kl: float | None
    reward: float
    value: float | None
    return_: float | None
    advantage: float


@dataclass(frozen=True)
class TokenTable:
    """One completion of a rollout, made readable; `rich.print` shows it."""

    prompt: str
    score: float
    rows: list[TokenRow]

    @classmethod
    def from_rollout(
        cls, rollout: Rollout, index: int, tokenizer: PreTrainedTokenizerBase, kl_estimator: str = "k1"
    ) -> "TokenTable":
        """The table of the completion at `index`."""
        kl = None
        if rollout.ref_logprobs is not None:
            kl = token_kl(rollout.old_logprobs, rollout.ref_logprobs, kl_estimator)
        columns = (
            rollout.old_logprobs,
            rollout.ref_logprobs,
            kl,
            rollout.rewards,
            rollout.values,
            rollout.returns,
            rollout.advantages,
        )
        length = int(rollout.mask[index].sum())
        numbers = [[None] * length if c is None else c[index, :length].tolist() for c in columns]
        ids = rollout.completion_ids[index, :length].tolist()
        return cls(
            prompt=str(tokenizer.decode(rollout.prompt_ids[index][rollout.prompt_mask[index]])),
            score=float(rollout.scores[index]),
            rows=[
                TokenRow(str(tokenizer.decode([i])), *row)
                for i, row in zip(ids, zip(*numbers, strict=True), strict=True)
            ],
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(
            title=Text(f"{self.prompt}   score {self.score:g}"),
            title_justify="left",
            box=SIMPLE_HEAD,
            collapse_padding=True,
        )
        table.add_column("token")
        for name in ("log π_old", "log π_ref", "KL", "reward", "value", "return", "advantage"):
            table.add_column(name, justify="right")
        for row in self.rows:
            numbers = list(vars(row).values())[1:]
            table.add_row(Text(row.token), *("–" if x is None else f"{x:.4f}" for x in numbers))
        yield table
