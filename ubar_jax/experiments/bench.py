"""What an aggregation costs on one CPU core: `python -m ubar_jax.experiments.bench [TABLE ...]`.

mlp, cnn: CPU seconds per aggregation of every rule at its defaults, for 30 nodes with that model, next to
the same rule as a per-node torch loop (benchmarks/serial_torch.py; with the benchmark extra). attacks: CPU
seconds of every attack next to a training step. growth: how our cost grows with the degree, the number of
nodes and the number of parameters, with a figure. Without words all four, in some fifteen minutes.
"""

import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import app, flags, logging
from matplotlib.figure import Figure

from ubar_jax import linalg, nn, results, topology
from ubar_jax.attacks import attacks
from ubar_jax.experiments.plot import COLOURS, DASHES, MARKERS, STYLE
from ubar_jax.models import make_task
from ubar_jax.rules import aggregate, count_neighbours, rules
from ubar_jax.types import Graph, Inbox, View

MODELS = {"mlp": (28, 28, 1), "cnn": (32, 32, 3)}
TABLES = (*MODELS, "attacks", "growth")
NODES, CONNECTION, BATCH = 30, 0.4, 256
BUDGET = 10  # CPU seconds after which a comparison is not repeated any more
NOISE = 1e-2  # deviation of the models from x_0, per parameter

GROWING = ("average", "ubar", "dkrum", "dmedian", "bridge", "dbulyan")
# The cost of one node and round: the paper's proposition where it has one, else that of plain sorting.
PROPOSED = {
    "average": "|N| d",
    "ubar": "|N| d (paper)",
    "dkrum": "|N|^2 d (paper)",
    "dmedian": "|N| log|N| d (sorting)",
    "bridge": "|N| log|N| d (sorting)",
    "dbulyan": "|N|^2 d (paper)",
}


class Scene(NamedTuple):
    """A network in the middle of a round: models, graph, batches and own losses."""

    own: jax.Array  # [n, d]
    graph: Graph  # [n, K]
    batch: Any  # what `loss` needs beside a model, leaves [n, ...]
    own_loss: jax.Array  # [n]
    loss: Callable  # model [d], one node's batch -> []
    model: str


class Axis(NamedTuple):
    """One panel of the growth figure: what varies, and what is fixed."""

    label: str
    fixed: str
    sizes: tuple[int, ...]
    make: Callable[[int], Scene]


def make_scene(model: str, shape: tuple[int, ...], benign: int, batch: int, byzantine: int = 0) -> Scene:
    """The paper's graph; models x_0 plus noise, a batch of random images for each node."""
    nodes = benign + byzantine
    task = make_task(model, shape, 10)
    one, unravel = jax.flatten_util.ravel_pytree(jax.jit(task.init)(jax.random.key(0)))
    rng = np.random.default_rng(0)
    own = np.asarray(one) + NOISE * rng.standard_normal((nodes, one.size), np.float32)
    x = rng.standard_normal((nodes, batch, *shape), np.float32)
    y = rng.integers(0, 10, (nodes, batch))
    network = topology.erdos_renyi(0, (benign, byzantine), CONNECTION)

    def loss(vector, batch):
        return task.loss(unravel(vector), *batch)

    return _scene(own, network, (x, y.astype(np.int32)), loss, model)


def growth_scene(degree: int, nodes: int, d: int) -> Scene:
    """A ring lattice; the loss reads the model once, so that stage 2 of UBAR does not hide the rest."""
    own = np.random.default_rng(0).standard_normal((nodes, d), np.float32)
    network = topology.small_world(0, nodes, degree, rewire=0.0)
    return _scene(own, network, (), lambda vector, batch: jnp.mean(jnp.square(vector)), "quadratic")


def _scene(own, network, batch, loss: Callable, model: str) -> Scene:
    own, graph, batch = jax.device_put((own, topology.to_arrays(network), batch))
    own_loss = jax.jit(lambda own, batch: nn.each(loss, own, batch))(own, batch)
    return Scene(own, graph, batch, own_loss, loss, model)


