"""The paper's figures: `python -m ubar_jax.experiments.reproduce --figure=gaussian`, or all without a name.

Runs the flagfiles of experiments/paper (--profile=cpu, the paper's grids sized for two cores, or gpu, its
exact settings), then draws. It can be stopped or killed; the same command continues. Every figure is written
as PNG and PDF, with the runs behind it as CSV and where they come from as JSON.
"""

import dataclasses
import datetime
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from ubar_jax.engine.devices import cores
from ubar_jax.experiments import command, plot
from ubar_jax.experiments.pictures import Figure
from ubar_jax.files import write_json
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps import results
from ubar_jax.sweeps.results import Run

DATASETS = ("mnist", "cifar10")
STOPPED, DIVERGED = 130, 3  # exit codes of a sweep


class Panels(NamedTuple):
    """A figure of curves, and which runs it shows."""

    rows: str
    columns: str
    shown: Callable[[Run], bool] = lambda run: True

    def draw(self, runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
        runs = plot.with_bounds(runs)
        names = [name for name in plot.settings(runs, "rule") if name not in plot.BOUNDS]
        for number, figure in enumerate(plot.worst_accuracy(runs, self.rows, self.columns, names), 1):
            yield f"_page{number}" if number > 1 else "", figure


class Cells(NamedTuple):
    """Heat maps of the final worst node, rules by `columns`, one per value of `each`."""

    columns: str
    each: str = "dataset"
    shown: Callable[[Run], bool] = lambda run: True

    def draw(self, runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
        for labels, group in plot.split(plot.with_bounds(runs), [self.each]):
            yield plot.file_name("", labels), plot.heat_map(group, self.columns, plot.words(labels))


class Nodes(NamedTuple):
    """The accuracy of every node, a panel per run."""

    shown: Callable[[Run], bool] = lambda run: True

    def draw(self, runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
        yield "", plot.node_accuracy(runs)


def _ubar(run: Run) -> bool:
    return run.config.rule.startswith("ubar")


def _ratio(*values: float) -> Callable[[Run], bool]:
    return lambda run: run.config.byzantine_ratio in values


UNDER_ATTACK = Panels("dataset", "byzantine_ratio")
# How each is drawn, and the flagfiles of experiments/paper that it needs, of every data set that has them.
FIGURES: dict[str, tuple[Panels | Cells | Nodes, tuple[str, ...]]] = {
    "gaussian": (UNDER_ATTACK, ("baseline", "bounds", "gaussian_ubar", "gaussian")),
    "bit_flip": (UNDER_ATTACK, ("baseline", "bounds", "bit_flip_ubar", "bit_flip")),
    "mhamdi": (UNDER_ATTACK, ("baseline", "bounds", "mhamdi_ubar", "mhamdi")),
    "size": (Panels("dataset", "nodes"), ("size",)),
    "connection": (Panels("dataset", "topology"), ("connection",)),
    "theorem1": (Nodes(), ("theorem1",)),
    "stages": (
        Cells("attack", "byzantine_ratio", lambda run: _ubar(run) and run.config.byzantine_ratio > 0.2),
        ("stages", "gaussian_ubar", "bit_flip_ubar", "mhamdi_ubar"),
    ),
    "rho": (
        Cells("attack", "byzantine_ratio", lambda run: _ubar(run) and run.config.byzantine_ratio == 0.3),
        ("rho", "gaussian_ubar", "bit_flip_ubar", "mhamdi_ubar"),
    ),
    "std": (Cells("attack", "byzantine_ratio", _ratio(0.5)), ("std", "gaussian_ubar", "gaussian")),
    "norm": (Cells("attack", "byzantine_ratio", _ratio(0.5)), ("norm", "mhamdi_ubar", "mhamdi")),
    "shards": (Panels("attack", "sharding"), ("shards",)),
}


def flagfiles(profile: str, figure: str) -> dict[str, Path]:
    """The flagfiles that a figure needs, by name."""
    known = command.shipped()
    wanted = [f"paper/{profile}/{d}_{part}" for d in DATASETS for part in FIGURES[figure][1]]
    return {name: known[name] for name in wanted if name in known}


def folder_of(flagfile: Path) -> Path:
    """The results folder that a flagfile names."""
    [folder] = [line for line in flagfile.read_text().splitlines() if line.startswith("--results=")]
    return Path(folder.partition("=")[2])


def sweep_command(name: str, workers: int | None) -> list[str]:
    """The command that runs a flagfile."""
    words = [sys.executable, "-m", "ubar_jax.experiments.sweep", f"--flagfile={name}.flags"]
    return words if workers is None else [*words, f"--workers={workers}"]


def run_sweeps(names: Sequence[str], workers: int | None) -> list[str]:
    """Runs flagfiles one after the other; returns those in which a run failed. Stops on Ctrl-C."""
    failed = []
    for number, name in enumerate(names, 1):
        print(f"== {number} of {len(names)}: {name}", flush=True)
        code = subprocess.run(sweep_command(name, workers)).returncode
        if code == STOPPED:
            raise KeyboardInterrupt
        if code not in (0, DIVERGED):
            failed.append(name)
    return failed


def runs_of(profile: str, figure: str) -> list[Run]:
    """The finished runs behind a figure; averaging without attackers is the baseline under attack."""
    kind, parts = FIGURES[figure]
    folders = {folder_of(file) for file in flagfiles(profile, figure).values()}
    found = results.load_runs(*sorted(folder for folder in folders if folder.is_dir()))
    if "baseline" in parts:
        found = [
            run._replace(config=dataclasses.replace(run.config, rule=plot.BASELINE))
            if run.config.attack == "none"
            else run
            for run in found
        ]
    return [run for run in found if kind.shown(run)]


def draw(profile: str, figure: str, out: Path) -> list[Path]:
    """Draws a figure from the runs that are finished; returns the paths of the PNGs."""
    if not (runs := runs_of(profile, figure)):
        print(f"{figure}: no finished run")
        return []
    paths = []
    for suffix, picture in FIGURES[figure][0].draw(runs):
        paths.append(out / f"{figure}{suffix}.png")
        for path in (paths[-1], paths[-1].with_suffix(".pdf")):
            picture.savefig(path, dpi=150)
    results.table(runs).to_csv(out / f"{figure}.csv", index=False)
    write_json(out / f"{figure}.json", provenance(profile, figure, runs))
    return paths


def provenance(profile: str, figure: str, runs: Sequence[Run]) -> dict:
    """Commands, seconds, versions and hardware of the runs behind a figure."""
    spent = sum(run.summary["seconds"][part] for run in runs for part in ("rounds", "evaluation"))
    return {
        "commands": [" ".join(["python", *sweep_command(n, None)[1:]]) for n in flagfiles(profile, figure)],
        "drawn": datetime.date.today().isoformat(),
        "commit": _commit(),
        "runs": len(runs),
        "seconds of one worker, without compilation": round(spent),
        "versions": list({str(run.summary["versions"]): run.summary["versions"] for run in runs}.values()),
        "devices": sorted({run.summary["device"] for run in runs}),
        "drawn on": f"{platform.machine()}, {cores()} cores",
    }


def _commit() -> str | None:
    """The commit of the checkout, if this is one and git is there."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    if argv[1:]:
        raise ConfigError(f"unknown argument {argv[1]!r}; give flags")
    wanted = values.figure or list(FIGURES)
    out = results.open_folder(values.out or Path("results", "paper", values.profile, "figures"))
    names = list(dict.fromkeys(name for figure in wanted for name in flagfiles(values.profile, figure)))
    failed = [] if values.draw_only else run_sweeps(names, values.workers)
    for figure in wanted:
        print(*draw(values.profile, figure, out), sep="\n")
    if failed:
        print(f"runs failed in {', '.join(failed)}; the same command repeats them", file=sys.stderr)
    return 1 if failed else 0


def launch() -> None:
    """Defines the flags and runs the command."""
    flags.DEFINE_multi_enum("figure", None, list(FIGURES), "Figure to make; default: all.")
    flags.DEFINE_enum("profile", "cpu", ["cpu", "gpu"], "Settings: sized for two cores, or the paper's.")
    flags.DEFINE_integer("workers", None, "Workers of the sweeps (see sweep --help).", lower_bound=1)
    flags.DEFINE_bool("draw_only", False, "Draw what is finished, run nothing.")
    flags.DEFINE_string("out", None, "Folder of the figures; default: results/paper/PROFILE/figures.")
    command.must_be_named("out")
    command.launch(main)


if __name__ == "__main__":
    launch()
