"""Run a Config: arrays on the device, chunks of compiled rounds, evaluation, curves."""

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
from ubar_jax.engine import devices, evaluation
from ubar_jax.engine.compilation import (
    compiled_chunk,
    compiled_draw,
    compiled_evaluation,
    initial_state,
    statistics_of,
)
from ubar_jax.engine.preparation import Experiment, prepare
from ubar_jax.engine.program import Program
from ubar_jax.progress import compiling, progress_bar
from ubar_jax.types import Data, Graph, Knobs, Metrics, Result, RoundState, Shares

CURVES = {"loss": "train_loss"}  # numbers per round whose curve has another name


class Snapshot(NamedTuple):
    """W runs side by side, between two chunks: all that is needed to continue. E evaluations, T rounds."""

    state: RoundState  # leaves [W, ...]; without that axis if W = 1
    done: int  # rounds so far
    # {name: [W, E, ...]}, numbers per evaluation; "accepted" [W, E, n_b, K]: the part of `accepted` since the
    # evaluation before, which checkpoints of older versions lack
    points: dict[str, np.ndarray]
    rounds: dict[str, np.ndarray]  # {name: [W, T, ...]}, numbers per round
    accepted: np.ndarray  # [W, n_b, K] number of rounds in which the slot's message was accepted
    seconds: dict[str, float]


class Checkpointing(NamedTuple):
    """Checkpoint callbacks."""

    due: Callable[[float], bool]  # whether a checkpoint is due within this many seconds
    save: Callable[[Snapshot], None]


class _Loaded(NamedTuple):
    """Runs side by side on the device: compiled programs and their arguments."""

    program: Program
    config: Config  # of the first run; the others have the same number of rounds
    width: int  # W
    sharers: int  # number of different runs: a run may be repeated to fill the width
    draw: Callable
    chunk: Callable
    evaluations: dict[int, Callable]  # by number of test examples
    first_evaluation: Callable | None  # of one node: all are equal before round 0
    data: Data
    shares: Shares  # of the nodes that train
    graph: Graph
    knobs: Knobs
    test: tuple[Array, Array]


class _Launched(NamedTuple):
    """A chunk and the evaluation after it, both of which may still be running."""

    state: RoundState
    done: int  # rounds so far, once it has finished
    seen: Metrics
    point: dict[str, Array]


def first_snapshot(experiments: Sequence[Experiment]) -> Snapshot:
    """The snapshot before the first round."""
    program = experiments[0].program
    states = [initial_state(program, e.config.seed) for e in experiments]
    state = states[0] if len(states) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    seconds = dict.fromkeys(("setup", "compilation", "rounds", "evaluation"), 0.0)
    accepted = np.zeros((len(states), program.benign, program.slots), np.int32)
    return Snapshot(state, 0, {}, {}, accepted, seconds)


def simulate(config: Config, progress: Callable[[dict[str, Any]], None] | bool | None = None) -> Result:
    """Runs one config. `progress=True` shows a bar.

    A function given as `progress` is called after every evaluation with the latest numbers. Without a bar, a
    message on stderr announces a compilation that takes longer than a second.
    """
    started = time.perf_counter()
    experiment = prepare(config)
    setup = time.perf_counter() - started
    with _watching(experiment.config, progress) as (watch, say):
        [result] = run([experiment], watch, say=say)
    return result._replace(seconds={**result.seconds, "setup": result.seconds["setup"] + setup})


@contextlib.contextmanager
def _watching(
    config: Config, progress: Callable[[dict[str, Any]], None] | bool | None
) -> Iterator[tuple[Callable[[list[dict[str, Any]]], None], Callable[[str], None]]]:
    """Yields the callbacks of `run` for one run: for the latest numbers, and for messages of compilation."""
    if progress is not True:
        told = progress or (lambda latest: None)
        yield (lambda latest: told(latest[0])), _print
        return
    with progress_bar(config.rounds) as bar:
        bar.set_description(f"{config.rule} under {config.attack}")

        def show(latest: list[dict[str, Any]]) -> None:
            bar.set_postfix(worst=f"{latest[0]['worst']:.1%}", refresh=False)
            bar.update(latest[0]["round"] - bar.n)

        yield show, compiling(bar)


def _print(words: str) -> None:
    if words:
        print(words, file=sys.stderr, flush=True)


