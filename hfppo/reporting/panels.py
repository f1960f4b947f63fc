"""What the curves of a run show: panels, and the lines in them."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from hfppo.reporting.log_file import Group, Series

# After Okabe and Ito, told apart by the colour-blind too, on white and on black; each line has its own dashes as well.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b5588d", "#a87400", "#2b8cbe")
DARK = ("#56b4e9", "#e8853d", "#2fc79b", "#dd9bc1", "#f0c75e", "#b3dcf5")
DASHES = ("", "5 2", "1.5 1.5", "7 2 1.5 2", "3 1", "1 1")


@dataclass(frozen=True)
class Panel:
    """One set of axes: what it shows, its unit, and the metrics, of which several runs show the first alone."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    least: int = 1  # metrics that make it worth showing


PANELS = (
    Panel("Score", "per completion", ("reward", "eval_reward", "eval_*_reward")),
    Panel("Reward functions", "unweighted", ("rewards/*/mean",), least=2),
    Panel("KL to the reference", "nats per token", ("kl", "kl_k3")),
    Panel("β", "", ("kl_coef",)),
    Panel("Length", "tokens", ("completions/mean_length", "completions/max_length")),
    Panel("Cut or not scored", "share", ("completions/truncated_frac", "unscorable_frac")),
    Panel("Entropy", "nats per token", ("policy/entropy",)),
    Panel("Clipped", "share of tokens", ("policy/clip_frac", "policy/clip_frac_low", "policy/clip_frac_high")),
    Panel("Size of the update", "nats per token", ("policy/approx_kl",)),
    Panel("Policy loss", "score", ("policy/loss",)),
    Panel("Value loss", "score²", ("value/loss",)),
    Panel("Values and returns", "score", ("value/mean", "value/return")),
    Panel("Explained variance", "1 is perfect", ("value/explained_variance",)),
    Panel("Gradient norm", "", ("grad_norm", "value/grad_norm")),
    Panel("Learning rate", "", ("learning_rate", "critic_learning_rate")),
    Panel("Throughput", "tokens per second", ("time/tokens_per_second",)),
    Panel(
        "Time",
        "seconds per rollout",
        ("time/rollout", "time/generation", "time/passes", "time/rewards", "time/update"),
    ),
)


@dataclass(frozen=True)
class Line:
    """A line of a panel."""

    label: str
    series: Series
    style: int

    @property
    def color(self) -> int:
        """Which of the colours of light or dark it has."""
        return self.style % len(LIGHT)

    @property
    def dashes(self) -> str:
        """On and off, in widths of the line; empty for a line without gaps."""
        return DASHES[(self.style + self.style // len(LIGHT)) % len(DASHES)]


Drawn = list[tuple[Panel, list[Line]]]


def panels(groups: list[Group]) -> Drawn:
    """The panels that have something to show, and their lines: the metrics of one run, or one metric of several."""
    drawn = []
    alone = len(groups) == 1
    for panel in PANELS:
        lines = []
        title = panel.title
        for group in groups:
            found = [name for pattern in panel.metrics for name in group.metrics if fnmatchcase(name, pattern)]
            if len(found) < panel.least:
                continue
            for name in found if alone else found[:1]:
                lines.append((name if alone else group.name, group.series(name)))
                title = panel.title if alone else name
        lines = [(label, series) for label, series in lines if series.steps]
        if lines:
            drawn.append((replace(panel, title=title), [Line(*line, style) for style, line in enumerate(lines)]))
    return drawn
