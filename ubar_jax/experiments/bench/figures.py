"""The benchmark's figures, each as PNG and PDF."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ubar_jax.experiments.bench.growth import AXES
from ubar_jax.experiments.bench.scenes import ROUND
from ubar_jax.experiments.bench.tables import PAPER, Table
from ubar_jax.experiments.plot import COLOURS, DASHES, MARKERS, STYLE
from ubar_jax.numerics import order_statistics


def draw_tables(tables: dict[str, Table], unit: str, path: Path) -> None:
    """One panel per model, one line per row from our time to the torch loop's, followed by their ratio."""
    rows = list(dict.fromkeys(row for table in tables.values() for row in table))
    rows.sort(key=lambda row: row.startswith(ROUND))
    marks = {"ubar_jax": {"marker": "o", "color": COLOURS[2]}}
    marks["torch"] = {"marker": "s", "color": COLOURS[1], "markerfacecolor": "white"}
    with matplotlib.rc_context(STYLE):
        size = (1.6 + 3.1 * len(tables), 1.3 + 0.27 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(tables), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (model, table) in zip(panels, tables.items(), strict=True):
            panel.set_xscale("log")
            for place, row in enumerate(rows):
                taken = table.get(row, {}).get("seconds", {})
                if "ratio" in table.get(row, {}):
                    low, high = sorted(taken.values())
                    panel.plot([low, high], [place, place], color="0.6", lw=1, zorder=1)
                    ratio = f"  {table[row]['ratio']:.1f}"
                    panel.annotate(ratio, (high, place), va="center", fontsize=8)
                for name, style in marks.items():
                    panel.plot(taken.get(name, np.nan), place, linestyle="", markersize=5, **style)
            panel.set_title(model)
            panel.set_xlabel(f"{unit} per round")
        low, high = panels[0].get_xlim()
        panels[0].set_xlim(low, high * 2)  # room for the ratios
        panels[0].set_yticks(range(len(rows)), rows)
        panels[0].invert_yaxis()
        labels = ("ubar_jax", "torch loop (number: times ours)")
        figure.legend(panels[0].get_lines()[-2:], labels, loc="outside lower center", ncols=2)
        save(figure, path)


def draw_growth(grown: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel per axis, one line per rule; legends give the exponents."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        for panel, key in zip(figure.subplots(1, len(grown), sharey=True), grown, strict=True):
            data = grown[key]
            for i, name in enumerate(PAPER):
                style = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i], "markersize": 4}
                label = f"{name}  {data['exponents'][name]:.2f}"
                panel.loglog(data["sizes"], data["seconds"][name], label=label, **style)
            if key == "degree":
                for slots in (order_statistics.FUSED_ALL, order_statistics.FUSED_SLOTS):
                    panel.axvline(slots, color="0.5", lw=1)
                note = "sorting networks fused up\nto here, then by stages:\nbridge, dbulyan | dmedian"
                panel.annotate(
                    note, (order_statistics.FUSED_ALL - 2, 2e-4), ha="right", fontsize=8, color="0.3"
                )
            ticks = data["sizes"][::2]
            panel.set_xticks(ticks, [f"{size:,}" for size in ticks])
            panel.minorticks_off()
            panel.set_xlabel(AXES[key].label)
            panel.set_title(data["fixed"])
            panel.legend(title=f"exponent of {key}", loc="upper left", fontsize=8)
        figure.axes[0].set_ylabel("CPU seconds per aggregation\nof the whole network, one core")
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    for suffix in (".png", ".pdf"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