def run(
    experiments: Sequence[Experiment],
    progress: Callable[[list[dict[str, Any]]], None] | None = None,
    start: Snapshot | None = None,
    checkpointing: Checkpointing | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Result]:
    """Runs experiments of one program side by side, from the snapshot `start` if given.

    They must have the same data set, rounds and eval_size; a run may be repeated to fill the width. After
    every chunk, `progress` gets the latest numbers of every run. `say` gets a message if compilation takes
    longer than a second, and "" when it is over.
    """
    now = start or first_snapshot(experiments)
    seconds = dict(now.seconds)
    loaded = _load(experiments, seconds, first=not now.points, say=say)
    now = now._replace(state=devices.put(now.state, loaded.program.devices))
    rounds = loaded.config.rounds
    if not now.points:
        now = _with_point(now, _evaluate(loaded, now.state, 0, seconds), now.accepted, loaded, seconds)
    ahead, pace = None, 0.0
    while now.done < rounds:
        started = time.perf_counter()
        launched = ahead or _launch(loaded, now.state, now.done, seconds)
        # Launch the next chunk before fetching this one, unless a checkpoint needs what it overwrites.
        over = launched.done == rounds
        saving = checkpointing is not None and not over and checkpointing.due(pace)
        ahead = None if saving or over else _launch(loaded, launched.state, launched.done, seconds)
        now = _with_chunk(now, launched, loaded, seconds)
        if progress is not None:
            progress([_latest(now, i) for i in range(loaded.width)])
        if checkpointing is not None and saving:
            checkpointing.save(now)
        pace = time.perf_counter() - started
    return [_result(now, i, experiment, loaded.sharers) for i, experiment in enumerate(experiments)]


def _load(
    experiments: Sequence[Experiment],
    seconds: dict[str, float],
    first: bool,
    say: Callable[[str], None] | None,
) -> _Loaded:
    """Compiles the programs and puts the arrays on the device; `first`: include an evaluation of round 0."""
    config, program, width = experiments[0].config, experiments[0].program, len(experiments)
    tests = len(experiments[0].test[1])
    sizes = {min(config.eval_size or tests, tests), tests}
    evaluated = (program.learner, program.benign, program.trained)
    alone = (program.learner, 1, program.trained)
    with _timed(seconds, "compilation"), _announced(say, program):
        draw = compiled_draw(program.drawing, width).call
        chunk = compiled_chunk(program, width).call
        evaluations = {n: compiled_evaluation(*evaluated, n, width, program.devices).call for n in sizes}
        # All nodes are equal before the first round.
        one = compiled_evaluation(*alone, min(sizes), width, program.devices).call if first else None
    with _timed(seconds, "setup"):
        graph, knobs = (_stack([getattr(e, name) for e in experiments]) for name in ("graph", "knobs"))
        shares = _stack([e.drawn_from for e in experiments])
        data, test = experiments[0].data, experiments[0].test
        arrays = (graph, data, shares, knobs, test)
        graph, data, shares, knobs, test = devices.put(arrays, program.devices)
    sharers = len({experiment.config for experiment in experiments})
    return _Loaded(
        program, config, width, sharers, draw, chunk, evaluations, one, data, shares, graph, knobs, test
    )


def _launch(loaded: _Loaded, state: RoundState, done: int, seconds: dict[str, float]) -> _Launched:
    """Dispatches a chunk and the evaluation after it; `state` is donated."""
    rounds = loaded.config.rounds
    with _timed(seconds, "rounds"):
        drawn = loaded.draw(*loaded.shares, state.key, state.t)
        state, seen = loaded.chunk(state, drawn, loaded.data, loaded.graph, loaded.knobs, np.int32(rounds))
    done = min(done + loaded.program.chunk, rounds)
    return _Launched(state, done, seen, _evaluate(loaded, state, done, seconds))


def _evaluate(loaded: _Loaded, state: RoundState, done: int, seconds: dict[str, float]) -> dict[str, Array]:
    """Dispatches an evaluation: on all test examples at the end, on eval_size of them before."""
    sizes = loaded.evaluations.keys()
    size = min(sizes) if done < loaded.config.rounds else max(sizes)
    x, y = (a[:size] for a in loaded.test)
    evaluate = (
        loaded.evaluations[size] if done or loaded.first_evaluation is None else loaded.first_evaluation
    )
    with _timed(seconds, "evaluation"):
        return evaluate(state.params, statistics_of(loaded.data), x, y)


def _with_chunk(now: Snapshot, launched: _Launched, loaded: _Loaded, seconds: dict[str, float]) -> Snapshot:
    """The snapshot after a chunk and its evaluation; waits for both."""
    seen = _fetch(launched.seen, loaded.width, seconds, "rounds")
    ran = launched.done - now.done
    told = {name: value for name, value in seen._asdict().items() if name not in ("accepted", "scalars")}
    told = {name: value[:, :ran] for name, value in {**told, **seen.scalars}.items()}
    now = now._replace(
        state=launched.state,
        done=launched.done,
        rounds={name: _append(now.rounds.get(name), value) for name, value in told.items()},
        accepted=now.accepted + seen.accepted,
    )
    return _with_point(now, launched.point, seen.accepted, loaded, seconds)


