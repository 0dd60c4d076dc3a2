"""Runs a grid of settings: `python -m ubar_jax.experiments.sweep --flagfile=FILE`.

Repeat a flag to give it several values; the sweep is the product of all lists. The word `list` instead of
flags prints every rule, attack, topology, data set and model. Flagfiles may include flagfiles
(--flagfile=OTHER on its own line); a repeated flag ADDS to the list that a flagfile started.

Runs that share a program are compiled once. --workers and --address run a sweep on many processes or
machines (CLUSTER.md). Every finished run is in the results folder. After a kill or Ctrl-C, the same command
continues. Exit codes: 0 all done; 1 a run failed (its folder has failed.json; the same command repeats it);
2 bad flags or settings; 3 no run failed, but one diverged; 4 the disk is full; 130 stopped by Ctrl-C.
"""

import dataclasses
import datetime
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from ubar_jax.config import REGISTRIES, Config
from ubar_jax.engine.compilation import repaired_cache, use_cache
from ubar_jax.engine.devices import cores, use_devices
from ubar_jax.experiments import command
from ubar_jax.experiments.grids import grid
from ubar_jax.files import write_json
from ubar_jax.installed import commit, processor, versions
from ubar_jax.parts import download
from ubar_jax.registry import ConfigError, load_plugin, shown
from ubar_jax.sweeps import cluster, results
from ubar_jax.sweeps.groups import choose_width, device_bytes, estimate
from ubar_jax.sweeps.plan import Outcome, Plan, carry_out, make_plan
from ubar_jax.sweeps.worker import Job

DEFAULT = Config()
flags.DEFINE_multi_string("rule", [DEFAULT.rule], "Aggregation rule, such as ubar(rho=0.4).")
flags.DEFINE_multi_string("attack", [DEFAULT.attack], "What Byzantine nodes send, such as gaussian(std=1).")
flags.DEFINE_multi_string("topology", [DEFAULT.topology], "Network, such as torus.")
flags.DEFINE_multi_string("dataset", [DEFAULT.dataset], "Data set: digits, mnist, cifar10, any tfds name.")
flags.DEFINE_multi_string("model", [DEFAULT.model], "Model, such as mlp, or your own package.module:Class.")
flags.DEFINE_multi_string("sharding", [DEFAULT.sharding], "How the training set is split over the nodes.")
flags.DEFINE_multi_string("optimizer", [DEFAULT.optimizer], "Optimizer of every node, such as sgd.")
flags.DEFINE_multi_string("schedule", [DEFAULT.schedule], "Factor of the learning rate per epoch.")
flags.DEFINE_multi_integer("nodes", [DEFAULT.nodes], "Number of benign nodes; Byzantine ones are added.")
flags.DEFINE_multi_float(
    "byzantine_ratio",
    [DEFAULT.byzantine_ratio],
    "Share of Byzantine nodes among all nodes: f / (nodes + f).",
)
flags.DEFINE_multi_float(
    "connection",
    [DEFAULT.connection],  # type: ignore[list-item]  # None only in canonical configs
    "Probability of a link between two nodes, for topologies whose spec does not set `connection`.",
)
flags.DEFINE_multi_string(
    "rho",
    [str(DEFAULT.rho)],
    "Share of a node's neighbours that the rule assumes to be benign, for rules whose spec does not set "
    "`rho`: a number in (0, 1], conservative (one neighbour) or oracle (the true share).",
)
flags.DEFINE_multi_float(
    "alpha",
    None,
    "Weight of a node's own model in the mix, from 0 to 1; default: set by the rule.",
)
flags.DEFINE_multi_float("learning_rate", [DEFAULT.learning_rate], "Learning rate in the first epoch.")
flags.DEFINE_multi_integer("batch_size", [DEFAULT.batch_size], "Training examples per node and round.")
flags.DEFINE_multi_integer("rounds", [DEFAULT.rounds], "Rounds per run: one SGD step and one exchange each.")
flags.DEFINE_multi_string(
    "order",
    None,
    "Order of a round: while (the paper: gradient at x_i, mixing of x_j, then the step) or then (the step "
    "first: nodes send and mix x + u); default: set by the rule.",
)
flags.DEFINE_multi_integer(
    "local_steps", [DEFAULT.local_steps], "Steps of SGD per round, each on batch_size examples."
)
flags.DEFINE_multi_float(
    "held_out", [DEFAULT.held_out], "Share of every node's examples that it does not train on."
)
flags.DEFINE_multi_string(
    "judge",
    [DEFAULT.judge],
    "On which examples rules take losses, batch_size per round: batch (those that the node trains on), next "
    "(those of the next round; not seen before only in the first epoch) or held_out (see --held_out).",
)
flags.DEFINE_multi_string("seeds", [str(DEFAULT.seed)], "Seeds: 0,1,2 or a repeated flag.")
flags.DEFINE_integer("eval_every", DEFAULT.eval_every, "Rounds between two evaluations.")
flags.DEFINE_integer(
    "eval_size",
    None,
    "Test examples per evaluation; default: all. The last evaluation always uses all.",
)
flags.DEFINE_string("results", "results", "Folder for results and figures.")
flags.DEFINE_bool("save_models", False, "Keep every node's final parameters (models.npz).")
flags.DEFINE_bool(
    "dry_run", False, "Print the runs, the compile groups and an estimate of the time; write nothing."
)
flags.DEFINE_integer("width", None, "Runs of a group side by side; default: 1 on a CPU.", lower_bound=1)
flags.DEFINE_integer(
    "devices",
    None,
    "Devices that a run is spread over, on a CPU cores; default: all for a single run and on accelerators, 1 "
    "for many runs on a CPU.",
    lower_bound=1,
)
flags.DEFINE_float("checkpoint_seconds", 60, "Minimum number of seconds between two checkpoints.")
flags.DEFINE_integer(
    "workers",
    None,
    "Run on so many processes of this machine, of one core or one GPU each; needs ubar_jax[cluster].",
    lower_bound=1,
)
flags.DEFINE_string(
    "address",
    None,
    "Run on the Ray cluster at HOST:PORT, one worker per core or GPU; needs ubar_jax[cluster].",
)
flags.DEFINE_float(
    "run_timeout",
    None,
    "Seconds after which a run has failed; default: none. A checkpoint of it is kept.",
)
flags.DEFINE_bool(
    "compile_ahead", True, "Compile the next programs while one runs, on a CPU; false to time rounds."
)
flags.DEFINE_bool("tensorboard", False, "Write scalars for TensorBoard into the results folder.")
flags.DEFINE_bool("download", True, "Download and prepare a tfds set that is missing; not in a dry run.")
flags.DEFINE_multi_string("plugin", [], "Module or .py file that registers your own parts.")
flags.register_validator("checkpoint_seconds", lambda v: v >= 0, message="must be a number >= 0")
flags.register_validator("run_timeout", lambda v: v is None or v > 0, message="must be a number > 0")
command.must_be_named("results")

