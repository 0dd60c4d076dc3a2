"""Runs a grid of settings: `python -m ubar_jax.experiments.sweep --flagfile=FILE`.

Repeat a flag to give it several values; the sweep is the product of all lists. `list` instead of
flags prints every rule, attack, topology, data set and model. Flagfiles may include flagfiles
(--flagfile=OTHER on a line of its own); a repeated flag ADDS to the list that a flagfile began.

Runs that share a program are compiled once. Finished runs are in the results folder, each whole; killed
or stopped, the same command goes on where it was. Exit code: 0 all done; 1 a run failed (its folder has
failed.json; the same command tries it again) or the disk is full; 2 bad flags or settings; 3 none failed,
but a run diverged; 130 stopped by Ctrl-C.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from tqdm import tqdm

from ubar_jax import data, results
from ubar_jax.attacks import attacks
from ubar_jax.compilation import use_cache
from ubar_jax.config import Config, canonical
from ubar_jax.experiments import plot
from ubar_jax.groups import choose_width, estimate
from ubar_jax.models import models
from ubar_jax.registry import ConfigError
from ubar_jax.rules import rules
from ubar_jax.schedules import optimizers, schedules
from ubar_jax.sweeps import Outcome, Plan, carry_out, disk_is_full, make_plan
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
flags.DEFINE_bool("dry_run", False, "Only print the runs, the compile groups and an estimate of the time.")
flags.DEFINE_integer("width", None, "Runs of a group side by side; by default 1 on a CPU.", lower_bound=1)
flags.DEFINE_float("checkpoint_seconds", 60, "Least time between checkpoints.", lower_bound=0)
flags.DEFINE_bool("tensorboard", False, "Write scalars for TensorBoard into the results folder.")
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


def describe(plan: Plan, width: int | None) -> str:
    """The runs that are left by compile group, and an estimate of their time."""
    lines = []
    names = [f.name for f in dataclasses.fields(Config)]
    left = plan.left
    for number, group in enumerate(left, 1):
        same, differ = group[0].config, plot.varying(group, names)
        whole = next(g for g in plan.groups if any(e is group[0] for e in g))
        lines.append(f"group {number}: {same.rule}  {same.attack}  {same.model}  {same.dataset}")
        lines[-1] += f"  {same.nodes}+{same.byzantine} nodes, {choose_width(whole, width)} side by side"
        for config in (e.config for e in group):
            settings = [f"{name}={getattr(config, name)}" for name in differ]
            lines.append("  ".join(["   ", config.digest(), *settings]))
    runs = sum(map(len, left))
    lines.append(f"{runs} runs to do, {len(plan.finished)} done already; {len(left)} compilations")
    if left:
        estimated = tqdm.format_interval(estimate(left))
        lines.append(f"about {estimated} on this {results.device()}: a rough guess from one node's step")
    return "\n".join(lines)


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


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    logging.set_verbosity(logging.FATAL)  # what goes wrong is told in our own words, once
    for name in values.plugin:
        load_plugin(name)
    if argv[1:] == ["list"]:
        print(listing())
        return 0
    if argv[1:]:
        raise ConfigError(f"unknown argument {argv[1]!r}; give flags, or the word list")
    lists = {name: values[name].value for name in GRID}
    lists |= {"eval_every": [values.eval_every], "eval_size": [values.eval_size]}
    configs, notices = grid(lists)
    use_cache()
    command = shlex.join(["python", "-m", "ubar_jax.experiments.sweep", *sys.argv[1:]])
    with results.owned(values.results, command) as folder:
        plan = make_plan(configs, folder, values.save_models)
        for notice in [*notices, *plan.notices]:
            print(f"notice: {notice}")
        if values.dry_run:
            print(describe(plan, values.width))
            return 0
        about = {"command": command, "versions": results.versions(), "device": results.device()}
        if plan.left:
            results.write_json(folder / "sweep.json", about)
        if plan.finished:
            print(f"{len(plan.finished)} of {len(configs)} runs are in {folder} already")
        outcome = carry_out(
            plan,
            folder,
            width=values.width,
            models=values.save_models,
            checkpoint_seconds=values.checkpoint_seconds,
            tensorboard=values.tensorboard,
        )
        return conclude(configs, folder, plan, outcome, about)


def conclude(configs: Sequence[Config], folder: Path, plan: Plan, outcome: Outcome, about: dict) -> int:
    """Prints what came of the sweep, writes it down, draws; returns the exit code."""
    failed = {config for config, _ in outcome.failed}
    runs = [results.load_run(folder / c.digest()) for c in configs if c not in failed]
    if outcome.programs:
        left = plan.left
        cached = sum(program.cached for program in outcome.programs)
        numbers = {"groups": len(left), "compilations": len(outcome.programs) - cached}
        results.write_json(folder / "sweep.json", {**about, **numbers, "seconds": outcome.seconds})
        total, compiling = outcome.seconds["total"], outcome.seconds["compilation"]
        print(
            f"{sum(map(len, left))} runs in {total:.0f} s, {compiling / total:.0%} of it compilation: "
            f"{len(left)} groups, {numbers['compilations']} compiled and {cached} from the cache"
        )
    if runs:
        print(table(runs))
        print(f"results in {folder}, figures: {', '.join(map(str, plot.draw_all(runs, folder)))}")
    for config, error in outcome.failed:
        where = folder / config.digest() / "failed.json"
        print(
            f"FAILED: {config.rule} under {config.attack}, seed {config.seed}: {error} ({where})",
            file=sys.stderr,
        )
    if failed:
        print(
            f"{len(failed)} of {len(configs)} runs failed; the same command tries them again", file=sys.stderr
        )
        return 1
    return 3 if any(run.summary["diverged"] for run in runs) else 0


def run(argv: Sequence[str]) -> int:
    """`main`, with a setting that cannot work told in one message and not in a traceback."""
    try:
        return main(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not disk_is_full(error):
            raise
        told = "the disk is full. Finished runs are whole; make room, and the same command goes on"
        print(f"error: {told}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on where this one was", file=sys.stderr)
        return 130


def parse(argv: Sequence[str]) -> list[str]:
    """Flags, with the exit code of bad input for those that cannot be."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}\nTry --help.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(run, flags_parser=parse)
