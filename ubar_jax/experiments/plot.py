"""Pictures of results."""

import collections
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ubar_jax.results import Run

# Okabe and Ito's colours; their lightness differs, and so do markers and dashes, for grey prints.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vP*X"
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 2, 2)))

STYLE = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "savefig.bbox": "tight"}


def worst_accuracy(runs: Sequence[Run], path: str | Path, panels: Sequence[str]) -> None:
    """Worst-node accuracy against rounds: a panel for each setting of `panels`, a line a rule.

    Seeds are averaged; the band spans them.
    """
    grouped = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        setting = tuple(getattr(run.config, name) for name in panels)
        grouped[setting][run.config.rule].append(run)
    names = list(dict.fromkeys(run.config.rule for run in runs))
    columns = min(len(grouped), 4)
    rows = -(-len(grouped) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1 + 2.9 * columns, 0.9 + 2.5 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axis, (setting, lines) in zip(axes.flat, grouped.items(), strict=False):
            for index, name in enumerate(names):
                if name in lines:
                    _line(axis, lines[name], index, name)
            axis.set_title("\n".join(_words(k, v) for k, v in zip(panels, setting, strict=True)))
            axis.set_ylim(0, 1)
        for axis in axes.flat[len(grouped) :]:
            axis.remove()
        for axis in axes[:, 0]:
            axis.set_ylabel("worst benign node's\ntest accuracy")
        for axis in axes[-1]:
            axis.set_xlabel("round")
        handles = {h.get_label(): h for a in axes.flat if a.figure for h in a.get_lines()}
        figure.legend(
            [handles[n] for n in names], names, loc="outside lower center", ncols=min(4, len(names))
        )
        figure.savefig(path, dpi=150)


def _words(name: str, value) -> str:
    """'byzantine_ratio', 0.5 -> 'byzantine ratio 0.5'; a part's name needs no word before it."""
    return f"{name.replace('_', ' ')} {value:g}" if isinstance(value, int | float) else f"{name}: {value}"


def _line(axis, runs: Sequence[Run], index: int, label: str) -> None:
    rounds = runs[0].curves["round"]
    worst = np.stack([run.curves["worst"] for run in runs])
    style = {"color": COLOURS[index % 8], "marker": MARKERS[index % 8], "linestyle": DASHES[index % 8]}
    offset = index % 4 / 4  # markers of close lines must not cover each other
    axis.plot(rounds, worst.mean(0), label=label, markersize=4, markevery=(offset * 0.1, 0.2), **style)
    if len(runs) > 1:
        axis.fill_between(rounds, worst.min(0), worst.max(0), color=style["color"], alpha=0.15, lw=0)