def aggregator(scene: Scene, name: str, benign: int) -> tuple[Callable, np.ndarray]:
    """`mix(arrays, count, sent) -> (mixed, info)` of the benign receivers, and the rule's count.

    `arrays` are (own, graph, batch, own_loss) of the scene, to be passed through jit.
    """
    rule = rules.parse(name)
    degree, _, count = count_neighbours(rule, scene.graph, benign, benign)
    pairs = topology.round_up(int(np.sum(rule.part.traits["pairs"](degree, count))))

    def mix(arrays, count, sent):
        own, graph, batch, own_loss = arrays
        heard = Graph(*(a[:benign] for a in graph))

        def loss_of(receiver, row):
            def one(i, j):
                return scene.loss(sent[j], jax.tree.map(lambda leaf: leaf[i], batch))

            return nn.each(one, receiver, row)

        inbox = Inbox(
            own=own[:benign],
            sent=sent,
            rows=heard.neighbours,
            graph=heard,
            degree=jnp.sum(heard.mask, axis=1),
            count=count,
            t=jnp.zeros((), jnp.int32),
            own_loss=own_loss[:benign],
            loss_of=loss_of,
            pairs=pairs,
        )
        return aggregate(rule, inbox)

    return mix, count


def timed(function: Callable, *arguments) -> Callable[[], Any]:
    """A call of the jitted function that waits for its result; the arrays are arguments of the program."""
    jitted, arguments = jax.jit(function), jax.device_put(arguments)
    return lambda: jax.block_until_ready(jitted(*arguments))


def in_torch(scene: Scene, name: str, count: np.ndarray, serial: ModuleType) -> Callable[[], list]:
    """The same aggregation as a loop over nodes."""
    import torch

    torch.set_num_threads(1)
    models, neighbours, mask, own_loss, x, y = (
        np.array(a) for a in (scene.own, *scene.graph, scene.own_loss, *scene.batch)
    )
    ids = [row[real].tolist() for row, real in zip(neighbours, mask, strict=True)]
    images = torch.from_numpy(x).movedim(-1, 2).contiguous()
    arguments = (
        list(torch.from_numpy(models)),
        ids,
        count.tolist(),
        torch.from_numpy(own_loss),
        list(zip(images, torch.from_numpy(y).long(), strict=True)),
        serial.LOSSES[scene.model],
    )
    return lambda: serial.aggregate(serial.RULES[name], *arguments)


def contenders(scene: Scene, name: str, serial: ModuleType | None) -> list[Callable]:
    """[ours] or, where the loop has the rule, [ours, the loop's]: each call is one aggregation."""
    mix, count = aggregator(scene, name, len(scene.own))
    both = [timed(lambda arrays, count: mix(arrays, count, arrays[0])[0], scene[:4], count)]
    if serial is not None and name in serial.RULES:
        both.append(in_torch(scene, name, count, serial))
    return both


def attack_costs(repeats: int) -> dict[str, Any]:
    """Every attack at its defaults, 30 benign and 30 Byzantine nodes, next to a training step of 30 nodes."""
    scene = make_scene("mlp", MODELS["mlp"], NODES, BATCH, byzantine=NODES)
    mix, count = aggregator(scene, "ubar", NODES)
    key = jax.random.key(0)
    gradient = jax.value_and_grad(scene.loss)
    rows = {}
    print(f"\nattacks: CPU seconds a round, {NODES} + {NODES} nodes, d = {scene.own.shape[1]:,}, one core")
    for batch in (BATCH, 64):
        arrays = jax.tree.map(lambda leaf, b=batch: leaf[:NODES, :b], scene.batch)
        step = timed(lambda own, batch: nn.each(gradient, own, batch), scene.own[:NODES], arrays)
        (rows[f"training, batch {batch}"],) = cpu_seconds([step], repeats)
    network = topology.erdos_renyi(0, (NODES, NODES), CONNECTION)
    benign_slots = topology.benign_slots(topology.to_arrays(network), NODES)
    for name in attacks.parts:
        attack = attacks.parse(name)
        setup = attack.part.traits["setup"]
        numbers = (
            setup(network, NODES, NODES, 1000, rules.parse("ubar"), **attack.of(setup))[0] if setup else {}
        )

        def send(key, arrays, count, numbers, attack=attack):
            own, graph, *_ = arrays
            now = jnp.asarray(1000, jnp.int32)
            deployed = partial(mix, arrays, count)
            view = View(own, -own, graph, NODES, NODES, benign_slots, now, deployed)
            return attack(key, view, **numbers)

        (rows[name],) = cpu_seconds([timed(send, key, scene[:4], count, numbers)], repeats)
    for name, seconds in rows.items():
        print(f"{name:22}{seconds:10.4f}")
    return {"deployed": "ubar", "seconds": rows}