GRID: tuple[str, ...] = ("rule", "attack", "topology", "dataset", "model", "sharding", "optimizer")
GRID += ("schedule", "nodes", "byzantine_ratio", "connection", "rho", "alpha", "learning_rate", "batch_size")
GRID += ("rounds", "seeds", "order", "local_steps", "held_out", "judge")


def describe(plan: Plan, width: int | None) -> str:
    """The remaining runs by compile group, and an estimate of their time."""
    lines = []
    names = [f.name for f in dataclasses.fields(Config)]
    left = plan.left
    for number, group in enumerate(left, 1):
        same, differ = group[0].config, results.varying(group, names)
        whole = plan.group_of(group[0].digest)
        lines.append(f"group {number}: {same.rule}  {same.attack}  {same.model}  {same.dataset}")
        lines[-1] += f"  {same.nodes}+{same.byzantine} nodes, {choose_width(whole, width)} side by side"
        for experiment in group:
            settings = [f"{name}={getattr(experiment.config, name)}" for name in differ]
            lines.append("  ".join(["   ", experiment.digest, *settings]))
    runs = sum(map(len, left))
    lines.append(f"{runs} runs to do, {len(plan.finished)} done already; {len(left)} compilations")
    if left:
        compilation, rounds, evaluation = map(sum, zip(*estimate(left), strict=True))
        total = compilation + rounds + evaluation
        lines.append(
            f"about {tqdm.format_interval(total)} on this {results.device()}: a rough guess from one node's "
            f"step; {rounds / total:.0%} rounds, {evaluation / total:.0%} evaluation "
            f"(--eval_every, --eval_size), {compilation / total:.0%} compilation"
        )
        most = max(device_bytes(group[0].program) + group[0].data.x.nbytes for group in left)
        lines.append(f"at most about {most / 1e9:.2g} GB of memory per device and run: models and images")
    return "\n".join(lines)


def table(runs: Sequence[results.Run]) -> str:
    """Worst and mean accuracy of every run, next to the settings that differ."""
    frame = results.table(runs)
    fields = [f.name for f in dataclasses.fields(Config) if f.name != "rule"]
    frame = frame[["rule", *results.varying(runs, fields), "worst", "mean", "seconds", "diverged"]]
    for name in ("worst", "mean"):
        frame[name] = frame[name].map("{:.1%}".format)
    frame[""] = [f"diverged {when}" if when else "" for when in frame.pop("diverged")]
    return frame.to_string(index=False, float_format="%.4g", na_rep="", justify="left")


