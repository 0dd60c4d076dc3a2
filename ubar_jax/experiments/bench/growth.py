"""Growth of the cost of an aggregation with the degree, the number of nodes and of parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ubar_jax.experiments.bench.measure import ready, seconds
from ubar_jax.experiments.bench.scenes import Scene, growth_scene, one_aggregation
from ubar_jax.experiments.bench.tables import PAPER
from ubar_jax.parts import topology

# Cost per node and round: from the paper's proposition if it has one, else that of plain sorting.
PROPOSED = {
    "average": "|N| d",
    "ubar": "|N| d (paper)",
    "dkrum": "|N|^2 d (paper)",
    "dmedian": "|N| log|N| d (sorting)",
    "bridge": "|N| log|N| d (sorting)",
    "dbulyan": "|N|^2 d (paper)",
}
SORTING = ("dmedian", "bridge")  # order statistics and nothing else
EXPONENT = 1.15  # highest acceptable exponent of n at a fixed degree
PER_SLOT = 2.5  # how much the time per value and slot of order statistics may grow, from LEAST_SLOTS on
LEAST_SLOTS = 32


class Axis(NamedTuple):
    """One panel of the growth figure: what varies, and what is fixed."""

    label: str
    fixed: str
    sizes: tuple[int, ...]
    fitted: int  # the exponent is that of the sizes from here on
    make: Callable[[int], Scene]


AXES = {
    "degree": Axis(  # a ring lattice: networkx does not find dense random regular graphs
        "degree |N|",
        "300 nodes, d = 2,000",
        (8, 16, 32, 48, 64, 96, 128, 192, 256),
        32,
        lambda degree: growth_scene(topology.small_world(0, 300, degree, rewire=0.0), 2_000),
    ),
    "n": Axis(  # d of the mlp on digits
        "nodes n",
        "degree 8, d = 7,510",
        (20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000),
        200,
        lambda n: growth_scene(topology.random_regular(0, n, 8), 7_510),
    ),
    "d": Axis(
        "parameters d",
        "30 nodes, degree 12",
        (1_000, 3_000, 10_000, 30_000, 100_000, 300_000),
        10_000,
        lambda d: growth_scene(topology.random_regular(0, 30, 12), d),
    ),
}


def measure_growth(repeats: int) -> dict[str, dict[str, Any]]:
    """Measures and prints our CPU seconds along every axis, and the exponents."""
    print("\ngrowth: CPU seconds per aggregation, one core; ubar with a loss that reads the model once")
    grown = {}
    for key, axis in AXES.items():
        times: dict[str, list[float]] = {name: [] for name in PAPER}
        values = []  # per size: messages times coordinates, with empty slots
        for size in axis.sizes:
            scene = axis.make(size)
            values.append(scene.graph.mask.size * scene.own.shape[1])
            for name in PAPER:
                times[name] += seconds([ready(*one_aggregation(scene, name))], repeats)
            print(
                f"{key} {size}: " + ", ".join(f"{name} {times[name][-1]:.4f}" for name in PAPER), flush=True
            )
        fits = {name: exponent(axis.sizes, times[name], axis.fitted) for name in PAPER}
        grown[key] = {
            "sizes": axis.sizes,
            "fixed": axis.fixed,
            "fitted_from": axis.fitted,
            "seconds": times,
            "exponents": fits,
        }
        if key == "degree":
            grown[key]["ns_per_value_and_slot"] = {
                name: [1e9 * t / size for t, size in zip(times[name], values, strict=True)]
                for name in SORTING
            }
    print(f"\nexponents, fitted from {', '.join(f'{k} {AXES[k].fitted:,}' for k in grown)} on")
    print(f"{exponent_table(grown)}\n{slot_table(grown['degree'])}")
    return grown


def exponent(sizes: Sequence[int], times: Sequence[float], least: int) -> float:
    """The slope of log time against log size, by least squares on the sizes from `least` on."""
    chosen = np.asarray(sizes) >= least
    return float(np.polyfit(np.log(sizes)[chosen], np.log(times)[chosen], 1)[0])


def exponent_table(grown: dict[str, dict[str, Any]]) -> str:
    """The fitted exponents of the whole network's cost, and the cost per node from PROPOSED."""
    lines = [f"{'rule':12}" + "".join(f"{key:>8}" for key in grown) + "   per node, one node at a time"]
    for name in PAPER:
        fitted = "".join(f"{grown[key]['exponents'][name]:8.2f}" for key in grown)
        missed = f"  missed: n at most {EXPONENT}" if grown["n"]["exponents"][name] > EXPONENT else ""
        lines.append(f"{name:12}{fitted}   {PROPOSED[name]:24}{missed}".rstrip())
    return "\n".join(lines)


def slot_table(degrees: dict[str, Any]) -> str:
    """Nanoseconds per value and slot of the order statistics, and how much they grow."""
    lines = [f"{'ns per value and slot at degree':34}" + "".join(f"{size:>7}" for size in degrees["sizes"])]
    for name, taken in degrees["ns_per_value_and_slot"].items():
        found = slot_growth(degrees["sizes"], taken)
        missed = f"  missed: at most {PER_SLOT:g}" if found > PER_SLOT else ""
        numbers = "".join(f"{t:7.2f}" for t in taken)
        lines.append(f"{name:34}{numbers}   grows {found:.1f} times from {LEAST_SLOTS} on{missed}")
    return "\n".join(lines)


def slot_growth(sizes: Sequence[int], taken: Sequence[float]) -> float:
    """The longest time from LEAST_SLOTS on, over that at LEAST_SLOTS."""
    start = list(sizes).index(LEAST_SLOTS)
    return max(taken[start:]) / taken[start]
