"""The paper's time table: training and every rule, compared with the torch programs and our targets."""

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from ubar_jax.experiments.bench import scenes
from ubar_jax.experiments.bench.measure import limits, ready, seconds
from ubar_jax.experiments.bench.scenes import (
    BATCH,
    NODES,
    ROUND,
    ROUNDS,
    TRAINING,
    Scene,
    ours,
)

# Lowest acceptable ratios, seconds of the torch program / ours: on one core, and in wall seconds on all.
ONE_CORE = {
    "loop": {
        "mlp": {TRAINING: 1.0, "ubar": 1.3, "dkrum": 20, "dmedian": 8, "bridge": 8, "dbulyan": 8},
        "lenet": {TRAINING: 1.2, "ubar": 1.8, "dkrum": 15, "dmedian": 8, "bridge": 8, "dbulyan": 8},
        "cnn": {TRAINING: 1.0, "ubar": 1.3, "dkrum": 15, "dmedian": 8, "bridge": 8, "dbulyan": 8},
    },
    "tuned": {
        "mlp": {TRAINING: 1.06, "average": 0.7, "ubar": 1.38, "dkrum": 1.28}
        | {"dmedian": 6.6, "bridge": 5.7, "dbulyan": 2.1},
        "lenet": {TRAINING: 2.0, "average": 0.78, "ubar": 2.9},
        "cnn": {},
    },
}
WALL = {
    "loop": {"mlp": {}, "lenet": {}, "cnn": {}},
    "tuned": {
        "mlp": {TRAINING: 1.3, "average": 1.0, "ubar": 1.3, "dkrum": 1.0}
        | {"dmedian": 4.4, "bridge": 3.8, "dbulyan": 1.5},
        "lenet": {TRAINING: 2.3, "average": 1.0, "ubar": 2.8, "dkrum": 1.0},
        "cnn": {TRAINING: 1.4, "average": 1.0, "ubar": 2.0, "dkrum": 1.0},
    },
}
PAPER = ("average", "ubar", "dkrum", "dmedian", "bridge", "dbulyan")  # the rules of the paper's table
OURS, ALONE = "ubar_jax", "1 device"  # columns: ours, and in wall seconds ours on a single device

Row = dict[str, Any]
Table = dict[str, Row]  # by row


def time_tables(
    models: Iterable[str], rows: Sequence[str], repeats: int, programs: dict[str, ModuleType]
) -> dict[str, Table]:
    """CPU seconds per row on one core: ours and those of the torch programs, with ratios and targets."""

    def taken(scene: Scene, row: str) -> dict[str, float]:
        work: dict[str, Callable] = {OURS: ready(*ours(scene, row))}
        for name, program in programs.items():
            if theirs := scenes.in_torch(scene, row, program):
                work[name] = theirs
        found = dict(zip(work, seconds(list(work.values()), repeats), strict=True))
        return found | {OURS: found[OURS] / (ROUNDS if row.startswith(ROUND) else 1)}

    best = limits(repeats, time.process_time, torch_of(programs))
    return _tables(models, rows, taken, (OURS, *programs), ONE_CORE, best, "CPU")


def wall_tables(
    models: Iterable[str], rows: Sequence[str], repeats: int, programs: dict[str, ModuleType], folder: str
) -> dict[str, Table]:
    """Wall seconds per row on all cores: ours over all devices and on one, several steps in one program.

    Every column is timed in a process of its own: threads that wait actively for their next work take the
    core of whoever runs next. `folder`: where the torch programs are.
    """
    columns = (OURS, ALONE, *programs)

    @functools.cache
    def columns_of(model: str) -> dict[str, dict[str, float]]:
        return {column: _alone(model, column, rows, repeats, folder) for column in columns}

    def taken(scene: Scene, row: str) -> dict[str, float]:
        found = columns_of(scene.model)
        return {column: found[column][row] for column in columns if row in found[column]}

    best = limits(repeats, time.perf_counter, torch_of(programs))
    return _tables(models, rows, taken, columns, WALL, best, "wall")


