"""Sweeps from Python: what the command `experiments.sweep` does, for notebooks."""

import contextlib
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ubar_jax.config import Config
from ubar_jax.experiments import grouping, plot
from ubar_jax.experiments.pictures import Figure, Figures
from ubar_jax.registry import ConfigError, listed, nearest
from ubar_jax.sweeps import results
from ubar_jax.sweeps.plan import carry_out, make_plan
from ubar_jax.sweeps.results import Run

FIELDS = [field.name for field in dataclasses.fields(Config)]


@dataclass(frozen=True)
class Sweep:
    """The finished runs of a sweep."""

    runs: list[Run]
    failed: dict[str, Exception]  # by digest
    notices: list[str]

    def table(self) -> pd.DataFrame:
        """A row per run: the settings that differ, the final worst and mean accuracy, when it diverged."""
        frame = results.table(self.runs)
        differ = results.varying(self.runs, [name for name in FIELDS if name != "rule"])
        frame = frame[["rule", *differ, "worst", "mean", "seconds", "diverged"]]
        for name in {"rule", *differ} & {"rule", "attack", "topology", "model", "dataset"}:
            frame = frame.assign(**{name: [grouping.short(name, value) for value in frame[name]]})
        return frame if frame["diverged"].any() else frame.drop(columns="diverged")

    def heat_map(self, columns: str | None = None) -> Figure | Figures:
        """Final accuracy of the worst node, rules by the setting `columns`, by default one that varies.

        One figure per value of the other settings that vary.
        """
        runs = grouping.at_every_ratio(self.runs)
        columns = grouping.choose_panels(runs, None, _known(columns))[1]
        others = [name for name in results.varying(runs, grouping.SETTINGS) if name != columns]
        return _one_or_all(
            [
                plot.heat_map(group, columns, grouping.words(labels))
                for labels, group in grouping.split(runs, others)
            ]
        )

    def plot(self, rows: str | None = None, columns: str | None = None) -> Figure | Figures:
        """Accuracy of the worst node over time: one line per rule, panels by two settings."""
        figures = plot.all_figures(self.runs, _known(rows), _known(columns))
        return _one_or_all([figure for name, figure, _ in figures if name.startswith("worst_accuracy")])

    def __repr__(self) -> str:
        told = f"{len(self.runs)} runs, {len(self.failed)} failed"
        return "\n".join([told, self.table().to_string(index=False), *self._notices()])

    def _repr_html_(self) -> str:
        look = {"worst": "{:.1%}".format, "mean": "{:.1%}".format, "seconds": "{:.1f}".format}
        shown = self.table().to_html(index=False, border=0, justify="left", formatters=look)
        return shown + "".join(f"<p>{line}</p>" for line in self._notices())

    def _notices(self) -> Iterator[str]:
        return (f"notice: {notice}" for notice in self.notices)


def sweep(
    configs: Mapping[str, Any] | Iterable[Config],
    folder: str | Path | None = None,
    *,
    width: int | None = None,
) -> Sweep:
    """Runs several configs, with one compilation for all that share a program.

    `configs` is a list of Configs, or a grid: {"rule": ["ubar", "average"], "seed": [0, 1], "rounds": 40} is
    the product of all lists. Runs are kept in `folder`, if given: the same call continues after an
    interruption, and runs only what is new. `width` is the number of runs side by side, by
    default 1 on a CPU.
    """
    wanted = _product(configs) if isinstance(configs, Mapping) else list(configs)
    if wrong := [each for each in wanted if not isinstance(each, Config)]:
        raise ConfigError(f"sweep takes Configs or a grid such as {{'rule': ['ubar']}}, not {wrong[0]!r}")
    if not wanted:
        raise ConfigError("sweep was given no config")
    with _home(folder) as home:
        plan = make_plan(wanted, home)
        seconds = float("inf") if folder is None else 60  # nobody can continue in a temporary folder
        outcome = carry_out(plan, home, width=width, checkpoint_seconds=seconds)
        runs = [results.load_run(home / digest) for digest in plan.configs if digest not in outcome.failed]
        if runs and folder is not None:
            results.write_table(home)
    for digest, error in outcome.failed.items():
        config = plan.configs[digest]
        print(f"FAILED: {config.rule} under {config.attack}, seed {config.seed}: {error}", file=sys.stderr)
    if not runs:
        raise next(iter(outcome.failed.values()))
    return Sweep(runs, outcome.failed, plan.notices)


@contextlib.contextmanager
def _home(folder: str | Path | None) -> Iterator[Path]:
    """The folder of a sweep, owned by this process; a temporary one if none is given."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield stack.enter_context(results.owned(folder, "ubar_jax.sweep"))


def _product(grid: Mapping[str, Any]) -> list[Config]:
    """The product of all lists of a grid; a value that is not a list is the same in all runs."""
    for name in grid:
        if name not in FIELDS:
            known = listed(FIELDS)
            raise ConfigError(f"unknown setting {name!r}{nearest(name, FIELDS)}; there are {known}")
    lists = [[value] if _is_one(value) else list(value) for value in grid.values()]
    return [Config(**dict(zip(grid, point, strict=True))) for point in itertools.product(*lists)]


def _is_one(value: Any) -> bool:
    return isinstance(value, str) or not isinstance(value, Iterable)


def _known(name: str | None) -> str | None:
    """A setting for rows or columns; refuses others."""
    if name is not None and name not in grouping.SETTINGS:
        where = listed(grouping.SETTINGS)
        raise ConfigError(f"unknown setting {name!r}{nearest(name, grouping.SETTINGS)}; there are {where}")
    return name


def _one_or_all(figures: Sequence[Figure]) -> Figure | Figures:
    return figures[0] if len(figures) == 1 else Figures(figures)
