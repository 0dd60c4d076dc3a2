"""From a Config to its curves: arrays on the device, chunks of compiled rounds, evaluation."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ubar_jax.config import Config
from ubar_jax.engine import evaluation
from ubar_jax.engine.preparation import Experiment, Learner, Program, prepare
from ubar_jax.engine.program import compiled_chunk, compiled_evaluation, initial_state, statistics_of
from ubar_jax.types import Metrics, Result, RoundState


class Batch(NamedTuple):
    """Runs side by side, between two chunks: all that is needed to go on. W runs, E evaluations."""

    state: RoundState  # leaves [W, ...]; at width 1 without that axis
    done: int  # rounds
    points: dict[str, np.ndarray]  # [W, E, ...] evaluations
    rounds: dict[str, np.ndarray]  # [W, T, ...] what every round told
    accepted: np.ndarray  # [W, n_b, K] rounds in which a slot was accepted
    seconds: dict[str, float]


class Keeper(NamedTuple):
    """Who keeps a batch between two chunks, and when."""

    due: Callable[[float], bool]  # in so many seconds
    save: Callable[[Batch], None]


class _Launched(NamedTuple):
    """A chunk and the evaluation after it, which nobody has waited for yet."""

    state: RoundState
    done: int  # rounds, when it is over
    seen: Metrics
    point: dict[str, Array]


def first_batch(experiments: Sequence[Experiment]) -> Batch:
    """Before the first round."""
    program = experiments[0].program
    states = [initial_state(program, e.config.seed) for e in experiments]
    state = states[0] if len(states) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    seconds = dict.fromkeys(("setup", "compilation", "rounds", "evaluation"), 0.0)
    accepted = np.zeros((len(states), program.benign, program.slots), np.int32)
    return Batch(state, 0, {}, {}, accepted, seconds)


def run(
    experiments: Sequence[Experiment],
    progress: Callable[[list[dict[str, Any]]], None] | None = None,
    batch: Batch | None = None,
    keep: Keeper | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Result]:
    """Runs experiments of one program side by side, from `batch` if that is given.

    They must also agree in data set, rounds and eval_size; a run may be repeated to fill a width. After
    every chunk `progress` gets the latest numbers of every run, and, when due, `keep` what it takes to go on.
    `say` is told that it compiles, if that takes longer than a second.
    """
    started = time.perf_counter()
    config, program, width = experiments[0].config, experiments[0].program, len(experiments)
    sharers = len({experiment.config for experiment in experiments})
    batch = batch or first_batch(experiments)
    seconds = dict(batch.seconds)
    tests = len(experiments[0].test[1])
    sizes = {min(config.eval_size or tests, tests), tests}
    with _announced(say, program):
        chunk = compiled_chunk(program, width)
        evaluations = {n: compiled_evaluation(*_evaluated(program), n, width) for n in sizes}
        if not batch.points:  # all nodes are equal before the first round
            first_evaluation = compiled_evaluation(*_evaluated(program, 1), min(sizes), width)
    seconds["compilation"] += time.perf_counter() - started

    started = time.perf_counter()
    graph, knobs = (_stack([getattr(e, name) for e in experiments]) for name in ("graph", "knobs"))
    data = experiments[0].data._replace(shards=_stack([e.data.shards for e in experiments]))
    graph, data, knobs, test = jax.device_put((graph, data, knobs, experiments[0].test))
    seconds["setup"] += time.perf_counter() - started

    @contextlib.contextmanager
    def timed(part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds[part] += time.perf_counter() - started

    def evaluate(state: RoundState, done: int) -> dict[str, Array]:
        size = min(sizes) if done < config.rounds else tests
        x, y = (a[:size] for a in test)
        with timed("evaluation"):
            program = evaluations[size] if done else first_evaluation
            return program.call(state.params, statistics_of(data), x, y)

    def launch(state: RoundState, done: int) -> _Launched:
        with timed("rounds"):
            state, seen = chunk.call(state, data, graph, knobs, np.int32(config.rounds))
        done = min(done + program.chunk, config.rounds)
        return _Launched(state, done, seen, evaluate(state, done))

    def fetch(tree, part: str):
        with timed(part):
            tree = jax.device_get(tree)
        return tree if width > 1 else _stack([tree], always=True)

    def add_point(batch: Batch, point: dict[str, Array]) -> Batch:
        point = fetch(point, "evaluation")
        for name in ("accuracy", "loss"):
            point[name] = np.broadcast_to(point[name], (width, program.benign))
        point["round"] = np.full(width, batch.done, np.int32)
        point["seconds"] = np.full(width, sum(seconds.values()) / sharers)
        points = {k: _append(batch.points.get(k), v[:, None]) for k, v in point.items()}
        return batch._replace(points=points, seconds=dict(seconds))

    def add(batch: Batch, launched: _Launched) -> Batch:
        seen = fetch(launched.seen, "rounds")
        ran = launched.done - batch.done
        told = {k: v[:, :ran] for k, v in seen._asdict().items() if k != "accepted"}
        batch = batch._replace(
            state=launched.state,
            done=launched.done,
            rounds={k: _append(batch.rounds.get(k), v) for k, v in told.items()},
            accepted=batch.accepted + seen.accepted,
        )
        return add_point(batch, launched.point)

    if not batch.points:
        batch = add_point(batch, evaluate(batch.state, 0))
    ahead, pace = None, 0.0
    while batch.done < config.rounds:
        started = time.perf_counter()
        launched = ahead or launch(batch.state, batch.done)
        # The device goes on while the host reads, unless a checkpoint needs the models it would overwrite.
        over = launched.done == config.rounds
        saving = keep is not None and not over and keep.due(pace)
        ahead = None if saving or over else launch(launched.state, launched.done)
        batch = add(batch, launched)
        if progress is not None:
            progress([_latest(batch, i) for i in range(width)])
        if saving:
            keep.save(batch)
        pace = time.perf_counter() - started
    return [_result(batch, i, experiment, sharers) for i, experiment in enumerate(experiments)]


def simulate(config: Config, progress: Callable[[dict[str, Any]], None] | None = None) -> Result:
    """Runs one config. `progress` is called after every evaluation with the latest numbers.

    A compilation that takes longer than a second is announced on stderr.
    """
    started = time.perf_counter()
    experiment = prepare(config)
    setup = time.perf_counter() - started
    [result] = run(
        [experiment],
        progress and (lambda latest: progress(latest[0])),
        say=lambda words: print(words, file=sys.stderr, flush=True),
    )
    return result._replace(seconds={**result.seconds, "setup": result.seconds["setup"] + setup})


def _evaluated(program: Program, nodes: int | None = None) -> tuple[Learner, int, int]:
    """What an evaluation of the first `nodes` benign nodes, by default all, is compiled for."""
    return program.learner, nodes or program.benign, program.trained


@contextlib.contextmanager
def _announced(say: Callable[[str], None] | None, program: Program) -> Iterator[None]:
    """Says that the program is compiled, if that takes longer than a second."""
    nodes = f"{program.benign} + {program.byzantine} nodes"
    words = f"compiling {program.rule.part.name} under {program.attack.part.name} for {nodes} ..."
    timer = threading.Timer(1.0, say or (lambda words: None), [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _stack(trees: Sequence, always: bool = False):
    """Host arrays of several runs with an axis for the runs; of a single one only if `always`."""
    if len(trees) == 1 and not always:
        return trees[0]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _append(old: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    return new if old is None else np.concatenate([old, new], axis=1)


def _diverged(batch: Batch, run: int) -> tuple[int, int] | None:
    bad = np.argwhere(~batch.rounds["finite"][run])
    return (int(bad[0][0]), int(bad[0][1])) if len(bad) else None


def _latest(batch: Batch, run: int) -> dict[str, Any]:
    point = {k: v[run, -1] for k, v in batch.points.items()}
    latest = {"round": batch.done, "diverged": _diverged(batch, run), "loss": point["loss"].mean()}
    return {**latest, "consensus": point["consensus"], **evaluation.summary(point["accuracy"])}


def _result(batch: Batch, run: int, experiment: Experiment, sharers: int) -> Result:
    program, width = experiment.program, len(batch.accepted)
    curves = {k: v[run] for k, v in batch.points.items()}
    curves |= evaluation.summary(curves["accuracy"])
    told = Metrics(**{k: v[run] for k, v in batch.rounds.items()}, accepted=batch.accepted[run])
    curves["train_loss"] = told.loss
    for name in ("byzantine_candidates", "byzantine_selected"):
        curves[name] = getattr(told, name)
    accepted = np.zeros((program.benign, program.benign + program.byzantine), np.int32)
    slots, heard = (a[: program.benign] for a in experiment.graph)
    rows = np.arange(program.benign)[:, None]
    np.add.at(accepted, (rows, slots), np.where(heard, told.accepted, 0))
    return Result(
        config=experiment.config,
        digest=experiment.digest,
        notices=experiment.notices,
        curves=curves,
        final={name: curves[name][-1] for name in ("accuracy", "loss")},
        accepted=accepted,
        diverged=_diverged(batch, run),
        rounds_per_epoch=int(experiment.knobs.rounds_per_epoch),
        state=batch.state if width == 1 else jax.tree.map(lambda leaf: leaf[run], batch.state),
        seconds={k: v / sharers for k, v in batch.seconds.items()},
    )
