"""Ahead-of-time compilation of the programs of a run, with JAX's persistent cache."""

import concurrent.futures
import contextlib
import functools
import os
import re
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ubar_jax.engine import devices, evaluation
from ubar_jax.engine.program import Drawing, Learner, Program, task_of
from ubar_jax.engine.round import REMEMBERING, draw, make_chunk, ravel
from ubar_jax.files import cache_dir
from ubar_jax.numerics import nn
from ubar_jax.parts import aggregation, byzantine
from ubar_jax.registry import NoTraits, Spec
from ubar_jax.types import Data, Graph, Knobs, RoundState, Start

# Vectors as wide as the processor has them. With XLA's default of 256 bits, order statistics take up to 1.7
# times as long.
ON_CPU: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}

DAMAGED = r"Error reading persistent compilation cache entry for '([^']+)'"


class Compiled(NamedTuple):
    """An executable, and where it came from."""

    call: Callable
    cached: bool  # whether the persistent cache had it


def once(function: Callable) -> Any:
    """`lru_cache` that computes a result only once, also if several threads ask for it at the same time."""
    cached = functools.lru_cache(maxsize=32)(function)
    locks: dict[tuple, threading.Lock] = {}

    @functools.wraps(function)
    def waiting(*arguments):
        with locks.setdefault(arguments, threading.Lock()):
            found = cached(*arguments)
        locks.pop(arguments, None)
        return found

    waiting.cache_info, waiting.cache_clear = cached.cache_info, cached.cache_clear  # type: ignore[attr-defined]
    return waiting


@contextlib.contextmanager
def compiling_ahead(programs: Sequence[tuple[Program, int]]) -> Iterator[Callable[[int], None]]:
    """Yields a function of i that compiles the next programs after the i-th, in threads that are free.

    Programs are given with their width; none are compiled if none are given. One core is left for what runs
    meanwhile. On the CPU only: elsewhere compilation may time kernels on the device, which should be idle.
    """
    threads = min(2, devices.cores() - 1) if jax.default_backend() == "cpu" else 0
    if threads < 1 or not programs:
        yield lambda i: None
        return
    distinct = list(dict.fromkeys(programs))
    begun: set[tuple[Program, int]] = set()
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def ahead(i: int) -> None:
        place = distinct.index(programs[i])
        begun.add(programs[i])
        for key in distinct[place + 1 : place + 1 + threads]:
            if key not in begun:
                begun.add(key)
                pool.submit(compiled_chunk, key[0], key[1])  # if it fails, it fails again where it is needed

    try:
        yield ahead
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def use_cache() -> None:
    """Turns JAX's persistent cache on, in the user's cache folder unless JAX was given another."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def repaired_cache() -> Iterator[None]:
    """Removes damaged entries of the persistent cache, so that they are written again.

    JAX does not write entries atomically: a kill can leave an entry that cannot be read and is never
    replaced. JAX warns of it before it compiles; the entry is removed at that moment.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=DAMAGED)
        before = warnings.showwarning

        def show(message, *args, **kwargs):
            found = re.match(DAMAGED, str(message))
            if not (found and _remove_damaged(found[1])):
                before(message, *args, **kwargs)

        warnings.showwarning = show
        yield


def _remove_damaged(name: str) -> bool:
    """Removes the entries of a program's name that cannot be decompressed; whether there were any."""
    folder = Path(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    damaged = [entry for entry in folder.glob(f"{name}-*-cache") if not _is_whole(entry.read_bytes())]
    for entry in damaged:
        entry.unlink(missing_ok=True)
    return bool(damaged)


def _is_whole(entry: bytes) -> bool:
    """Whether a cache entry can be decompressed by the library that JAX chose."""
    decompress: Callable[[bytes], bytes] = zlib.decompress
    with contextlib.suppress(ImportError):  # not public: it may move
        from jax._src.compilation_cache import decompress_executable

        decompress = decompress_executable
    try:
        return bool(decompress(entry))
    except Exception:  # of several libraries
        return False


def initial_state(program: Program, seed: int) -> RoundState:
    """The state before round 0: the same random x_0 for all nodes."""
    key, init_key = jax.random.split(jax.random.key(seed))
    params = _initialiser(program.learner)(init_key)
    params, opt_state = _stacker(program.optimizer, program.trained)(params)
    state = RoundState(params, opt_state, jnp.zeros((), jnp.int32), key)
    if program.rule.traits.init is None and program.attack.traits.init is None:
        return state
    start = Start(ravel(params), program.slots, program.byzantine, jax.random.fold_in(key, REMEMBERING))
    return state._replace(
        rule_memory=aggregation.first_memory(program.rule, start),
        attack_memory=byzantine.first_memory(program.attack, start) if program.byzantine else (),
    )


@functools.lru_cache(maxsize=32)
def _initialiser(learner: Learner) -> Callable:
    return jax.jit(task_of(learner).init)


@functools.lru_cache(maxsize=32)
def _stacker(optimizer: Spec[NoTraits], count: int) -> Callable:
    """From one model to `count` copies of it and of the optimizer's first state."""

    def stack(params):
        both = (params, optimizer().init(params))
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (count, *jnp.shape(leaf))), both)

    return jax.jit(stack)


