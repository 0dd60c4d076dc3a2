"""Figures of results: `python -m ubar_jax.experiments.plot --results=FOLDER`.

Draws worst-node accuracy against epochs, one line per rule, in panels by two settings (--rows, --columns);
heat maps of the final worst-node accuracy, rules by the setting of the columns, with their numbers as CSV;
and for up to three runs every node's accuracy. There is one figure per value of any other varying setting.
Runs of `local` and `oracle` are shown as floor and ceiling (see `grouping.with_bounds`).
Prints the seconds per round; writes all runs of a folder to its runs.csv. Figures are PNG and PDF. Repeat
--results to combine several folders.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from absl import flags

from ubar_jax.experiments import command
from ubar_jax.experiments.grouping import (
    BOUNDS,
    SETTINGS,
    at_every_ratio,
    choose_panels,
    file_name,
    rule_label,
    run_words,
    seeds_of,
    settings,
    short,
    split,
    with_bounds,
    words,
)
from ubar_jax.experiments.pictures import Figure
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps.results import Run, load_runs, open_folder, varying, write_table

# Colours of Okabe and Ito. Lightness, markers and dashes differ too, for prints in grey.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vP*X"
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 2, 2)))

STYLE: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3}
STYLE |= {"savefig.bbox": "tight"}
PLAIN = {**STYLE, "axes.grid": False}
ROWS, COLUMNS = 6, 5  # most panels per figure


def panels(count: int, widest: int, size: float) -> tuple[Figure, np.ndarray]:
    """A figure with `count` square panels, at most `widest` side by side."""
    width = min(count, widest)
    height = -(-count // width)
    figure = Figure(figsize=(0.8 + size * width, 0.7 + size * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False).ravel()
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def times(run: Run, unit: str) -> np.ndarray:
    """[E] times of the run's evaluations, in epochs or rounds."""
    return run.curves["round"] / (run.summary["rounds_per_epoch"] if unit == "epoch" else 1)


def time_unit(runs: Sequence[Run]) -> str:
    """'round' if some run has no record of rounds per epoch, else 'epoch'."""
    return "epoch" if all("rounds_per_epoch" in run.summary for run in runs) else "round"


