"""The paper's figures: `python -m ubar_jax.experiments.reproduce --figure=gaussian`, or all without a name.

Runs the flagfiles of experiments/paper (--profile=cpu, the paper's grids sized for two cores, or gpu, its
exact settings) and draws every figure as soon as its runs are done. It can be stopped or killed; the same
command continues. A figure is written as PNG and PDF, with the runs behind it as CSV and where they come from
as JSON. Exit codes as those of sweep, but 0 if runs diverged: undefended rules do.
"""

import dataclasses
import datetime
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from ubar_jax.config import Config
from ubar_jax.experiments import command, grouping, plot
from ubar_jax.experiments.grids import grid_of
from ubar_jax.experiments.pictures import Figure
from ubar_jax.files import write_json
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps import results
from ubar_jax.sweeps.results import Run

MNIST, CIFAR10 = ("mnist",), ("cifar10",)
DATASETS = MNIST + CIFAR10
FAILED, DIVERGED, STOPPED = 1, 3, 130  # exit codes of a sweep
PATIENCE = 15.0  # seconds in which a sweep that got Ctrl-C, too, should end
Drawn = Iterator[tuple[str, Figure]]  # what a figure's files have after its name, and the figure


def draw_panels(runs: Sequence[Run], rows: str, columns: str) -> Drawn:
    """Curves over rounds: runs with different shares have different epochs. No panel has bounds only."""
    names = [name for name in grouping.settings(runs, "rule") if name not in grouping.BOUNDS]

    def panel(run: Run) -> tuple:
        return getattr(run.config, rows), getattr(run.config, columns)

    drawn = {panel(run) for run in runs if run.config.rule in names}
    if not (runs := [run for run in runs if panel(run) in drawn]):
        return
    attacks = {run.config.attack for run in runs} - {"none"}
    title = grouping.words({"attack": attacks.pop()}) if len(attacks) == 1 and rows != "attack" else ""
    pages = plot.worst_accuracy(runs, rows, columns, names, title, unit="round")
    for number, figure in enumerate(pages, 1):
        yield f"_page{number}" if number > 1 else "", figure


def draw_cells(runs: Sequence[Run], each: str, columns: str) -> Drawn:
    """Heat maps of the final worst node, rules by `columns`, one per value of `each`.

    Over the seeds that all cells have: means over different seeds would not compare.
    """
    for labels, group in grouping.split(runs, [each]):
        cells = [{run.config.seed for run in cell} for _, cell in grouping.split(group, ["rule", columns])]
        seeds = set.intersection(*cells)
        if fair := [run for run in group if run.config.seed in seeds]:
            yield grouping.file_name("", labels), plot.heat_map(fair, columns, grouping.words(labels))


def draw_nodes(runs: Sequence[Run], *_: str) -> Drawn:
    """The accuracy of every node, a panel per run."""
    yield "", plot.node_accuracy(runs)


class Recipe(NamedTuple):
    """How a figure is made."""

    draw: Callable[..., Drawn]
    settings: tuple[str, ...]  # of rows and columns, or of each and columns
    parts: tuple[str, ...]  # the flagfiles DATASET_PART.flags behind it; a profile may lack some
    datasets: tuple[str, ...] = DATASETS
    keeps: Callable[[Config], bool] = lambda config: True  # which of their runs it shows


def _under(attack: str) -> Recipe:
    parts = ("baseline", "bounds", f"{attack}_ubar", attack)
    return Recipe(draw_panels, ("dataset", "byzantine_ratio"), parts)


def _table(part: str, others: Sequence[str], keeps: Callable[[Config], bool]) -> Recipe:
    parts = ("bounds", part, *others)
    return Recipe(draw_cells, ("byzantine_ratio", "attack"), parts, MNIST, keeps)


def _at(*ratios: float) -> Callable[[Config], bool]:
    return lambda config: config.byzantine_ratio in ratios


def _ubar_at(*ratios: float) -> Callable[[Config], bool]:
    kept = ("ubar", *grouping.BOUNDS)
    return lambda config: config.byzantine_ratio in ratios and config.rule.startswith(kept)


ATTACKS = ("gaussian_ubar", "gaussian", "bit_flip_ubar", "bit_flip", "mhamdi_ubar", "mhamdi")
FIGURES = {
    "gaussian": _under("gaussian"),
    "bit_flip": _under("bit_flip"),
    "mhamdi": _under("mhamdi"),
    "size": Recipe(draw_panels, ("dataset", "nodes"), ("size",)),
    "connection": Recipe(draw_panels, ("dataset", "topology"), ("connection",)),
    "theorem1": Recipe(draw_nodes, (), ("theorem1",), MNIST),
    "stages": _table("stages", ATTACKS, _ubar_at(0.3, 0.5)),
    "counts": _table("counts", ATTACKS, _at(0.3)),
    "rho": _table("rho", ATTACKS, _ubar_at(0.3)),
    "std": _table("std", ATTACKS[:2], _at(0.5)),
    "norm": _table("norm", ATTACKS[4:], _at(0.5)),
    "shards": Recipe(draw_panels, ("attack", "sharding"), ("shards",), MNIST),
    "time": Recipe(lambda runs: iter(()), (), ("time",), CIFAR10),
}


def flagfiles(profile: str, figure: str) -> list[str]:
    """The names of the flagfiles behind a figure."""
    recipe, known = FIGURES[figure], command.shipped()
    names = [f"paper/{profile}/{data}_{part}" for data in recipe.datasets for part in recipe.parts]
    return [name for name in names if name in known]


