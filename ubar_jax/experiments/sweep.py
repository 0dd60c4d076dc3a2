"""Runs a grid of settings: `python -m ubar_jax.experiments.sweep --flagfile=FILE`.

Repeat a flag to give it several values; the sweep is the product of all lists. `list` instead of
flags prints every rule, attack, topology, data set and model. Flagfiles may include flagfiles
(--flagfile=OTHER on a line of its own); a repeated flag ADDS to the list that a flagfile began.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from tqdm import tqdm

from ubar_jax import data, results
from ubar_jax.attacks import attacks
from ubar_jax.config import Config, canonical
from ubar_jax.experiment import prepare
from ubar_jax.experiments import plot
from ubar_jax.models import models
from ubar_jax.registry import ConfigError
from ubar_jax.rules import rules
from ubar_jax.schedules import optimizers, schedules
from ubar_jax.simulate import simulate
from ubar_jax.topology import topologies

DEFAULT = Config()
flags.DEFINE_multi_string("rule", [DEFAULT.rule], "Aggregation rule, such as ubar(rho=0.4).")
flags.DEFINE_multi_string("attack", [DEFAULT.attack], "Attack, such as gaussian(std=1).")
flags.DEFINE_multi_string("topology", [DEFAULT.topology], "Network, such as torus.")
flags.DEFINE_multi_string("dataset", [DEFAULT.dataset], "digits, mnist, cifar10, any tfds name.")
flags.DEFINE_multi_string("model", [DEFAULT.model], "Model, or package.module:Class.")
flags.DEFINE_multi_string("sharding", [DEFAULT.sharding], "How data is split over the nodes.")
flags.DEFINE_multi_string("optimizer", [DEFAULT.optimizer], "What turns gradients into steps.")
flags.DEFINE_multi_string("schedule", [DEFAULT.schedule], "Learning rate over epochs.")
flags.DEFINE_multi_integer("nodes", [DEFAULT.nodes], "Number of benign nodes.")
flags.DEFINE_multi_float("byzantine_ratio", [DEFAULT.byzantine_ratio], "f / (nodes + f).")
flags.DEFINE_multi_float("connection", [DEFAULT.connection], "Connection ratio of a topology.")
flags.DEFINE_multi_string(
    "rho", [str(DEFAULT.rho)], "Assumed benign share of the neighbours, conservative, or oracle."
)
flags.DEFINE_multi_float("alpha", None, "Weight of own model; unset: the rule's own default.")
flags.DEFINE_multi_float("learning_rate", [DEFAULT.learning_rate], "lambda_0.")
flags.DEFINE_multi_integer("batch_size", [DEFAULT.batch_size], "Examples a node and round.")
flags.DEFINE_multi_integer("rounds", [DEFAULT.rounds], "Rounds.")
flags.DEFINE_multi_string("seeds", [str(DEFAULT.seed)], "Seeds, as 0,1,2 or repeated.")
flags.DEFINE_integer("eval_every", DEFAULT.eval_every, "Rounds between evaluations.")
flags.DEFINE_integer("eval_size", None, "Test examples while training (the last evaluation takes all).")
flags.DEFINE_string("results", "results", "Folder for results and figures.")
flags.DEFINE_bool("save_models", False, "Keep every node's final parameters (models.npz).")
flags.DEFINE_multi_string("plugin", [], "Module or .py file that registers parts of your own.")

GRID = ("rule", "attack", "topology", "dataset", "model", "sharding", "optimizer", "schedule")
GRID += ("nodes", "byzantine_ratio", "connection", "rho", "alpha", "learning_rate", "batch_size")
GRID += ("rounds", "seeds")


def grid(values: dict[str, Sequence]) -> tuple[list[Config], list[str]]:
    """The product of the lists as canonical configs, each once, and the notices it gave."""
    values = {k: list(v) if v else [None] for k, v in values.items()}
    values["rho"] = [_number_or_word(rho) for rho in values["rho"]]
    values["seed"] = [_seed(s) for text in values.pop("seeds") for s in text.split(",")]
    configs, notices = {}, []
    product = list(itertools.product(*values.values()))
    for point in product:
        config, said = canonical(Config(**dict(zip(values, point, strict=True))))
        configs[config.digest()] = config
        notices += said
    if len(configs) < len(product):
        notices.append(f"{len(product)} combinations mean {len(configs)} different runs; duplicates merged")
    return list(configs.values()), list(dict.fromkeys(notices))


def run_all(configs: Sequence[Config], folder: Path, save_models: bool) -> list[results.Run]:
    """Runs what is not in the folder yet, one after the other; a bar shows rounds and time left."""
    wanted = "models.npz" if save_models else "summary.json"
    left = [c for c in configs if not (folder / c.digest() / wanted).exists()]
    if len(left) < len(configs):
        print(f"{len(configs) - len(left)} of {len(configs)} runs are in {folder} already")
    # Every bad setting is found before anything is compiled.
    notices = dict.fromkeys(notice for config in left for notice in prepare(config).notices)
    for notice in notices:
        print(f"notice: {notice}")
    with tqdm(total=sum(c.rounds for c in left), unit="round", disable=None) as bar:
        for number, config in enumerate(left, 1):
            bar.set_description(f"{number}/{len(left)} {config.rule} {config.attack}")
            begun = bar.n

            def progress(now, begun=begun):
                bar.update(begun + now["round"] - bar.n)
                bar.set_postfix(worst=f"{now['worst']:.1%}")

            result = simulate(config, progress)
            results.save(folder, result, save_models)
            if result.diverged:
                t, node = result.diverged
                bar.write(f"DIVERGED: {config.rule} under {config.attack}, node {node}, round {t}")
    return [results.load_run(folder / c.digest()) for c in configs]


def table(runs: Sequence[results.Run]) -> str:
    """Worst and mean accuracy of every run, next to the settings that differ."""
    fields = [f.name for f in dataclasses.fields(Config) if f.name != "rule"]
    varying = ["rule", *plot.varying(runs, fields)]
    rows = [[*varying, "worst", "mean", "seconds", ""]]
    for run in runs:
        s = run.summary
        rows.append([str(getattr(run.config, f)) for f in varying])
        rows[-1] += [f"{s['worst']:.1%}", f"{s['mean']:.1%}", f"{sum(s['seconds'].values()):.1f}"]
        rows[-1] += ["diverged at round {}, node {}".format(*s["diverged"]) if s["diverged"] else ""]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return "\n".join(lines)


def listing() -> str:
    """Every part by kind."""
    kinds = [rules, attacks, topologies, data.datasets, models]
    kinds += [data.shardings, optimizers, schedules]
    return "\n\n".join(f"{r.kind}:\n{r.listing()}" for r in kinds)


def load_plugin(name: str) -> None:
    """Imports a module, or a file by its path, for what it registers."""
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(name).stem, name)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"plugin {name!r} cannot be imported ({type(error).__name__}: {error}); give an importable "
            "module or a .py file"
        ) from error


def _number_or_word(text: str | None) -> float | str | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--seeds={text!r} is not a whole number; write --seeds=0,1,2") from error


def main(argv: Sequence[str]) -> None:
    values = flags.FLAGS
    logging.set_verbosity(logging.WARNING)  # jax tells of every backend that it did not find
    for name in values.plugin:
        load_plugin(name)
    if argv[1:] == ["list"]:
        print(listing())
        return
    if argv[1:]:
        raise ConfigError(f"unknown argument {argv[1]!r}; give flags, or the word list")
    folder = results.open_folder(values.results)
    lists = {name: values[name].value for name in GRID}
    lists |= {"eval_every": [values.eval_every], "eval_size": [values.eval_size]}
    configs, notices = grid(lists)
    for notice in notices:
        print(f"notice: {notice}")
    runs = run_all(configs, folder, values.save_models)
    print(table(runs))
    figures = plot.draw_all(runs, folder)
    print(f"results in {folder}, figures: {', '.join(map(str, figures))}")


def run(argv: Sequence[str]) -> int | None:
    """`main`, with a setting that cannot work told in one message and not in a traceback."""
    try:
        return main(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with the runs that are left", file=sys.stderr)
        return 130


if __name__ == "__main__":
    app.run(run)