def listing() -> str:
    """Every part by kind."""
    return "\n\n".join(f"{registry.kind}:\n{registry.listing()}" for registry in REGISTRIES.values())


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    if not values.download or values.dry_run:
        os.environ[download.SWITCH] = "false"  # for this process and its workers
    for name in values.plugin:
        load_plugin(name)
    if argv[1:] == ["list"]:
        print(listing())
        return 0
    if argv[1:]:
        raise ConfigError(f"unknown argument {shown(argv[1])}; give flags, or the word list")
    lists: dict[str, Any] = {name: values[name].value for name in GRID}
    lists |= {"eval_every": [values.eval_every], "eval_size": [values.eval_size]}
    runs, notices = grid(lists)
    if on_workers := values.workers is not None or values.address is not None:
        cluster.check_flags(values.workers, values.address, values.devices)
        jax.config.update("jax_platforms", "cpu")  # the GPUs are for the workers
    many = len(runs) > 1 and values.devices is None and jax.default_backend() == "cpu"
    use_devices(1 if many or on_workers else values.devices)
    if values.dry_run:
        plan = make_plan(runs, Path(values.results), values.save_models)
        _tell([*notices, *plan.notices])
        print(describe(plan, values.width))
        return 0
    use_cache()
    typed = shlex.join(["python", "-m", "ubar_jax.experiments.sweep", *sys.argv[1:]])
    with repaired_cache(), results.owned(values.results, typed) as folder:
        plan = make_plan(runs, folder, values.save_models)
        _tell([*notices, *plan.notices])
        about: dict[str, Any] = {"command": typed, "date": datetime.date.today().isoformat()}
        about |= {"versions": versions(), "device": results.device()}
        about |= {"commit": commit(), "machine": f"{processor()}, {cores()} cores"}
        if plan.left:
            write_json(folder / "sweep.json", about)
        if plan.finished:
            print(f"{len(plan.finished)} of {len(runs)} runs are in {folder} already")
        if on_workers:
            outcome = cluster.carry_out(plan, _job(folder), values.workers, values.address)
        else:
            outcome = carry_out(
                plan,
                folder,
                width=values.width,
                models=values.save_models,
                checkpoint_seconds=values.checkpoint_seconds,
                tensorboard=values.tensorboard,
                run_timeout=values.run_timeout,
                compile_ahead=values.compile_ahead,
            )
        return conclude(folder, plan, outcome, about)


def _job(folder: Path) -> Job:
    """What the workers need to know of this command."""
    values = flags.FLAGS
    plugins = (str(Path(name).absolute()) if name.endswith(".py") else name for name in values.plugin)
    return Job(
        folder=folder.absolute(),
        home=Path.cwd(),
        plugins=tuple(plugins),
        versions=versions(),
        width=values.width,
        models=values.save_models,
        checkpoint_seconds=values.checkpoint_seconds,
        tensorboard=values.tensorboard,
        run_timeout=values.run_timeout,
    )


def _tell(notices: Sequence[str]) -> None:
    for notice in dict.fromkeys(notices):
        print(f"notice: {notice}")


def conclude(folder: Path, plan: Plan, outcome: Outcome, about: dict) -> int:
    """Prints and saves the outcome of the sweep and draws its figures; returns the exit code."""
    from ubar_jax.experiments import plot

    runs = [results.load_run(folder / digest) for digest in plan.configs if digest not in outcome.failed]
    if outcome.programs:
        left = plan.left
        cached = sum(outcome.programs)
        numbers = {"groups": len(left), "compilations": len(outcome.programs) - cached}
        if runs:  # workers may have other devices than this process
            about["device"] = ", ".join(sorted({run.summary["device"] for run in runs}))
        write_json(folder / "sweep.json", {**about, **numbers, "seconds": outcome.seconds})
        total, compiling = outcome.seconds["total"], outcome.seconds["compilation"]
        print(
            f"{sum(map(len, left))} runs in {total:.0f} s, {compiling / total:.0%} of it compilation: "
            f"{len(left)} groups, {numbers['compilations']} compiled and {cached} from the cache"
        )
    if runs:
        print(table(runs))
        results.write_table(folder)
        drawn = ", ".join(map(str, plot.draw_all(runs, folder)))
        print(f"results in {folder}, all runs in {folder / results.TABLE}, figures: {drawn}")
    for digest, error in outcome.failed.items():
        config, where = plan.configs[digest], folder / digest / "failed.json"
        print(
            f"FAILED: {config.rule} under {config.attack}, seed {config.seed}: {error} ({where})",
            file=sys.stderr,
        )
    if outcome.failed:
        print(
            f"{len(outcome.failed)} of {len(plan.configs)} runs failed; the same command repeats them",
            file=sys.stderr,
        )
        return 1
    return 3 if any(run.summary["diverged"] for run in runs) else 0


if __name__ == "__main__":
    command.launch(main)