@once
def compiled_draw(how: Drawing, width: int = 1) -> Compiled:
    """(shards, held_out, key, t) -> Drawn, with the rounds in front; no axis for the runs if width = 1."""
    return _compile(lambda: _trace_draw(how, width))


@once
def _trace_draw(how: Drawing, width: int) -> jax.stages.Traced:
    index = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    held_out = index((how.trained, how.held_out)) if how.judge == "held_out" else None
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = (index((how.trained, how.share)), held_out, key, index(()))
    drawn: Callable = functools.partial(draw, how)
    if width > 1:
        drawn, arguments = jax.vmap(drawn), _stacked(arguments, width)
    whole = devices.whole(how.devices)
    return jax.jit(drawn, in_shardings=whole, out_shardings=whole).trace(*arguments)


def trace_chunk(program: Program, width: int = 1) -> jax.stages.Traced:
    """Traces a chunk (one dispatch): `scan` over `program.chunk` rounds of `width` runs side by side."""
    chunk = make_chunk(program)
    if width > 1:
        chunk = jax.vmap(chunk, in_axes=(0, 0, None, 0, 0, None))
    state, data, graph, knobs = _shapes(program, width)
    drawn = _trace_draw(program.drawing, width).out_info
    rounds = jax.ShapeDtypeStruct((), np.int32)
    chunk = nn.over(devices.mesh(program.devices), chunk)
    whole = devices.whole(program.devices)
    jitted = jax.jit(chunk, donate_argnums=0, in_shardings=whole, out_shardings=whole)
    return jitted.trace(state, drawn, data, graph, knobs, rounds)


@once
def compiled_chunk(program: Program, width: int = 1) -> Compiled:
    """(state, drawn, data, graph, knobs, rounds) -> (state, Metrics); no axis for the runs if width = 1."""
    return _compile(lambda: trace_chunk(program, width))


@once
def compiled_evaluation(
    learner: Learner, benign: int, trained: int, tests: int, width: int = 1, count: int = 1
) -> Compiled:
    """(params, statistics, x, y) -> accuracy and loss of every benign node on `tests` examples.

    Over `count` devices.
    """
    evaluate = evaluation.make_evaluate(task_of(learner), benign)
    if width > 1:
        evaluate = jax.vmap(evaluate, in_axes=(0, None, None, None))
    params = jax.eval_shape(task_of(learner).init, jax.random.key(0))
    params = _stacked(params, trained) if width == 1 else _stacked(params, width, trained)
    shape = jax.ShapeDtypeStruct
    statistics = statistics_of(_data_shapes(learner, 1))
    x, y = shape((tests, *learner.shape), np.uint8), shape((tests,), np.int32)
    whole = devices.whole(count)
    spread = jax.jit(nn.over(devices.mesh(count), evaluate), in_shardings=whole, out_shardings=whole)
    return _compile(lambda: spread.trace(params, statistics, x, y))


def statistics_of(data: Data) -> Data:
    """The part of the training data that evaluation needs: mean and deviation."""
    return data._replace(x=None, y=None)


def _compile(trace: Callable[[], jax.stages.Traced]) -> Compiled:
    lowered = trace().lower()
    thread = threading.get_ident()
    before = _hits()[thread]  # without hits of constants computed while tracing
    call = executable(lowered)
    return Compiled(call, _hits()[thread] > before)


def executable(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The executable, with the options that suit the device."""
    return lowered.compile(compiler_options=ON_CPU if jax.default_backend() == "cpu" else None)


@functools.cache
def _hits() -> Counter[int]:
    """Programs found in the persistent cache, per thread; jax 0.7 cannot remove the listener that counts."""
    count: Counter[int] = Counter()

    def listen(event: str, **_) -> None:
        count[threading.get_ident()] += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(listen)
    return count


def _stacked(tree, *axes: int):
    """The shapes of a tree, with more leading axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype), tree)


def _data_shapes(learner: Learner, examples: int) -> Data:
    shape, channels = jax.ShapeDtypeStruct, learner.shape[-1:]
    return Data(
        x=shape((examples, *learner.shape), np.uint8),
        y=shape((examples,), np.int32),
        mean=shape(channels, np.float32),
        std=shape(channels, np.float32),
    )


def _shapes(program: Program, width: int) -> tuple[RoundState, Data, Graph, Knobs]:
    """The shapes of a chunk's arguments, but for the drawn examples."""
    shape, n = jax.ShapeDtypeStruct, program.benign + program.byzantine
    number, count = shape((), np.float32), shape((), np.int32)
    data = _data_shapes(program.learner, program.examples)
    graph = Graph(shape((n, program.slots), np.int32), shape((n, program.slots), bool))
    attack = dict.fromkeys(program.strengths, number)
    alpha, counts = (shape((program.trained,), t) for t in (np.float32, np.int32))
    state = jax.eval_shape(lambda: initial_state(program, 0))
    run = (state, graph, Knobs(number, alpha, counts, count, attack))
    state, graph, knobs = _stacked(run, width) if width > 1 else run
    return state, data, graph, knobs