def _alone(model: str, column: str, rows: Sequence[str], repeats: int, folder: str) -> dict[str, float]:
    """Wall seconds per row of one column, timed in a process of its own."""
    words = [model, column, str(repeats), folder, *rows]
    command = [sys.executable, "-m", "ubar_jax.experiments.bench.alone", *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _tables(models, rows, taken, columns, targets, best, unit) -> dict[str, Table]:
    """A table per model from the seconds `taken(scene, row)` by column."""
    print(f"\n{unit} seconds per round, {NODES} nodes, batch {BATCH}; share of the measured peak of", end=" ")
    print(f"{best['peak_gflops']:.0f} GFLOP/s (training)\nor of {best['bandwidth_gbs']:.0f} GB/s (rules)")
    tables: dict[str, Table] = {}
    for model in models:
        scene = scenes.make_scene(model, NODES, BATCH)
        print("\n" + heading(f"{model}, d = {scene.own.shape[1]:,}", columns))
        tables[model] = {}
        for row in rows:
            found: Row = {"seconds": taken(scene, row)}
            theirs = {name: spent for name, spent in found["seconds"].items() if name not in (OURS, ALONE)}
            found["ratio"] = {name: spent / found["seconds"][OURS] for name, spent in theirs.items()}
            if not row.startswith(ROUND):
                least = (
                    scenes.training_flops(scene) / (1e9 * best["peak_gflops"])
                    if row == TRAINING
                    else scenes.least_bytes(scene) / (1e9 * best["bandwidth_gbs"])
                )
                found["share"] = {name: least / spent for name, spent in found["seconds"].items()}
            aims = {name: targets[name][model].get(row) for name in theirs}
            found["target"] = {name: aim for name, aim in aims.items() if aim is not None}
            tables[model][row] = found
            print(line(row, found, columns), flush=True)
    return tables


def heading(title: str, columns: Sequence[str]) -> str:
    """The first line of a printed table."""
    text = f"{title:22}"
    for name in columns:
        text += f"{name:>10}{'share':>7}" + ("" if name in (OURS, ALONE) else f"{'ratio':>7}{'target':>7}")
    return text


def line(row: str, found: Row, columns: Sequence[str]) -> str:
    """One row of a printed table; ratios below their targets are named."""
    text, missed = f"{row:22}", []
    for name in columns:
        taken, share = found["seconds"].get(name), found.get("share", {}).get(name)
        text += f"{'-':>10}" if taken is None else f"{taken:10.4f}"
        text += f"{'-':>7}" if share is None else f"{share:7.1%}"
        if name in (OURS, ALONE):
            continue
        ratio, target = found["ratio"].get(name), found["target"].get(name)
        text += f"{'-':>7}" if ratio is None else f"{ratio:7.2f}"
        text += f"{'-':>7}" if target is None else f"{target:7g}"
        if ratio and target and ratio < target:
            missed.append(name)
    return text + (f"  missed: {', '.join(missed)}" if missed else "")


def torch_of(programs: dict[str, ModuleType]) -> ModuleType | None:
    """The torch that the programs use, if there are any."""
    return next((program.torch for program in programs.values()), None)


def peak(repeats: int, programs: dict[str, ModuleType]) -> dict[str, Any]:
    """Measures and prints the best speed of one core."""
    best = limits(repeats, time.process_time, torch_of(programs))
    print("\nmatrix products, float32, GFLOP/s on one core")
    for name, of in best["products"].items():
        print(f"{name:8}" + ", ".join(f"{size}: {rate:.1f}" for size, rate in of.items()))
    print("copies, GB/s read and written: ", end="")
    print(", ".join(f"{name} {rate:.1f}" for name, rate in best["copies"].items()))
    return best
