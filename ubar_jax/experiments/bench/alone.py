"""Times one column of the table of wall seconds in a process of its own, for `bench wall`.

Arguments: the model, the column, repeats, the folder of the torch programs, and the rows. Prints the wall
seconds per row as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ubar_jax.engine import devices
from ubar_jax.experiments.bench import scenes
from ubar_jax.experiments.bench.measure import ready, seconds
from ubar_jax.experiments.bench.scenes import BATCH, NODES, ROUNDS
from ubar_jax.experiments.bench.tables import ALONE, OURS

LEAST = 1.0  # seconds that a row is timed: the first calls of a short one are slower than in a run


def timed(model: str, column: str, rows: Sequence[str], repeats: int, folder: Path) -> dict[str, float]:
    """Wall seconds of every row that the column has: ours on all devices or on one, or a torch program's."""
    count = devices.use_devices() if column == OURS else 1
    scene, found = scenes.make_scene(model, NODES, BATCH), {}

    def time_of(work: Callable[[], Any]) -> float:
        return seconds([work], repeats, time.perf_counter, least=LEAST)[0]

    if column in (OURS, ALONE):
        for row in rows:
            found[row] = time_of(ready(*scenes.ours_in_a_run(scene, row), count)) / ROUNDS
        return found
    program = scenes.load_torch(folder)[column]
    program.torch.set_num_threads(len(os.sched_getaffinity(0)))
    for row in rows:
        if work := scenes.in_torch(scene, row, program):
            found[row] = time_of(work)
    return found


if __name__ == "__main__":
    model, column, repeats, folder, *rows = sys.argv[1:]
    print(json.dumps(timed(model, column, rows, int(repeats), Path(folder))))
