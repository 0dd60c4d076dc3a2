"""The benchmark's figures, each as PNG and PDF, as wide as a column of text."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ubar_jax.experiments.bench.growth import AXES
from ubar_jax.experiments.bench.scenes import ROUND
from ubar_jax.experiments.bench.tables import ALONE, OURS, PAPER, Table
from ubar_jax.experiments.plot import COLOURS, DASHES, MARKERS, STYLE

WIDTH = 3.5  # inches
SMALL = STYLE | {"font.size": 7, "axes.titlesize": 7, "legend.fontsize": 6.5, "axes.labelsize": 7}
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {  # label and style
    OURS: ("ubar_jax", {"marker": "o", "color": COLOURS[0]}),
    ALONE: ("ubar_jax, one device", {"marker": "o", "color": COLOURS[0], "markerfacecolor": "white"}),
    "tuned": ("tuned torch (number: times ours)", {"marker": "x", "color": COLOURS[1], "mew": 1.5}),
    "loop": ("torch loop", {"marker": "s", "color": COLOURS[2], "markerfacecolor": "white"}),
}


def draw_tables(tables: dict[str, Table], unit: str, path: Path) -> None:
    """One panel per model, one line per row that torch has, with everybody's time.

    The number at the end of a line is the ratio to the tuned torch program.
    """
    compared = [row for table in tables.values() for row, found in table.items() if found["ratio"]]
    rows = list(dict.fromkeys(compared or [row for table in tables.values() for row in table]))
    rows.sort(key=lambda row: row.startswith(ROUND))
    there = {name for table in tables.values() for found in table.values() for name in found["seconds"]}
    with matplotlib.rc_context(SMALL):
        size = (WIDTH, 0.8 + len(tables) * (0.35 + 0.15 * len(rows)))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(tables), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (model, table) in zip(panels, tables.items(), strict=True):
            panel.set_xscale("log")
            for place, row in enumerate(rows):
                taken = table.get(row, {}).get("seconds", {})
                if len(taken) > 1:
                    ends = min(taken.values()), max(taken.values())
                    panel.plot(ends, [place, place], color="0.6", lw=0.8, zorder=1)
                    if "tuned" in taken:
                        ratio = f"  {table[row]['ratio']['tuned']:.1f}"
                        panel.annotate(ratio, (ends[1], place), va="center", fontsize=6.5)
                for name, (_, style) in COLUMNS.items():
                    if name in there:
                        seen = taken.get(name, np.nan)
                        panel.plot(seen, place, linestyle="", markersize=3.5, label=name, **style)
            panel.set_title(model)
            panel.set_yticks(range(len(rows)), rows)
            panel.set_ylim(len(rows) - 0.4, -0.6)
        low, high = panels[0].get_xlim()
        panels[0].set_xlim(low, high * 2.5)  # room for the ratios
        panels[-1].set_xlabel(f"{unit} per round")
        handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
        names = [name for name in COLUMNS if name in there]
        labels = [COLUMNS[name][0] for name in names]
        figure.legend([handles[n] for n in names], labels, loc="outside lower center", ncols=2)
        save(figure, path)


def draw_growth(grown: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel per axis, one line per rule; legends give the exponents."""
    with matplotlib.rc_context(SMALL):
        figure = Figure(figsize=(WIDTH, 2.3 * len(grown)), layout="constrained")
        for panel, key in zip(figure.subplots(len(grown), 1), grown, strict=True):
            data = grown[key]
            for i, name in enumerate(PAPER):
                style = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i], "markersize": 3}
                label = f"{name}  {data['exponents'][name]:.2f}"
                panel.loglog(data["sizes"], data["seconds"][name], label=label, lw=1, **style)
            ticks = data["sizes"] if len(data["sizes"]) < 7 else data["sizes"][::2]
            panel.set_xticks(ticks, [f"{size:,}" for size in ticks])
            panel.minorticks_off()
            low, high = panel.get_ylim()
            panel.set_ylim(low, high * (high / low) ** 0.4)  # room for the legend
            panel.set_xlabel(f"{AXES[key].label}; {data['fixed']}")
            panel.set_ylabel("CPU seconds")
            title = f"exponent of {key}, from {data['fitted_from']:,} on"
            tight = {"columnspacing": 0.8, "handlelength": 1.7, "handletextpad": 0.4, "fontsize": 6}
            panel.legend(title=title, title_fontsize=6, loc="upper left", ncols=3, **tight)
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    for suffix in (".png", ".pdf"):
        figure.savefig(path.with_suffix(suffix), dpi=200)