def cpu_seconds(functions: Sequence[Callable], repeats: int) -> list[float]:
    """Median CPU seconds of each, called in turns after one call each that compiles and warms up.

    Fewer than `repeats` calls, at least one, where they take longer than BUDGET together.
    """
    for function in functions:
        function()
    seen = [[] for _ in functions]
    while len(seen[0]) < repeats and sum(map(sum, seen)) < BUDGET:
        for function, seconds in zip(functions, seen, strict=True):
            start = time.process_time()
            function()
            seconds.append(time.process_time() - start)
    return [statistics.median(seconds) for seconds in seen]


def load_serial() -> ModuleType | None:
    """benchmarks/serial_torch.py of this checkout; None without it or without torch."""
    path = Path(__file__).parents[2] / "benchmarks" / "serial_torch.py"
    if importlib.util.find_spec("torch") is None or not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("serial_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def aggregation(model: str, repeats: int, serial: ModuleType | None) -> dict[str, Any]:
    """Every registered rule at its defaults: the rows of a table, printed as they come."""
    scene = make_scene(model, MODELS[model], NODES, BATCH)
    d, rows = scene.own.shape[1], {}
    print(f"\n{model}, d = {d:,}: CPU seconds per aggregation, {NODES} nodes, one core")
    print(f"{'rule':18}{'ubar_jax':>10}{'torch loop':>12}{'ratio':>8}")
    for name in rules.parts:
        mine, *loop = cpu_seconds(contenders(scene, name, serial), repeats)
        rows[name] = {"ubar_jax": mine, "torch": loop[0] if loop else None}
        other = f"{loop[0]:12.4f}{loop[0] / mine:8.1f}" if loop else f"{'-':>12}{'-':>8}"
        print(f"{name:18}{mine:10.4f}{other}", flush=True)
    return {"d": d, "nodes": NODES, "connection": CONNECTION, "batch": BATCH, "seconds": rows}


AXES = {
    "degree": Axis(
        "degree |N|",
        "130 nodes, d = 10,000",
        (8, 12, 16, 24, 32, 48, 64, 96, 128),
        lambda degree: growth_scene(degree, 130, 10_000),
    ),
    "n": Axis(
        "nodes n",
        "degree 8, d = 10,000",
        (10, 20, 40, 80, 120, 160, 200),
        lambda n: growth_scene(8, n, 10_000),
    ),
    "d": Axis(
        "parameters d",
        "30 nodes, degree 12",
        (1_000, 3_000, 10_000, 30_000, 100_000, 300_000),
        lambda d: growth_scene(12, 30, d),
    ),
}


def growth(repeats: int) -> dict[str, dict[str, Any]]:
    """Our CPU seconds along every axis, and the exponents, printed as they come."""
    print("\ngrowth: CPU seconds per aggregation, one core; ubar with a loss that reads the model once")
    grown = {}
    for key, axis in AXES.items():
        times = {name: [] for name in GROWING}
        for size in axis.sizes:
            scene = axis.make(size)
            for name in GROWING:
                times[name] += cpu_seconds(contenders(scene, name, None), repeats)
            print(
                f"{key} {size}: " + ", ".join(f"{name} {times[name][-1]:.4f}" for name in GROWING), flush=True
            )
        fits = {name: exponent(axis.sizes, times[name]) for name in GROWING}
        grown[key] = {"sizes": axis.sizes, "fixed": axis.fixed, "seconds": times, "exponents": fits}
    print(f"\nexponents, fitted on the upper half of each range\n{exponent_table(grown)}")
    return grown


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The slope of log time against log size, by least squares on the upper half of the sizes."""
    upper = len(sizes) // 2
    return float(np.polyfit(np.log(sizes[upper:]), np.log(times[upper:]), 1)[0])


def exponent_table(grown: dict[str, dict[str, Any]]) -> str:
    """The fitted exponents of the whole network's cost, next to one node's as stated elsewhere."""
    lines = [f"{'rule':12}" + "".join(f"{key:>8}" for key in grown) + "   per node, one node at a time"]
    for name in GROWING:
        fitted = "".join(f"{grown[key]['exponents'][name]:8.2f}" for key in grown)
        lines.append(f"{name:12}{fitted}   {PROPOSED[name]}")
    return "\n".join(lines)


def draw(grown: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel an axis, a line a rule; legends give the exponents."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        for panel, key in zip(figure.subplots(1, len(grown), sharey=True), grown, strict=True):
            data = grown[key]
            for i, name in enumerate(GROWING):
                style = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i], "markersize": 4}
                label = f"{name}  {data['exponents'][name]:.2f}"
                panel.loglog(data["sizes"], data["seconds"][name], label=label, **style)
            if key == "degree":
                panel.axvline(linalg.FUSED_SLOTS, color="0.5", lw=1)
                note = "sorting network fused\nup to here, then by stages"
                panel.annotate(note, (linalg.FUSED_SLOTS - 3, 2e-4), ha="right", fontsize=8, color="0.3")
            ticks = data["sizes"][::2]
            panel.set_xticks(ticks, [f"{size:,}" for size in ticks])
            panel.minorticks_off()
            panel.set_xlabel(AXES[key].label)
            panel.set_title(data["fixed"])
            panel.legend(title=f"exponent of {key}", loc="upper left", fontsize=8)
        figure.axes[0].set_ylabel("CPU seconds per aggregation\nof the whole network, one core")
        figure.savefig(path, dpi=150)


def cpu_name() -> str:
    """The processor's model name as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor()
    )


