"""Pictures of results: `python -m ubar_jax.experiments.plot --results=FOLDER`.

Draws worst-node accuracy against rounds; of up to three runs also every node's; and, for every setting of
the rest that occurs in the folder, a heat map of the final worst accuracy, rules by attacks, with its CSV.
"""

import collections
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

from ubar_jax.results import Run, load_runs

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
            axis.set_ylim(-0.03, 1)
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


def heat_map(runs: Sequence[Run], path: str | Path, title: str = "") -> None:
    """Final worst-node accuracy (mean over seeds), rules by attacks, numbers in the cells, and a CSV."""
    rules, attacks = (list(dict.fromkeys(getattr(r.config, k) for r in runs)) for k in ("rule", "attack"))
    cells = collections.defaultdict(list)
    for run in runs:
        cells[run.config.rule, run.config.attack].append(run.summary["worst"])
    values = np.array([[np.mean(cells[r, a]) if cells[r, a] else np.nan for a in attacks] for r in rules])
    path = Path(path)
    with path.with_suffix(".csv").open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["rule", *attacks])
        writer.writerows([r, *(f"{v:.4f}" for v in row)] for r, row in zip(rules, values, strict=True))
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        size = (2.6 + 0.62 * len(attacks), 2.2 + 0.36 * len(rules))
        figure = Figure(figsize=size, layout="constrained")
        axis = figure.subplots()
        axis.set_title(title)
        image = axis.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axis.set_xticks(range(len(attacks)), attacks, rotation=40, ha="right", rotation_mode="anchor")
        axis.set_yticks(range(len(rules)), rules)
        for (i, j), value in np.ndenumerate(values):
            text = "" if np.isnan(value) else f"{100 * value:.0f}"
            axis.text(j, i, text, ha="center", va="center", color="white" if value < 0.5 else "black")
        figure.colorbar(image, label="worst node's accuracy", pad=0.01)
        figure.savefig(path, dpi=150)


def node_accuracy(runs: Sequence[Run], path: str | Path) -> None:
    """Every benign node's accuracy against rounds, a panel a run: who is ruined, and when."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1 + 3.2 * len(runs), 3.2), layout="constrained")
        axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for axis, run in zip(axes, runs, strict=True):
            axis.plot(run.curves["round"], run.curves["accuracy"], color=COLOURS[2], lw=0.8, alpha=0.6)
            axis.plot(run.curves["round"], run.curves["worst"], color=COLOURS[0], lw=1.5, label="worst node")
            axis.set_title(f"{run.config.rule}\n{run.config.attack}", fontsize=8)
            axis.set_xlabel("round")
            axis.set_ylim(0, 1)
        axes[0].set_ylabel("test accuracy of each benign node")
        axes[0].legend(loc="lower right")
        figure.savefig(path, dpi=150)


def varying(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Those settings of `names` that differ between the runs."""
    return [name for name in names if len({getattr(run.config, name) for run in runs}) > 1]


PANELS = ("attack", "byzantine_ratio", "topology", "dataset", "model", "sharding", "optimizer", "schedule")
PANELS += ("nodes", "alpha", "learning_rate", "batch_size", "rounds", "eval_every", "eval_size")


def draw_all(runs: Sequence[Run], folder: Path) -> list[Path]:
    """The figures of a results folder; returns their paths."""
    paths = [folder / "worst_accuracy.png"]
    worst_accuracy(runs, paths[0], varying(runs, PANELS) or ["attack"])
    if len(runs) <= 3:
        paths.append(folder / "node_accuracy.png")
        node_accuracy(runs, paths[-1])
    if len(varying(runs, ("rule", "attack"))) == 2:
        settings = [name for name in PANELS if name != "attack"]
        groups = collections.defaultdict(list)
        for run in runs:
            groups[tuple(getattr(run.config, name) for name in settings)].append(run)
        # A run without attackers has ratio 0; it belongs to every ratio of its other settings.
        ratio = settings.index("byzantine_ratio")
        free = {key: groups.pop(key) for key in list(groups) if key[ratio] == 0}
        for number, (key, group) in enumerate(groups.items(), 1):
            same = free.get((*key[:ratio], 0.0, *key[ratio + 1 :]), [])
            paths.append(folder / (f"heat_map_{number}.png" if len(groups) > 1 else "heat_map.png"))
            title = [_words(k, v) for k, v in zip(settings, key, strict=True) if k in varying(runs, settings)]
            heat_map([*same, *group], paths[-1], ", ".join(title))
    return paths


def main(argv: Sequence[str]) -> int | None:
    folder = Path(flags.FLAGS.results)
    if len(argv) > 1 or not (runs := load_runs(folder)):
        print(f"error: no finished run in {folder}; give --results=FOLDER of a sweep", file=sys.stderr)
        return 2
    print(*draw_all(runs, folder), sep="\n")
    return None


if __name__ == "__main__":
    flags.DEFINE_string("results", "results", "Folder of a sweep.")
    app.run(main)
