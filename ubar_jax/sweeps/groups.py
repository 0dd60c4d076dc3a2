"""Group runs by program, choose how many run side by side, and estimate the time."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ubar_jax.engine.preparation import Experiment
from ubar_jax.engine.program import Program, model_size, task_of
from ubar_jax.memory import device_memory

COMPILE_SECONDS = 5.0  # per group, on one CPU core; measured: 2 to 12
COPIES = 12  # copies of all nodes' models at a round's peak; more than any rule was measured to need


def grouped(experiments: Sequence[Experiment]) -> list[list[Experiment]]:
    """One group of runs per compiled program, in the order given."""
    groups: dict[Program, list[Experiment]] = {}
    for experiment in experiments:
        groups.setdefault(experiment.program, []).append(experiment)
    return list(groups.values())


def choose_width(group: Sequence[Experiment], wanted: int | None = None, size: int | None = None) -> int:
    """Runs side by side: `wanted` if given; else 1 on a CPU, elsewhere as many as half the memory holds.

    At most the size of the group, which is given if these are only some of its runs.
    """
    size = size or len(group)
    if wanted is not None:
        return min(wanted, size)
    if jax.default_backend() == "cpu":
        return 1
    return int(np.clip(device_memory() / 2 / device_bytes(group[0].program), 1, size))


def in_packs(group: Sequence[Experiment], width: int) -> list[list[Experiment]]:
    """Packs of `width` runs with equal data and rounds; the last run is repeated to fill a pack."""
    alike: dict[tuple, list[Experiment]] = {}
    packs = []
    for experiment in group:
        config = experiment.config
        alike.setdefault((config.dataset, config.rounds, config.eval_size), []).append(experiment)
    for runs in alike.values():
        for pack in (runs[i : i + width] for i in range(0, len(runs), width)):
            packs.append(pack + pack[-1:] * (width - len(pack)))
    return packs


class Estimate(NamedTuple):
    """Estimated seconds of a group, within a factor of three on a CPU."""

    compilation: float
    rounds: float
    evaluation: float


def estimate(groups: Sequence[Sequence[Experiment]]) -> list[Estimate]:
    """Estimated seconds of each group on this device.

    One node's gradient, forward pass and copy of its model are timed and multiplied by how often the runs
    need them: per training node, per pair of stage 2, per slot, per test example.
    """
    costs: dict[tuple, tuple[float, float, float]] = {}
    found = []
    for group in groups:
        program = group[0].program
        key = (program.learner, program.batch)
        if key not in costs:
            costs[key] = _costs(program)
        gradient, forward, copy = costs[key]
        mixing = program.trained * program.slots * copy
        a_round = program.trained * gradient + program.pairs * forward + mixing
        rounds = evaluation = 0.0
        for config, tests in ((e.config, len(e.test[1])) for e in group):
            points = config.rounds // program.chunk
            evaluated = tests + points * min(config.eval_size or tests, tests)
            rounds += config.rounds * a_round
            evaluation += program.benign * evaluated / program.batch * forward
        found.append(Estimate(COMPILE_SECONDS, rounds, evaluation))
    return found


def device_bytes(program: Program) -> int:
    """About the bytes of models on each device at a round's peak: each holds those of all nodes."""
    return 4 * model_size(program.learner) * (program.benign + program.byzantine) * COPIES


def _costs(program: Program) -> tuple[float, float, float]:
    """Seconds for one node's gradient, forward pass, and copy of its model."""
    task = task_of(program.learner)
    params = jax.jit(task.init)(jax.random.key(0))
    x, y = jnp.zeros((program.batch, *program.learner.shape)), jnp.zeros(program.batch, jnp.int32)
    model = jnp.zeros(model_size(program.learner))
    gradient = _seconds(jax.jit(jax.grad(task.loss)), params, x, y)
    return gradient, _seconds(jax.jit(task.loss), params, x, y), _seconds(jax.jit(jnp.negative), model)


def _seconds(f: Callable, *args) -> float:
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - started)
    return min(times)