def main(argv: Sequence[str]) -> None:
    # Before jax and torch start their threads, which inherit it.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    logging.set_verbosity(logging.WARNING)  # jax tells of every backend that it did not find
    tables, repeats = argv[1:] or TABLES, flags.FLAGS.repeats
    if unknown := set(tables) - set(TABLES):
        raise app.UsageError(f"unknown table {unknown.pop()!r}; there are {', '.join(TABLES)}")
    folder = results.open_folder(flags.FLAGS.results)
    serial = load_serial()
    versions = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    if serial is None:
        print("no torch loop to compare with: pip install -e '.[benchmark]' in a checkout")
    else:
        versions["torch"] = serial.torch.__version__
    machine = {"cpu": cpu_name(), "device": "CPU, one core", "versions": versions}
    print(machine)
    for table in tables:
        if table == "growth":
            found = growth(repeats)
            draw(found, folder / "growth.png")
        elif table == "attacks":
            found = attack_costs(repeats)
        else:
            found = aggregation(table, repeats, serial)
        report = {**machine, "repeats": repeats, "budget": BUDGET, table: found}
        (folder / f"{table}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nresults in {folder}")


if __name__ == "__main__":
    flags.DEFINE_integer("repeats", 7, "Timings of which the median is taken.", lower_bound=1)
    flags.DEFINE_string("results", "results/bench", "Folder for the tables (JSON) and the figure.")
    app.run(main)