def _with_point(
    now: Snapshot, point: dict[str, Array], accepted: np.ndarray, loaded: _Loaded, seconds: dict[str, float]
) -> Snapshot:
    """The snapshot with one more evaluation and what was `accepted` since the one before; waits for it."""
    fetched = _fetch(point, loaded.width, seconds, "evaluation")
    for name in ("accuracy", "loss"):  # of one node or of all nodes
        fetched[name] = np.broadcast_to(fetched[name], (loaded.width, loaded.program.benign))
    fetched["accepted"] = accepted.astype(np.min_scalar_type(loaded.program.chunk))
    fetched["round"] = np.full(loaded.width, now.done, np.int32)
    fetched["seconds"] = np.full(loaded.width, sum(seconds.values()) / loaded.sharers)
    points = {name: _append(now.points.get(name), value[:, None]) for name, value in fetched.items()}
    return now._replace(points=points, seconds=dict(seconds))


def _fetch(tree: Any, width: int, seconds: dict[str, float], part: str) -> Any:
    """Leaves [W, ...]: the tree on the host; waits for it."""
    with _timed(seconds, part):
        tree = jax.device_get(tree)
    return tree if width > 1 else _stack([tree], always=True)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the time of its block to `seconds[part]`."""
    started = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - started


@contextlib.contextmanager
def _announced(say: Callable[[str], None] | None, program: Program) -> Iterator[None]:
    """Announces the compilation if it takes longer than a second; says "" when it is over."""
    if say is None:
        yield
        return
    nodes = f"{program.benign} + {program.byzantine} nodes"
    words = f"compiling {program.rule.part.name} under {program.attack.part.name} for {nodes} ..."
    timer = threading.Timer(1.0, say, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # or its words might come after the last ones
        say("")


def _stack(trees: Sequence, always: bool = False) -> Any:
    """Stacks the host arrays of several runs on a new first axis; those of a single run only if `always`."""
    if len(trees) == 1 and not always:
        return trees[0]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _append(old: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    return new if old is None else np.concatenate([old, new], axis=1)


def _diverged(now: Snapshot, run: int) -> tuple[int, int] | None:
    bad = np.argwhere(~now.rounds["finite"][run])
    return (int(bad[0][0]), int(bad[0][1])) if len(bad) else None


def _curves(now: Snapshot, run: int) -> dict[str, np.ndarray]:
    """All numbers per evaluation, of which "std" is the last, then all numbers per round, by name."""
    curves = {name: values[run] for name, values in now.points.items() if name != "accepted"}
    curves |= evaluation.summary(curves["accuracy"])
    return curves | {CURVES.get(k, k): values[run] for k, values in now.rounds.items() if k != "finite"}


def _latest(now: Snapshot, run: int) -> dict[str, Any]:
    """The last value of every number, the mean where it is one per node; whether and when it diverged."""
    latest = {CURVES.get(k, k): np.mean(v[run, -1]) for k, v in now.rounds.items() if k != "finite"}
    latest |= {k: np.mean(v[run, -1]) for k, v in now.points.items() if k not in ("accuracy", "accepted")}
    latest |= evaluation.summary(now.points["accuracy"][run, -1])
    return {**latest, "round": now.done, "diverged": _diverged(now, run)}


def _result(now: Snapshot, run: int, experiment: Experiment, sharers: int) -> Result:
    program, width = experiment.program, len(now.accepted)
    curves = _curves(now, run)
    senders, heard = (a[: program.benign] for a in experiment.graph)
    links = np.stack([heard.nonzero()[0], senders[heard]], axis=1).astype(np.int32)
    accepted = np.zeros((program.benign, program.benign + program.byzantine), np.int32)
    accepted[*links.T] = now.accepted[run][heard]
    since = now.points.get("accepted", now.accepted[:, None])[run][:, heard]
    return Result(
        config=experiment.config,
        digest=experiment.digest,
        notices=experiment.notices,
        curves=curves,
        final={name: curves[name][-1] for name in ("accuracy", "loss")},
        accepted=accepted,
        diverged=_diverged(now, run),
        rounds_per_epoch=int(experiment.knobs.rounds_per_epoch),
        state=now.state if width == 1 else jax.tree.map(lambda leaf: leaf[run], now.state),
        seconds={name: spent / sharers for name, spent in now.seconds.items()},
        links=links,
        accepted_since=since if len(since) == len(curves["round"]) else None,
    )
