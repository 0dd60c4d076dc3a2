"""What all figures share: runs grouped by their settings, baselines next to them, settings as words."""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ubar_jax.config import REGISTRIES, Config
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps.results import Run, varying


class Bound(NamedTuple):
    """How a baseline is shown, and which settings make no difference to it."""

    label: str
    dashes: str
    place: int  # in heat maps: before (-1) or after (1) the rules
    free: tuple[str, ...]


BASELINE = "(baseline)"  # averaging without attackers, as `reproduce` names it; no rule has such a name
BOUNDS = {
    BASELINE: Bound("average, no attackers", "-", -1, ("attack", "judge", "byzantine_ratio")),
    "oracle": Bound("ceiling (oracle)", "--", -1, ("attack", "judge")),
    "local": Bound("floor (local)", ":", 1, ("attack", "judge", "topology", "alpha", "order")),
}


# Settings that panels may show. Lines are rules, bands are seeds; rho and connection are in the specs.
SETTINGS = ("attack", "byzantine_ratio", *(field.name for field in dataclasses.fields(Config)))
SETTINGS = tuple(n for n in dict.fromkeys(SETTINGS) if n not in ("rule", "seed", "rho", "connection"))


def short(name: str, value: Any, among: Sequence = ()) -> str:
    """A setting as a label: a spec without arguments that have their default value.

    Except rho, and arguments in which the values `among` which it is shown differ.
    """
    if not isinstance(value, str):
        return "default" if value is None else f"{value:g}"
    try:
        spec, *others = (REGISTRIES[name].parse(each) for each in (value, *among))
    except (KeyError, ConfigError):  # not a spec, or a plugin's
        return value
    known = {k: [parameter.default] for k, parameter in spec.part.parameters.items()}
    for other in others:
        for k, v in other.arguments if other.part is spec.part else ():
            known[k].append(v)
    shown = [(k, v) for k, v in spec.arguments if k == "rho" or any(u != v for u in known[k])]
    inside = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown)
    return f"{spec.part.name}({inside})" if inside else spec.part.name


def words(labels: dict[str, Any], among: Sequence = ()) -> str:
    """{'byzantine_ratio': 0.5, 'topology': 'ring'} -> 'byzantine ratio 0.5, topology ring'; see `short`."""
    return ", ".join(
        f"{name.replace('_', ' ')} {short(name, value, among)}" for name, value in labels.items()
    )


def settings(runs: Sequence[Run], name: str) -> list:
    """The values of a setting: numbers by size, specs in the order of their registry."""
    known = list(REGISTRIES[name].parts) if name in REGISTRIES else []

    def order(value):
        part = str(value).split("(")[0]
        rank = known.index(part) if part in known else len(known)
        return rank, 0 if isinstance(value, str | None) else value, _natural(str(value))

    return sorted({getattr(run.config, name) for run in runs}, key=order)


def _natural(text: str) -> list[str | float]:
    """A key by which `a(x=3)` comes before `a(x=10)`: words and numbers in turns."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def split(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[dict[str, Any], list[Run]]]:
    """The runs grouped by settings: [({name: value}, runs), ...], without empty groups."""
    if not names:
        return [({}, list(runs))]
    name, *rest = names
    return [
        ({name: value, **labels}, group)
        for value in settings(runs, name)
        for labels, group in split([run for run in runs if getattr(run.config, name) == value], rest)
    ]


def at_every_ratio(runs: Sequence[Run]) -> list[Run]:
    """Copies each run without attackers to every Byzantine ratio that occurs with its other settings."""

    def others(run):
        return dataclasses.replace(run.config, rule="", attack="", byzantine_ratio=0, seed=0)

    ratios = collections.defaultdict(set)
    for run in runs:
        if run.config.attack != "none":
            ratios[others(run)].add(run.config.byzantine_ratio)
    return [
        run._replace(config=dataclasses.replace(run.config, byzantine_ratio=ratio))
        for run in runs
        for ratio in (run.config.attack == "none" and ratios[others(run)]) or [run.config.byzantine_ratio]
    ]


def with_bounds(runs: Sequence[Run]) -> list[Run]:
    """The runs, with each bound copied to all settings of other rules that it holds for (`Bound.free`).

    Neither `local` nor `oracle` uses what Byzantine nodes send, nor takes losses: one run holds for every
    attack and judge. `local` does not mix, so it also holds for every topology, alpha and order. All other
    settings must agree. The Byzantine ratio must, because more attackers leave the benign nodes smaller
    shares of the examples; so runs without attackers do not hold for attacks. A run with exactly the
    settings comes first. A run that holds for no settings of another rule stays where it is. `reproduce`
    adds the paper's baseline, averaging without attackers, which holds for every ratio.
    """

    def key(config: Config, free: Sequence[str] = ()) -> tuple:
        return tuple(getattr(config, name) for name in (*SETTINGS, "seed") if name not in free)

    rules = [run for run in runs if run.config.rule not in BOUNDS]
    wanted = {key(run.config): run.config for run in rules}.values()
    found = list(rules)
    for name, bound in BOUNDS.items():
        own = [run for run in runs if run.config.rule == name]
        exact, close = ({key(run.config, free): run for run in own} for free in ((), bound.free))
        for config in wanted:
            if run := exact.get(key(config)) or close.get(key(config, bound.free)):
                found.append(run._replace(config=dataclasses.replace(config, rule=name)))
        used = {key(config, bound.free) for config in wanted}
        found += [run for run in own if key(run.config, bound.free) not in used]
    return found


def choose_panels(runs: Sequence[Run], rows: str | None, columns: str | None) -> tuple[str, str]:
    """The settings of rows and columns: as given, else those that vary (attack first, then ratio)."""
    if rows is not None and rows == columns:
        raise ConfigError(f"--rows and --columns are both {rows!r}; give two different settings")
    free = [name for name in (*varying(runs, SETTINGS), *SETTINGS) if name not in (rows, columns)]
    columns = columns or free[0]
    return rows or next(name for name in free if name != columns), columns


def rule_label(rule: str) -> str:
    """A rule in legends and heat maps."""
    return BOUNDS[rule].label if rule in BOUNDS else short("rule", rule)


def seeds_of(runs: Sequence[Run], *names: str) -> str:
    """How many seeds a rule has at each value of the settings `names`: '5 seeds' or '1 to 5 seeds'."""
    counts = {len(group) for _, group in split(runs, ["rule", *names])}
    return f"{max(counts)} seeds" if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"


def run_words(run: Run) -> str:
    """The title of a run's panel, two lines."""
    rule, attack = (short(name, getattr(run.config, name)) for name in ("rule", "attack"))
    return f"{rule}, ratio {run.config.byzantine_ratio:g}, seed {run.config.seed}\n{attack}"


def file_name(stem: str, labels: dict[str, Any]) -> str:
    """'heat_map', {'nodes': 20} -> 'heat_map_nodes_20'."""
    return re.sub(r"[^\w.=-]+", "_", f"{stem} {words(labels)}").rstrip("_")[:200]
