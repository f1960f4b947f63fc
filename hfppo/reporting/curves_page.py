"""The curves as one HTML page that needs nothing from elsewhere, on a screen or a phone, light or dark."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hfppo.reporting.log_file import Group
from hfppo.reporting.panels import DARK, LIGHT, Drawn, Line

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 350, 8, 166  # of the axes, in the units of the drawing


def page(drawn: Drawn, title: str, groups: list[Group]) -> str:
    """The whole page; what comes from the run is escaped."""
    steps = [step for _, lines in drawn for line in lines for step in line.series.steps]
    figures = "\n".join(
        f"<figure><figcaption>{escape(panel.title)} <small>{escape(panel.unit)}</small></figcaption>"
        f"{svg(lines, max(steps))}{legend(lines)}</figure>"
        for panel, lines in drawn
    )
    data = [
        [{"steps": line.series.steps, "values": [finite(v) for v in line.series.values]} for line in lines]
        for _, lines in drawn
    ]
    numbers = json.dumps({"last": max(steps), "left": LEFT, "right": RIGHT, "panels": data})  # no text of the run
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}{palette(LIGHT)}@media (prefers-color-scheme: dark) {{{palette(DARK)}}}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>Against optimiser steps, up to step {max(steps)}. Point at a curve to read it.</p>
<main>
{figures}
</main>
<details><summary>All numbers, as last logged</summary><div class="wide">{table(groups)}</div></details>
<script type="application/json" id="data">{numbers}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Axes:
    """From steps and values to places in the drawing."""

    low: float
    high: float
    last_step: int

    def x(self, step: float) -> float:
        """Of a step."""
        return LEFT + (RIGHT - LEFT) * step / max(self.last_step, 1)

    def y(self, value: float) -> float:
        """Of a value."""
        return BOTTOM - (BOTTOM - TOP) * (value - self.low) / (self.high - self.low)

    def points(self, steps: Sequence[int], values: Sequence[float]) -> list[str]:
        """Of a line; what is not finite is left out."""
        pairs = zip(steps, values, strict=True)
        return [f"{self.x(s):.1f},{self.y(v):.1f}" for s, v in pairs if math.isfinite(v)]


def svg(lines: Sequence[Line], last_step: int) -> str:
    """The axes of a panel and what is drawn in them."""
    bounds = [v for line in lines for v in (*line.series.lowest, *line.series.highest) if math.isfinite(v)]
    low, high = (min(bounds), max(bounds)) if bounds else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # rounding is no range to draw
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    ticks = nice_ticks(low, high)
    axes = Axes(ticks[0], ticks[-1], last_step)
    parts = []
    for tick in ticks:
        y = axes.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in nice_ticks(0, max(last_step, 1)):
        if tick <= last_step:
            parts.append(f'<text x="{axes.x(tick):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{tick:.7g}</text>')
    parts += [drawn_line(line, axes) for line in lines]
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def drawn_line(line: Line, axes: Axes) -> str:
    """A line, the band around it, and a dot where it is but one point."""
    series, color = line.series, f"c{line.color}"
    at = axes.points(series.steps, series.values)
    parts = [f'<polyline class="{color}" stroke-dasharray="{line.dashes}" points="{" ".join(at)}"/>']
    if series.lowest != series.highest:
        band = [*axes.points(series.steps, series.lowest), *reversed(axes.points(series.steps, series.highest))]
        parts.insert(0, f'<polygon class="{color}" points="{" ".join(band)}"/>')
    if len(at) == 1:
        x, y = at[0].split(",")
        parts.append(f'<circle class="{color}" cx="{x}" cy="{y}" r="3"/>')
    return "".join(parts)


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from the last at or below `low` to the first at or above `high`, `about` steps apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [n * step for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def legend(lines: Sequence[Line]) -> str:
    """The lines' names and values: the last ones until the pointer says where."""
    items = "".join(
        f'<li><svg viewBox="0 0 24 8"><polyline class="c{line.color}" stroke-dasharray="{line.dashes}" '
        f'points="0,4 24,4"/></svg>{escape(line.label)} <b>{line.series.values[-1]:.4g}</b></li>'
        for line in lines
    )
    return f"<ul>{items}</ul>"


def table(groups: list[Group]) -> str:
    """The last value of every metric, by group."""
    names = dict.fromkeys(name for group in groups for name in group.metrics)
    head = "".join(f"<th>{escape(group.name)}</th>" for group in groups)
    rows = []
    for name in names:
        series = [group.series(name) for group in groups]
        cells = "".join(f"<td>{s.values[-1]:.4g}</td>" if s.steps else "<td>–</td>" for s in series)
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def finite(value: float) -> float | None:
    """JSON knows no NaN."""
    return value if math.isfinite(value) else None


def palette(colors: Sequence[str]) -> str:
    return "".join(f".c{n} {{ stroke: {c}; --own: {c}; }}\n" for n, c in enumerate(colors))


STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --rule: #d8dee4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b3; --paper: #14181d; --rule: #30363d; }
}
body { margin: 1rem auto; max-width: 80rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; }
p, small, figure text { color: var(--soft); fill: var(--soft); }
main { display: grid; gap: 1.2rem 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
small { font-weight: 400; }
figure > svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
text { font-size: 11px; }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
polygon { fill: var(--own); opacity: 0.22; stroke: none; }
circle { fill: var(--own); }
.grid { stroke: var(--rule); }
.cursor { stroke: var(--soft); visibility: hidden; }
ul { display: flex; flex-wrap: wrap; gap: 0 0.9rem; list-style: none; margin: 0 0 0 0.6rem; padding: 0;
  font-size: 0.8rem; }
li { overflow-wrap: anywhere; }
li svg { width: 1.6rem; height: 0.5rem; margin-right: 0.3rem; }
b { font-variant-numeric: tabular-nums; }
details { margin: 1.5rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { padding: 0.1rem 0.8rem 0.1rem 0; text-align: left; font-weight: 400; border-bottom: 1px solid var(--rule); }
td { font-variant-numeric: tabular-nums; }
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("figure").forEach((figure, n) => {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const values = figure.querySelectorAll("b"), steps = data.panels[n].flatMap(line => line.steps);
  const show = (x, step) => {
    cursor.style.visibility = x === null ? "hidden" : "visible";
    if (x !== null) { cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); }
    data.panels[n].forEach((line, i) => {
      const at = step === null ? line.values.length - 1 : line.steps.indexOf(step), value = line.values[at];
      values[i].textContent = value == null ? "–" : Number(value.toPrecision(4)) + (x === null ? "" : " @ " + step);
    });
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 360;
    const asked = (x - data.left) / (data.right - data.left) * data.last;
    const step = steps.reduce((a, b) => Math.abs(b - asked) < Math.abs(a - asked) ? b : a);
    show(data.left + (data.right - data.left) * step / Math.max(data.last, 1), step);
  });
  svg.addEventListener("pointerleave", () => show(null, null));
});
"""
