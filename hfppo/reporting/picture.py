"""The curves of a run, or of several beside each other, as a picture and a page."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfppo.reporting.curves_page import page
from hfppo.reporting.log_file import Group
from hfppo.reporting.panels import LIGHT, Drawn, Line, Panel, panels
from hfppo.support.files import expendable, whole

NAME = "curves"  # of both files, in the output folder


class PlotCallback(TrainerCallback):
    """Draws the curves into the output folder. On by default.

    The page `curves.html` at every checkpoint and at the end; the picture `curves.png` at the end, if matplotlib is
    installed.
    """

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """The page so far."""
        self._draw(args, state, picture=False)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """The page and the picture."""
        self._draw(args, state, picture=find_spec("matplotlib") is not None)

    def _draw(self, args: TrainingArguments, state: TrainerState, picture: bool) -> None:
        name = Path(args.output_dir).absolute().name
        groups = [Group(name, [state.log_history])]
        if state.is_world_process_zero and panels(groups):
            output = Path(args.output_dir) / NAME
            with expendable(output):
                draw(groups, name, output, picture)


def draw(groups: list[Group], title: str, output: Path, picture: bool = True) -> None:
    """Write `output`.html and, for a picture, `output`.png.

    Raises:
        ImportError: matplotlib is missing; the page is there all the same.
        ValueError: nothing has been logged.
    """
    drawn = panels(groups)
    if not drawn:
        raise ValueError(f"{title}: nothing has been logged yet; come back later, or lower logging_steps")
    with whole(output.parent / f"{output.name}.html") as aside:
        aside.write_text(page(drawn, title, groups), encoding="utf-8")
    if picture:
        draw_picture(drawn, title, output.parent / f"{output.name}.png", named=len(groups) > 1)


def draw_picture(drawn: Drawn, title: str, file: Path, named: bool) -> None:
    """Write the panels as a PNG; a single line has a name as well if several runs are drawn.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{file.name} needs matplotlib: pip install matplotlib, or hfppo[plot]. {file.stem}.html is there without."
        ) from error
    columns = min(3, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.6 * rows + 0.6), dpi=100)
    FigureCanvasAgg(figure)
    # In inches; a layout that measures the labels would take as long as the drawing.
    width, height = figure.get_size_inches()
    figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.7 / height, wspace=0.2, hspace=0.35)
    figure.suptitle(title, y=1 - 0.2 / height)
    for number, (panel, lines) in enumerate(drawn, start=1):
        axes = figure.add_subplot(rows, columns, number)
        draw_panel(axes, panel, lines, named or len(lines) > 1)
        if number > len(drawn) - columns:
            axes.set_xlabel("optimiser step", fontsize=8)
    with whole(file) as aside:  # compressed less: a tenth larger than by default, in a fifth less time
        figure.savefig(aside, pil_kwargs={"compress_level": 1})


def draw_panel(axes: Any, panel: Panel, lines: list[Line], named: bool) -> None:
    """Draw a panel into a set of axes of matplotlib's."""
    axes.set_title(f"{panel.title} [{panel.unit}]" if panel.unit else panel.title, fontsize=10, loc="left", y=1.0)
    axes.tick_params(labelsize=8)
    axes.locator_params(nbins=5)
    axes.ticklabel_format(useOffset=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for line in lines:
        series, color = line.series, LIGHT[line.color]
        dashes = tuple(float(x) for x in line.dashes.split())
        marker = "." if len(series.steps) < 3 else ""
        style = (0, dashes) if dashes else "-"
        axes.plot(series.steps, series.values, color=color, ls=style, lw=1.4, marker=marker, label=line.label)
        if series.lowest != series.highest:
            axes.fill_between(series.steps, series.lowest, series.highest, color=color, alpha=0.2, lw=0)
    if named:
        columns = 1 if len(lines) < 3 else 2
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.12 * (high - low) * math.ceil(len(lines) / columns))  # its place
        axes.legend(fontsize=7, frameon=False, loc="upper right", ncols=columns, borderaxespad=0)
