"""Growth of the cost of an aggregation with the degree, the number of nodes and of parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ubar_jax.experiments.bench.measure import ready, seconds
from ubar_jax.experiments.bench.scenes import Scene, growth_scene, one_aggregation
from ubar_jax.experiments.bench.tables import PAPER

# Cost per node and round: from the paper's proposition if it has one, else that of plain sorting.
PROPOSED = {
    "average": "|N| d",
    "ubar": "|N| d (paper)",
    "dkrum": "|N|^2 d (paper)",
    "dmedian": "|N| log|N| d (sorting)",
    "bridge": "|N| log|N| d (sorting)",
    "dbulyan": "|N|^2 d (paper)",
}


class Axis(NamedTuple):
    """One panel of the growth figure: what varies, and what is fixed."""

    label: str
    fixed: str
    sizes: tuple[int, ...]
    make: Callable[[int], Scene]


AXES = {
    "degree": Axis(
        "degree |N|",
        "130 nodes, d = 10,000",
        (8, 12, 16, 24, 32, 48, 64, 96, 128),
        lambda degree: growth_scene(degree, 130, 10_000),
    ),
    "n": Axis(  # d of the mlp on digits; a degree that is possible with ten nodes
        "nodes n",
        "degree 8, d = 7,510",
        (10, 20, 50, 100, 200, 500, 1000),
        lambda n: growth_scene(8, n, 7_510),
    ),
    "d": Axis(
        "parameters d",
        "30 nodes, degree 12",
        (1_000, 3_000, 10_000, 30_000, 100_000, 300_000),
        lambda d: growth_scene(12, 30, d),
    ),
}


def measure_growth(repeats: int) -> dict[str, dict[str, Any]]:
    """Measures and prints our CPU seconds along every axis, and the exponents."""
    print("\ngrowth: CPU seconds per aggregation, one core; ubar with a loss that reads the model once")
    grown = {}
    for key, axis in AXES.items():
        times: dict[str, list[float]] = {name: [] for name in PAPER}
        for size in axis.sizes:
            scene = axis.make(size)
            for name in PAPER:
                times[name] += seconds([ready(*one_aggregation(scene, name))], repeats)
            print(
                f"{key} {size}: " + ", ".join(f"{name} {times[name][-1]:.4f}" for name in PAPER), flush=True
            )
        fits = {name: exponent(axis.sizes, times[name]) for name in PAPER}
        grown[key] = {"sizes": axis.sizes, "fixed": axis.fixed, "seconds": times, "exponents": fits}
    print(f"\nexponents, fitted on the upper half of each range\n{exponent_table(grown)}")
    return grown


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The slope of log time against log size, by least squares on the upper half of the sizes."""
    upper = len(sizes) // 2
    return float(np.polyfit(np.log(sizes[upper:]), np.log(times[upper:]), 1)[0])


def exponent_table(grown: dict[str, dict[str, Any]]) -> str:
    """The fitted exponents of the whole network's cost, and the cost per node from PROPOSED."""
    lines = [f"{'rule':12}" + "".join(f"{key:>8}" for key in grown) + "   per node, one node at a time"]
    for name in PAPER:
        fitted = "".join(f"{grown[key]['exponents'][name]:8.2f}" for key in grown)
        lines.append(f"{name:12}{fitted}   {PROPOSED[name]}")
    return "\n".join(lines)
