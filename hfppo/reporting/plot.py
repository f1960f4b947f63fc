"""Draw the curves of a run as a picture."""

import math
from fnmatch import filter as match_names
from pathlib import Path

from transformers import TrainerCallback

from hfppo.support.files import ignore_write_errors, write_atomically
from hfppo.support.log_entries import numbers_of

PICTURE = "curves.png"

# Title of a panel: patterns of the metrics in it.
PANELS = {
    "Score [per completion]": ("reward", "eval_reward", "eval_*_reward"),
    "Reward functions [unweighted]": ("rewards/*/mean",),
    "KL to the reference [nats per token]": ("kl", "kl_k3"),
    "β": ("kl_coef",),
    "Length [tokens]": ("completions/mean_length", "completions/max_length"),
    "Cut or not scored [share]": ("completions/truncated_frac", "unscorable_frac"),
    "Entropy [nats per token]": ("policy/entropy",),
    "Clipped [share of tokens]": ("policy/clip_frac", "policy/clip_frac_low", "policy/clip_frac_high"),
    "Clipped by PPO epoch [share of tokens]": ("clip/epoch_?/frac",),
    "Size of the update [nats per token]": ("policy/approx_kl", "clip/epoch_?/approx_kl"),
    "Policy loss [score]": ("policy/loss",),
    "Value loss [score²]": ("value/loss",),
    "Values and returns [score]": ("value/mean", "value/return"),
    "Explained variance [1 is perfect]": ("value/explained_variance",),
    "Expected score of prompts": ("candidates/chosen", "candidates/passed_over"),
    "Score by fifth of the expected one": ("candidates/calibration_?",),
    "Scores that teach [share]": ("candidates/signal_chosen", "candidates/signal_uniform", "candidates/spread"),
    "Gradient norm": ("grad_norm", "value/grad_norm"),
    "Learning rate": ("learning_rate", "critic_learning_rate"),
    "Throughput [tokens per second]": ("time/tokens_per_second",),
    "Time [seconds per rollout]": (
        *("time/rollout", "time/generation", "time/passes", "time/rewards"),
        *("time/update", "time/candidates"),
    ),
}
LEGEND_LINE = 0.11  # share of a panel's height


class PlotCallback(TrainerCallback):
    """Draw the curves of the run into `curves.png` in the output folder when training ends. On by default."""

    def on_train_end(self, args, state, control, **kwargs):
        """Draw the whole log history; no picture if no metric of a panel was logged."""
        history = [numbers_of(entry) for entry in state.log_history]
        panels = select_panels(history)
        if state.is_world_process_zero and panels:
            file = Path(args.output_dir) / PICTURE
            with ignore_write_errors(file), write_atomically(file) as temporary:
                draw_panels(panels, history, file.absolute().parent.name, temporary)


def select_panels(history: list[dict[str, float]]) -> dict[str, list[str]]:
    """Return the logged metrics of each panel, by its title; empty panels are left out."""
    logged = list(dict.fromkeys(name for entry in history for name in entry))
    found = {title: [n for p in patterns for n in match_names(logged, p)] for title, patterns in PANELS.items()}
    return {title: names for title, names in found.items() if names}


def draw_panels(panels: dict[str, list[str]], history: list[dict[str, float]], title: str, file: Path) -> None:
    """Write the panels as a PNG, each metric against optimizer steps.

    Raises:
        OSError: the file cannot be written.
    """
    # Imported late, because it needs half a second; not pyplot, which chooses a backend for the user's own figures.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with rc_context({"text.parse_math": False, "font.size": 8}):  # a dollar in a name is a dollar
        figure = Figure(figsize=(4.2 * columns, 2.6 * rows + 0.6))
        FigureCanvasAgg(figure)
        # Margins in inches over the size. A layout engine is slower: it measures every label.
        width, height = figure.get_size_inches()
        figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.7 / height, wspace=0.2, hspace=0.35)
        figure.suptitle(title, y=1 - 0.2 / height)
        for number, (panel, names) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, number)
            axes.set_title(panel, loc="left", y=1.0)
            axes.grid(alpha=0.3)
            axes.ticklabel_format(useOffset=False)
            axes.locator_params(nbins=5)
            for name in names:
                points = [(entry["step"], entry[name]) for entry in history if name in entry]
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 3 else "", label=name)
            if len(names) > 1:
                lines = math.ceil(len(names) / 2)
                low, high = axes.get_ylim()
                axes.set_ylim(low, low + (high - low) / (1 - LEGEND_LINE * lines))  # room above the curves
                axes.legend(loc="upper left", fontsize="small", ncols=2, borderaxespad=0.2, frameon=False)
            if number > len(panels) - columns:
                axes.set_xlabel("optimizer step")
        figure.savefig(file, pil_kwargs={"compress_level": 1})