def runs_of(profile: str, figure: str) -> tuple[list[Run], int]:
    """(finished runs that a figure shows, how many it will have).

    With attackers, averaging without them is the baseline; floor and ceiling are where they hold.
    """
    recipe = FIGURES[figure]
    wanted: dict[str, Config] = {}
    folders = {}
    for name in flagfiles(profile, figure):
        runs, _, folder = grid_of(name)
        wanted |= {run.digest: run.config for run in runs}
        folders[folder] = folder.is_dir()
    found = results.load_runs(*(folder for folder, there in folders.items() if there))
    known = [run for run in found if run.digest in wanted]
    if "baseline" in recipe.parts:
        known = [_as_baseline(run) if run.config.attack == "none" else run for run in known]
    kept = [run for run in known if run.config.rule == grouping.BASELINE or recipe.keeps(run.config)]
    return kept, sum(config.attack == "none" or recipe.keeps(config) for config in wanted.values())


def _as_baseline(run: Run) -> Run:
    return run._replace(config=dataclasses.replace(run.config, rule=grouping.BASELINE))


def draw(profile: str, figure: str, out: Path) -> list[Path]:
    """Writes a figure from the runs that are finished; returns the paths of the PNGs."""
    recipe, (runs, total) = FIGURES[figure], runs_of(profile, figure)
    print(f"{figure}: {len(runs)} of {total} runs are finished", flush=True)
    paths = []
    for suffix, picture in recipe.draw(grouping.with_bounds(runs), *recipe.settings) if runs else ():
        paths.append(out / f"{figure}{suffix}.png")
        for path in (paths[-1], paths[-1].with_suffix(".pdf")):
            picture.savefig(path, dpi=150)
    if runs:
        table = plot.time_table(runs) if figure == "time" else results.table(runs)
        table.to_csv(out / f"{figure}.csv", index=False)
        write_json(out / f"{figure}.json", provenance(profile, figure, runs, total))
    return paths


def provenance(profile: str, figure: str, runs: Sequence[Run], total: int) -> dict:
    """Where the runs behind a figure come from: commands, commits, machines, seconds, versions."""
    spent = sum(run.summary["seconds"][part] for run in runs for part in ("rounds", "evaluation"))
    names = flagfiles(profile, figure)
    sweeps = [_noted(folder) for folder in dict.fromkeys(grid_of(name)[2] for name in names)]
    return {
        "commands": [" ".join(["python", *sweep_command(name, None)[1:]]) for name in names],
        "drawn": datetime.date.today().isoformat(),
        "runs": f"{len(runs)} of {total}",
        "seconds of one worker, without compilation": round(spent),
        "last sweeps": [noted for noted in sweeps if noted],
        "versions": list({str(run.summary["versions"]): run.summary["versions"] for run in runs}.values()),
    }


def _noted(folder: Path) -> dict[str, Any]:
    """What the last sweep that wrote to a folder noted of itself."""
    try:
        noted = json.loads((folder / "sweep.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: noted[name] for name in ("command", "date", "commit", "machine") if name in noted}


def sweep_command(flagfile: str, workers: int | None) -> list[str]:
    """The command that runs a flagfile."""
    words = [sys.executable, "-m", "ubar_jax.experiments.sweep", f"--flagfile={flagfile}.flags"]
    return words if workers is None else [*words, f"--workers={workers}"]


def run_sweep(flagfile: str, workers: int | None) -> int:
    """Runs a flagfile; returns the exit code. Ctrl-C and SIGTERM end the sweep first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(sweep_command(flagfile, workers))
    try:
        code = process.wait()
    except KeyboardInterrupt:
        try:  # on Ctrl-C in a terminal the sweep has got it, too
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == STOPPED:
        raise KeyboardInterrupt
    return code


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    if argv[1:]:
        raise ConfigError(f"unknown argument {argv[1]!r}; give flags")
    wanted = list(dict.fromkeys(values.figure or FIGURES))
    out = results.open_folder(values.out or Path("results", "paper", values.profile, "figures"), "--out")
    names = list(dict.fromkeys(name for figure in wanted for name in flagfiles(values.profile, figure)))
    codes: dict[str, int] = {}
    for figure in wanted:
        for name in [] if values.draw_only else flagfiles(values.profile, figure):
            if name in codes:
                continue
            print(f"== {len(codes) + 1} of {len(names)}: {name}", flush=True)
            codes[name] = code = run_sweep(name, None if figure == "time" else values.workers)
            if code not in (0, FAILED, DIVERGED):  # every other sweep would end in the same way
                if code < 0:
                    print(f"{name} was killed; the same command continues", file=sys.stderr)
                return code if code > 0 else FAILED
        for path in draw(values.profile, figure, out):
            print(path)
    if failed := [name for name, code in codes.items() if code == FAILED]:
        print(f"runs failed in {', '.join(failed)}; the same command repeats them", file=sys.stderr)
    return FAILED if failed else 0


def launch() -> None:
    """Defines the flags and runs the command."""
    flags.DEFINE_multi_enum("figure", None, list(FIGURES), "Figure to make; default: all.")
    flags.DEFINE_enum("profile", "cpu", ["cpu", "gpu"], "Settings: sized for two cores, or the paper's.")
    flags.DEFINE_integer("workers", None, "Workers of the sweeps, see sweep --help.", lower_bound=1)
    flags.DEFINE_bool("draw_only", False, "Draw what is finished, run nothing.")
    flags.DEFINE_string("out", None, "Folder of the figures; default: results/paper/PROFILE/figures.")
    command.must_be_named("out")
    command.launch(main)


if __name__ == "__main__":
    launch()
