"""`python -m ubar_jax.experiments.bench [SECTION ...]`; default: all sections.

wall: wall seconds on all cores, every column in a process of its own: training, the paper's rules and whole
rounds, ours over one and over all devices, several steps in one program as in a run. All other sections use
CPU seconds on one core. peak: matrix products and copies. training: one step of all nodes, per model. mlp,
lenet, cnn: one aggregation per rule. rounds: whole rounds. attacks, growth, sweep, compile.
The sections before attacks compare with two torch programs in the folder benchmarks, which need the benchmark
extra: a plain loop over nodes (serial_torch.py) and a tuned one (tuned_torch.py). Every section writes its
JSON, and its figure if it has one, when it is done.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from ubar_jax.engine import devices
from ubar_jax.experiments import command
from ubar_jax.experiments.bench import costs, figures
from ubar_jax.experiments.bench.growth import measure_growth
from ubar_jax.experiments.bench.measure import BUDGET, limits, machine
from ubar_jax.experiments.bench.scenes import BATCH, CONNECTION, MODELS, NODES, ROUND, TRAINING, load_torch
from ubar_jax.experiments.bench.tables import PAPER, Table, peak, time_tables, torch_of, wall_tables
from ubar_jax.parts.aggregation import rules
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps import results

ROWS = {TRAINING: (TRAINING,), "rounds": (ROUND + "average", ROUND + "ubar")}  # for every model
SECTIONS = ("wall", "peak", TRAINING, *MODELS, "rounds", "attacks", "growth", "sweep", "compile")


def main(argv: Sequence[str]) -> None:
    sections, repeats = argv[1:] or SECTIONS, flags.FLAGS.repeats
    if unknown := set(sections) - set(SECTIONS):
        raise ConfigError(f"unknown section {unknown.pop()!r}; there are {', '.join(SECTIONS)}")
    folder = results.open_folder(flags.FLAGS.results)
    about: dict[str, Any] = {}
    if list(sections) != ["wall"]:
        if "wall" in sections:
            again = [sys.executable, "-m", "ubar_jax.experiments.bench", "wall"]
            same = [f"--repeats={repeats}", f"--results={folder}", f"--torch={flags.FLAGS.torch}"]
            subprocess.run([*again, *same], check=True)
            sections = [section for section in sections if section != "wall"]
        # Set before jax and torch start their threads, which inherit it.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    else:
        about["devices"] = devices.use_devices()  # before jax starts
    programs = load_torch(Path(flags.FLAGS.torch))
    if torch := torch_of(programs):
        print(f"compared with the torch programs in {flags.FLAGS.torch}")
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    else:
        print(
            f"no torch programs to compare with: they need the folder {flags.FLAGS.torch} of a checkout "
            "(--torch) and pip install 'ubar_jax[benchmark]'"
        )
    about |= machine(torch) | {"repeats": repeats, "budget": BUDGET}
    about |= {"nodes": NODES, "connection": CONNECTION, "batch": BATCH}
    print(about)

    found: dict[str, Any]
    tables: dict[str, Table] = {}  # of this process, for the figure
    for section in sections:
        start = time.perf_counter()
        if section in (*ROWS, *MODELS):
            models: Iterable[str] = MODELS if section in ROWS else [section]
            rows = ROWS[section] if section in ROWS else tuple(rules.parts)
            found = time_tables(models, rows, repeats, programs)
            about["limits"] = limits(repeats, time.process_time, torch)
            for model, table in found.items():
                tables.setdefault(model, {}).update(table)
            figures.draw_tables(tables, "CPU seconds", folder / "time_table")
        elif section == "wall":
            if about["load_before"] > 0.5:
                print("wall seconds need an idle machine: threads that share a core wait for each other")
            rows = (TRAINING, *PAPER, *ROWS["rounds"])
            found = wall_tables(MODELS, rows, repeats, programs, flags.FLAGS.torch)
            about["limits"] = limits(repeats, time.perf_counter, torch)
            figures.draw_tables(found, "wall seconds", folder / "wall")
        elif section == "growth":
            found = measure_growth(repeats)
            figures.draw_growth(found, folder / "growth")
        elif section == "peak":
            found = peak(repeats, programs)
        elif section == "attacks":
            found = costs.attack_costs(repeats)
        elif section == "sweep":
            found = costs.sweep_speed()
        else:
            found = costs.compile_times()
        (folder / f"{section}.json").write_text(json.dumps({**about, section: found}, indent=1) + "\n")
        print(f"({section}: {time.perf_counter() - start:.0f} s)", flush=True)
    print(f"\nresults in {folder}")


if __name__ == "__main__":
    flags.DEFINE_integer("repeats", 7, "Number of timings; the median is reported.", lower_bound=1)
    flags.DEFINE_string(
        "torch",
        "benchmarks",
        "Folder with the torch programs, the only files read from outside the package.",
    )
    flags.DEFINE_string("results", "results/bench", "Folder for the tables (JSON) and the figures.")
    command.must_be_named("results")
    command.launch(main)
