"""Grids of runs: the product of lists of settings, and the grid that a flagfile names."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ubar_jax.config import Config, Resolved, resolve
from ubar_jax.experiments import command
from ubar_jax.registry import ConfigError, shown


def grid(values: dict[str, Sequence]) -> tuple[list[Resolved], list[str]]:
    """(product of the lists, with each run once, notices)."""
    values = {k: list(v) if v else [None] for k, v in values.items()}
    values["rho"] = [_number_or_word(rho) for rho in values["rho"]]
    values["seed"] = [_seed(s) for text in values.pop("seeds") for s in text.split(",")]
    runs: dict[str, Resolved] = {}
    notices: list[str] = []
    product = list(itertools.product(*values.values()))
    for point in product:
        resolved = resolve(Config(**dict(zip(values, point, strict=True))))
        runs[resolved.digest] = resolved
        notices += resolved.notices
    if len(runs) < len(product):
        notices.append(f"{len(product)} combinations mean {len(runs)} different runs; duplicates merged")
    return list(runs.values()), list(dict.fromkeys(notices))


def grid_of(flagfile: str) -> tuple[list[Resolved], list[str], Path]:
    """(runs, notices, results folder) of a flagfile."""
    default = Config()
    lists: dict[str, Sequence] = {f.name: [getattr(default, f.name)] for f in dataclasses.fields(default)}
    lists["seeds"] = [str(*lists.pop("seed"))]
    given: dict[str, list[Any]] = {}
    for line in command.expanded([f"--flagfile={flagfile}.flags"]):
        name, _, value = line.removeprefix("--").partition("=")
        kind: Any = int if name == "eval_size" else type(getattr(default, name, ""))
        given.setdefault(name, []).append(kind(value))
    [folder] = given["results"]
    runs, notices = grid(lists | {name: values for name, values in given.items() if name in lists})
    return runs, notices, Path(folder)


def _number_or_word(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except (TypeError, ValueError):
        return text


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--seeds={shown(text)} is not a whole number; write --seeds=0,1,2") from error