@matplotlib.rc_context(STYLE)
def worst_accuracy(
    runs: Sequence[Run],
    rows: str,
    columns: str,
    names: Sequence[str],
    title: str = "",
    unit: str | None = None,
) -> list[Figure]:
    """Worst-node accuracy: one line per rule, one panel per pair of values of `rows` and `columns`.

    Lines are means over seeds; bands span the seeds. Floor and ceiling have no band. Columns that do not fit
    continue below, then in another figure. `names` are the rules of all figures, without floor and ceiling,
    so that a rule has the same colour everywhere. `unit` is epoch or round; by default epoch if known.
    """
    lines, steps, unit = settings(runs, rows), settings(runs, columns), unit or time_unit(runs)
    strips_per_row = -(-len(steps) // COLUMNS)
    width = -(-len(steps) // strips_per_row)  # so that rows of panels have about equal length
    strips = [(line, steps[i : i + width]) for i in range(0, len(steps), width) for line in lines]
    height = ROWS // len(lines) * len(lines) or ROWS
    shown = [name for name in (*names, *BOUNDS) if name in settings(runs, "rule")]
    note = "one seed"
    if varying(runs, ["seed"]):
        note = f"mean of {seeds_of(runs, rows, columns)}, band from lowest to highest"
    drawn = []
    for page in (strips[i : i + height] for i in range(0, len(strips), height)):
        size = (1.2 + 2.5 * width, 1.1 + 0.22 * len(shown) / min(width, 4) + 2 * len(page))
        drawn.append(figure := Figure(figsize=size, layout="constrained"))
        axes = figure.subplots(len(page), width, sharey=True, squeeze=False)
        for axis_row, (line, strip) in zip(axes, page, strict=True):
            for axis, step in zip(axis_row, strip, strict=False):
                axis.set(title=textwrap.fill(words({columns: step}, steps), 36), xlabel=unit)
                here = [
                    r for r in runs if (getattr(r.config, rows), getattr(r.config, columns)) == (line, step)
                ]
                _lines(axis, here, names, unit)
            for axis in axis_row[len(strip) :]:
                axis.remove()
            axis_row[0].set_ylabel(textwrap.fill(words({rows: line}, lines), 28))
        axes[0, 0].set_ylim(-0.03, 1.03)
        figure.suptitle(f"{title}, {note}" if title else note, fontsize=9)
        figure.supylabel("worst benign node's test accuracy", fontsize=9)
        handles = [axes[0, 0].plot([], [], **_look(name, names))[0] for name in shown]
        labels = [rule_label(name) for name in shown]
        figure.legend(handles, labels, loc="outside lower center", ncols=min(width, 4, len(shown)))
    return drawn


def _style(index: int) -> dict[str, Any]:
    marker = MARKERS[(index + index // 8) % 8]  # line 9 has the colour of line 1, but not its marker
    return {"color": COLOURS[index % 8], "marker": marker, "ls": DASHES[index % 8], "ms": 4, "lw": 1.2}


def _look(rule: str, names: Sequence[str]) -> dict[str, Any]:
    """The style of a rule's line; floor and ceiling are thin, grey, without markers and behind the rules."""
    if rule in BOUNDS:
        return {"color": "0.3", "ls": BOUNDS[rule].dashes, "lw": 1, "zorder": 1.8}
    return _style(names.index(rule))


def _lines(axis, runs: Sequence[Run], names: Sequence[str], unit: str) -> None:
    if not runs:
        axis.text(0.5, 0.5, "no run", ha="center", transform=axis.transAxes, color="0.4")
    for labels, own in split(runs, ["rule"]):
        rule, x = labels["rule"], times(own[0], unit)
        worst = np.stack([run.curves["worst"] for run in own])
        if rule in BOUNDS:  # without a band: at close curves it would hide whose band is whose
            axis.plot(x, worst.mean(0), **_look(rule, names))
            continue
        apart, index = max(1, len(x) // 5), names.index(rule)
        first = index % 4 * apart // 4  # so that markers of close lines do not overlap
        marked = [*range(first, len(x) - 1, apart), len(x) - 1]  # tables show the last point: always mark it
        axis.plot(x, worst.mean(0), markevery=marked, **_style(index))
        look = {"color": COLOURS[index % 8], "alpha": 0.6 / max(4, len(names)), "lw": 0}
        axis.fill_between(x, worst.min(0), worst.max(0), **look)


def final_worst(runs: Sequence[Run], columns: str, over_seeds: Callable = np.mean) -> pd.DataFrame:
    """Final worst-node accuracy, rules by `columns`, mean over seeds; NaN where there is no run.

    The ceiling is the first row and the floor the last.
    """
    rules = sorted(settings(runs, "rule"), key=lambda rule: BOUNDS[rule].place if rule in BOUNDS else 0)
    across = pd.Index(settings(runs, columns), name=columns)
    table = pd.DataFrame(index=pd.Index(rules, name="rule"), columns=across)
    for labels, group in split(runs, ["rule", columns]):
        table.loc[*labels.values()] = over_seeds([run.summary["worst"] for run in group])
    return table.astype(float)


def final_worst_spread(runs: Sequence[Run], columns: str) -> pd.DataFrame:
    """`final_worst`, and with several seeds also columns for the lowest and the highest seed."""
    tables = [final_worst(runs, columns)]
    for kind, f in {"lowest": np.min, "highest": np.max}.items() if varying(runs, ["seed"]) else ():
        tables.append(final_worst(runs, columns, f).add_suffix(f", {kind} seed"))
    return pd.concat(tables, axis=1)


@matplotlib.rc_context(PLAIN)
def heat_map(runs: Sequence[Run], columns: str, title: str = "") -> Figure:
    """Final worst-node accuracy in per cent, rules by `columns`; the longer list is vertical.

    With several seeds, a cell shows the mean and, in brackets, the lowest and the highest. Ceiling and floor
    are set apart from the rules between them.
    """
    spread = bool(varying(runs, ["seed"]))
    tables = [final_worst(runs, columns, f) for f in (np.mean, np.min, np.max, len)]
    rules, steps = list(tables[0].index), list(tables[0].columns)
    tables = [t.rename(index=rule_label, columns=lambda v: short(columns, v, steps)) for t in tables]
    upright = len(rules) >= tables[0].shape[1]
    table, low, high, count = [t if upright else t.T for t in tables]
    values, down, across = table.to_numpy(), table.index, table.columns
    cell = (0.75, 0.42) if spread else (0.55, 0.28)
    width, height = 1.6 + 0.075 * max(map(len, down)) + cell[0] * len(across), 1.4 + cell[1] * len(down)
    least = 3.9 if spread else 2.6  # room for the words beside the colour bar
    figure = Figure(figsize=(width, max(least, height)), layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, loc="left")
    axis.set(ylabel=down.name.replace("_", " "), xlabel=across.name.replace("_", " "))
    image = axis.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axis.set_xticks(range(len(across)), across, rotation=40, ha="right", rotation_mode="anchor")
    axis.set_yticks(range(len(down)), down)
    for (i, j), value in np.ndenumerate(values):
        text = "" if np.isnan(value) else f"{100 * value:.0f}"
        if count.to_numpy()[i, j] > 1:
            text += f"\n({100 * low.to_numpy()[i, j]:.0f} to {100 * high.to_numpy()[i, j]:.0f})"
        axis.text(j, i, text, ha="center", va="center", color="white" if value < 0.5 else "black")
    for i in range(1, len(rules)):
        if rules[i - 1] == "oracle" or rules[i] == "local":
            (axis.axhline if upright else axis.axvline)(i - 0.5, color="white", lw=5)
    seeds = f", mean (lowest to\nhighest) of {seeds_of(runs, columns)}" if spread else ""
    figure.colorbar(image, label=f"worst node's\naccuracy (cells: %{seeds})", pad=0.02)
    return figure


@matplotlib.rc_context(STYLE)
def node_accuracy(runs: Sequence[Run]) -> Figure:
    """Accuracy of every benign node over time; one panel per run."""
    figure, axes = panels(len(runs), 4, 2.6)
    unit = time_unit(runs)
    for axis, run in zip(axes, runs, strict=True):
        each = axis.plot(times(run, unit), run.curves["accuracy"], color=COLOURS[6], lw=0.8)
        worst = axis.plot(times(run, unit), run.curves["worst"], color=COLOURS[0], ls="--", lw=1.5)
        axis.set(title=run_words(run), ylim=(-0.03, 1.03), xlabel=unit, ylabel="test accuracy")
    labels = ["each benign node", "the worst at that time"]
    figure.legend([each[0], worst[0]], labels, loc="outside lower center", ncols=2)
    return figure


def time_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Seconds by rule and by the settings that affect cost, if they vary.

    A round is training, attack and aggregation; it includes compilation if the run did not time that.
    """
    costly = ["rule", *varying(runs, ("dataset", "model", "nodes", "topology", "batch_size"))]
    lines = []
    for labels, group in split(runs, costly):
        spent = pd.DataFrame([run.summary["seconds"] for run in group])
        rounds = spent["rounds"] / [run.config.rounds for run in group]
        lines.append({name: short(name, value) for name, value in labels.items()} | {"runs": len(group)})
        lines[-1] |= {"round": rounds.mean(), "lowest": rounds.min(), "highest": rounds.max()}
        lines[-1] |= {name: spent[name].mean() for name in ("evaluation", "compilation") if name in spent}
    return pd.DataFrame(lines)


def all_figures(
    runs: Sequence[Run], rows: str | None = None, columns: str | None = None
) -> Iterator[tuple[str, Figure, pd.DataFrame | None]]:
    """(name, figure, numbers of a heat map or None), per combination of the other varying settings."""
    runs = at_every_ratio(with_bounds(runs))
    rows, columns = choose_panels(runs, rows, columns)
    names = [name for name in settings(runs, "rule") if name not in BOUNDS]
    varied = varying(runs, SETTINGS)
    for labels, group in split(runs, [name for name in varied if name not in (rows, columns)]):
        pages = worst_accuracy(group, rows, columns, names, words(labels))
        for number, figure in enumerate(pages, 1):
            yield file_name("worst_accuracy", labels) + (f"_page{number}" if number > 1 else ""), figure, None
    for labels, group in split(runs, [name for name in varied if name != columns]):
        if len(varying(group, ("rule", columns))) == 2:
            figure = heat_map(group, columns, words(labels))
            yield file_name("heat_map", labels), figure, final_worst_spread(group, columns)


def draw_all(
    runs: Sequence[Run], folder: Path, rows: str | None = None, columns: str | None = None
) -> list[Path]:
    """Draws the figures of a sweep as PNG and PDF, with CSVs of heat maps; returns the paths of the PNGs."""
    drawn = list(all_figures(runs, rows, columns))
    if len(runs) <= 3:
        drawn.append(("node_accuracy", node_accuracy(runs), None))
    for name, figure, numbers in drawn:
        for suffix in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{suffix}", dpi=150)
        if numbers is not None:
            numbers.to_csv(folder / f"{name}.csv", float_format="%.4f")
    return [folder / f"{name}.png" for name, _, _ in drawn]


def read_runs(folders: Sequence[str]) -> list[Run]:
    """The runs of several folders."""
    if not (runs := load_runs(*folders)):
        raise ConfigError(f"no finished run in {', '.join(folders)}; give --results=FOLDER of a sweep")
    return runs


def launch(work: Callable[[list[Run], Path], None]) -> None:
    """Defines the flags of plot and report, and calls `work` with the runs and the output folder."""
    flags.DEFINE_multi_string("results", ["results"], "Folder of a sweep; repeat to combine several.")
    flags.DEFINE_string("out", None, "Folder to write to; default: the first of --results.")
    command.must_be_named("results", "out")
    for name in ("rows", "columns"):
        flags.DEFINE_enum(
            name, None, SETTINGS, f"Setting shown in the {name} of panels; default: one that varies."
        )

    def main(argv: Sequence[str]) -> None:
        values = flags.FLAGS
        if argv[1:]:
            raise ConfigError(f"unknown argument {argv[1]!r}; give flags")
        runs = read_runs(values.results)
        out = open_folder(values.out, "--out") if values.out else open_folder(values.results[0])
        work(runs, out)

    command.launch(main)


def draw(runs: list[Run], folder: Path) -> None:
    """Draws everything and prints the time table."""
    paths = draw_all(runs, folder, flags.FLAGS.rows, flags.FLAGS.columns)
    table = time_table(runs)
    table.to_csv(folder / "time_table.csv", float_format="%.6f", index=False)
    print("seconds: per round (mean, lowest and highest run), for all evaluations of a run, for compilation")
    print(
        table.to_string(index=False, float_format="%.4f", na_rep=""),
        *paths,
        folder / "time_table.csv",
        *(write_table(Path(folder)) for folder in flags.FLAGS.results),
        sep="\n",
    )


if __name__ == "__main__":
    launch(draw)
