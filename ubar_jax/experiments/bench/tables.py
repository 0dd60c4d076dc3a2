"""The paper's time table: training and every rule, compared with the torch loop and our targets."""

import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from ubar_jax.experiments.bench import scenes
from ubar_jax.experiments.bench.measure import limits, ready, seconds
from ubar_jax.experiments.bench.scenes import BATCH, NODES, ROUND, ROUNDS, TRAINING

# Lowest acceptable ratio of CPU seconds on one core: torch loop / ours.
TARGETS = {
    "mlp": {TRAINING: 1.0, "ubar": 1.3, "dkrum": 20, "dmedian": 8, "bridge": 8, "dbulyan": 8},
    "lenet": {TRAINING: 1.2, "ubar": 1.8, "dkrum": 15, "dmedian": 8, "bridge": 8, "dbulyan": 8},
    "cnn": {TRAINING: 1.0, "ubar": 1.3, "dkrum": 15, "dmedian": 8, "bridge": 8, "dbulyan": 8},
}
PAPER = ("average", "ubar", "dkrum", "dmedian", "bridge", "dbulyan")  # the rules of the paper's table

Table = dict[str, dict[str, Any]]  # by row


def time_tables(
    models: Iterable[str],
    rows: Sequence[str],
    repeats: int,
    serial: ModuleType | None,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Table]:
    """Seconds per row, ours and the loop's, with ratio, target and share of the machine's peak."""
    best = limits(repeats, clock, serial)
    unit, aimed = ("CPU", True) if clock is time.process_time else ("wall", False)
    print(f"\n{unit} seconds per round, {NODES} nodes, batch {BATCH}; share of the measured peak of", end=" ")
    print(f"{best['peak_gflops']:.0f} GFLOP/s (training)\nor of {best['bandwidth_gbs']:.0f} GB/s (rules)")
    tables: dict[str, Table] = {}
    for model in models:
        scene = scenes.make_scene(model, NODES, BATCH)
        print(f"\n{model + f', d = {scene.own.shape[1]:,}':28}{'ubar_jax':>10}{'share':>7}", end="")
        print(f"{'torch loop':>12}{'share':>7}{'ratio':>8}{'target':>8}")
        tables[model] = {}
        for row in rows:
            loop = serial and scenes.in_torch(scene, row, serial)
            both = [ready(*scenes.ours(scene, row)), *([loop] if loop else [])]
            taken = dict(zip(("ubar_jax", "torch"), seconds(both, repeats, clock), strict=False))
            if row.startswith(ROUND):
                taken["ubar_jax"] /= ROUNDS
            found: dict[str, Any] = {"seconds": taken}
            if loop:
                found["ratio"] = taken["torch"] / taken["ubar_jax"]
            if not row.startswith(ROUND):
                least = (
                    scenes.training_flops(scene) / (1e9 * best["peak_gflops"])
                    if row == TRAINING
                    else scenes.least_bytes(scene) / (1e9 * best["bandwidth_gbs"])
                )
                found["share"] = {name: least / s for name, s in taken.items()}
            if aimed and row in TARGETS[model]:
                found["target"] = TARGETS[model][row]
            tables[model][row] = found
            print(line(row, found), flush=True)
    return tables


def line(row: str, found: dict[str, Any]) -> str:
    """One row of a printed table; a ratio below its target is marked."""
    text = f"{row:28}"
    for name, width in (("ubar_jax", 10), ("torch", 12)):
        taken, share = found["seconds"].get(name), found.get("share", {}).get(name)
        text += f"{'-':>{width}}" if taken is None else f"{taken:{width}.4f}"
        text += f"{'-':>7}" if share is None else f"{share:7.1%}"
    ratio, target = found.get("ratio"), found.get("target")
    text += f"{'-':>8}" if ratio is None else f"{ratio:8.2f}"
    text += f"{'-':>8}" if target is None else f"{target:8g}"
    return text + ("  missed" if ratio and target and ratio < target else "")


def peak(repeats: int, serial: ModuleType | None) -> dict[str, Any]:
    """Measures and prints the best speed of one core."""
    best = limits(repeats, time.process_time, serial)
    print("\nmatrix products, float32, GFLOP/s on one core")
    for name, of in best["products"].items():
        print(f"{name:8}" + ", ".join(f"{size}: {rate:.1f}" for size, rate in of.items()))
    print("copies, GB/s read and written: ", end="")
    print(", ".join(f"{name} {rate:.1f}" for name, rate in best["copies"].items()))
    return best
