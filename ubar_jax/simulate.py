"""From a Config to its curves: checks, arrays on the device, chunks of compiled rounds, evaluation."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jax import Array, lax

from ubar_jax import data as data_module
from ubar_jax import metrics, topology
from ubar_jax.attacks import attacks
from ubar_jax.config import Config, canonical
from ubar_jax.models import make_task, models
from ubar_jax.registry import ConfigError, Spec
from ubar_jax.round import batches, make_round
from ubar_jax.rules import count_neighbours, rules
from ubar_jax.schedules import optimizers, schedules
from ubar_jax.types import Data, Graph, Knobs, Metrics, RoundState


@dataclass(frozen=True)
class Program:
    """All that decides the compiled code. Runs of equal programs and shapes share it."""

    model: str
    make_model: Callable | None  # of a registered model: registered anew, it is compiled anew
    shape: tuple[int, ...]
    classes: int
    rule: Spec  # without the arguments of its count, which is a knob
    attack: Spec  # without its real-valued arguments, which are knobs
    optimizer: Spec
    schedule: Spec
    benign: int
    byzantine: int
    benign_slots: int
    trained: int
    pairs: int
    batch: int
    chunk: int  # rounds a dispatch
    ragged: bool  # whether the last chunk is shorter


class Experiment(NamedTuple):
    """A run, checked and ready: its program and the arrays that the program is called with."""

    config: Config  # canonical
    notices: list[str]
    program: Program
    network: nx.Graph
    graph: Graph
    data: Data
    knobs: Knobs
    test: tuple[np.ndarray, np.ndarray]


class Result(NamedTuple):
    """What a run gives."""

    config: Config  # canonical
    notices: list[str]
    curves: dict[str, np.ndarray]  # over evaluations: round [E], accuracy and loss [E, n_b], worst,
    # mean, std, consensus [E]; over rounds: train_loss, byzantine_candidates, byzantine_selected [T]
    final: dict[str, np.ndarray]  # accuracy and loss of every benign node [n_b], on the whole test set
    accepted: np.ndarray  # [n_b, n] how many rounds the receiver accepted the sender
    diverged: tuple[int, int] | None  # first (round, node) whose model is not finite
    state: RoundState
    seconds: dict[str, float]  # setup, rounds, evaluation; a first call includes its compilation


def prepare(config: Config) -> Experiment:
    """Checks everything that can be checked and puts the arrays together; compiles nothing."""
    config, notices = canonical(config)
    benign, byzantine = config.nodes, config.byzantine
    n = benign + byzantine
    network = topology.build(topology.topologies.parse(config.topology), benign, byzantine, config.seed)
    dataset = data_module.load(config.dataset)
    make_task(config.model, dataset.train_x.shape[1:], dataset.classes)

    sharding = data_module.shardings.parse(config.sharding)
    share = len(dataset.train_y) // n
    shards = sharding(np.random.default_rng([config.seed, 2]), dataset.train_y, n) if share else []
    if (share := shards.shape[1] if share else 0) < config.batch_size:
        raise ConfigError(
            f"batch_size={config.batch_size} is larger than a node's share: {config.dataset} has "
            f"{len(dataset.train_y)} training examples, {share} for each of {n} nodes; take "
            + (f"a batch_size of at most {share}, or fewer nodes" if share else "fewer nodes")
        )
    graph = topology.to_arrays(network)
    rule, attack = rules.parse(config.rule), attacks.parse(config.attack)
    trained = n if attack.part.traits["trains"] else benign
    degree, _, count = count_neighbours(rule, graph, trained, benign)
    traits = rule.part.traits
    if traits["limit"] is not None:
        limit = traits["limit"](degree, **rule.of(traits["limit"]))
        if concerned := int((count > limit)[:benign].sum()):
            notices.append(
                f"{rule} needs more neighbours than {concerned} of {benign} benign nodes have; there the "
                "largest number of Byzantine neighbours that it is defined for is assumed, or none"
            )
    alpha = config.alpha
    if alpha is None:
        alpha = traits["alpha"](degree, **rule.of(traits["alpha"]))
    alpha = np.broadcast_to(alpha, degree.shape)
    strengths = {k: v for k, v in attack.arguments if isinstance(v, float)}
    words = tuple((k, v) for k, v in attack.arguments if k not in strengths)
    if byzantine and (setup := attack.part.traits["setup"]):
        numbers, said = setup(network, benign, byzantine, config.rounds, rule, **attack.of(setup))
        strengths |= numbers
        notices += said
    rounds_per_epoch = share // config.batch_size
    chunk = min(config.eval_every, config.rounds)
    program = Program(
        model=config.model,
        make_model=None if ":" in config.model else models.parse(config.model).part.function,
        shape=dataset.train_x.shape[1:],
        classes=dataset.classes,
        rule=Spec(rule.part, tuple(rule.of(rule.part.function).items())),
        attack=Spec(attack.part, words),
        optimizer=optimizers.parse(config.optimizer),
        schedule=schedules.parse(config.schedule),
        benign=benign,
        byzantine=byzantine,
        benign_slots=topology.benign_slots(graph, benign),
        trained=trained,
        pairs=topology.round_up(int(np.sum(traits["pairs"](degree, count)))),
        batch=config.batch_size,
        chunk=chunk,
        ragged=config.rounds % chunk != 0,
    )
    knobs = Knobs(
        learning_rate=np.float32(config.learning_rate),
        alpha=alpha.astype(np.float32),
        count=count,
        rounds_per_epoch=np.int32(rounds_per_epoch),
        attack={k: np.float32(v) for k, v in strengths.items()},
    )
    shards = shards.astype(np.int32)
    data = Data(dataset.train_x, dataset.train_y, shards, *data_module.channel_statistics(dataset.train_x))
    return Experiment(config, notices, program, network, graph, data, knobs, (dataset.test_x, dataset.test_y))


def initial_state(program: Program, seed: int) -> RoundState:
    """The same x_0 for all nodes, drawn once."""
    task = make_task(program.model, program.shape, program.classes)
    key, init_key = jax.random.split(jax.random.key(seed))

    def stack(leaf):
        return jnp.broadcast_to(leaf[None], (program.trained, *leaf.shape)).copy()

    params = jax.jit(task.init)(init_key)
    opt_state = program.optimizer().init(params)
    params, opt_state = jax.tree.map(stack, (params, opt_state))
    return RoundState(params, opt_state, jnp.zeros((), jnp.int32), key)


@functools.lru_cache(maxsize=32)
def compiled(program: Program) -> tuple[Callable, Callable]:
    """(chunk, evaluate), jitted. One chunk is one dispatch: `program.chunk` rounds under `scan`."""
    task = make_task(program.model, program.shape, program.classes)
    step = make_round(
        task,
        program.rule,
        program.attack,
        program.optimizer(),
        program.schedule,
        program.classes,
        program.benign,
        program.byzantine,
        program.benign_slots,
        program.pairs,
    )

    def chunk(state: RoundState, data: Data, graph: Graph, knobs: Knobs, rounds: Array):
        """Runs until `program.chunk` more rounds, or `rounds` in all, are done."""

        def body(state, index):
            def go(state):
                return step(state, index, data, graph, knobs)

            if not program.ragged:
                return go(state)
            blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(go, state)[1])
            return lax.cond(state.t < rounds, go, lambda state: (state, blank), state)

        index = batches(data, state.key, state.t, program.chunk, program.batch, program.trained)
        state, seen = lax.scan(body, state, index)
        return state, seen._replace(accepted=jnp.sum(seen.accepted, axis=0))

    evaluate = metrics.make_evaluate(task, program.benign)
    return jax.jit(chunk, donate_argnums=0), jax.jit(evaluate)


def simulate(config: Config, progress: Callable[[dict[str, Any]], None] | None = None) -> Result:
    """Runs one config. `progress` is called after every evaluation with the latest numbers."""
    start = time.perf_counter()
    experiment = prepare(config)
    config, program = experiment.config, experiment.program
    chunk, evaluate = compiled(program)
    state = initial_state(program, config.seed)
    graph, data, knobs, test = jax.device_put(experiment[4:8])
    part = tuple(a[: config.eval_size] for a in test)
    seconds = {"setup": time.perf_counter() - start, "rounds": 0.0, "evaluation": 0.0}
    seen: list[Metrics] = []
    points: list[dict[str, np.ndarray]] = []
    done, diverged = 0, None

    def look(test):
        started = time.perf_counter()
        point = jax.device_get(evaluate(state.params, data, *test))
        seconds["evaluation"] += time.perf_counter() - started
        return {"round": np.int32(done), **point}

    points.append(look(part))
    while done < config.rounds:
        started = time.perf_counter()
        state, new = chunk(state, data, graph, knobs, np.int32(config.rounds))
        new = jax.device_get(new)
        seconds["rounds"] += time.perf_counter() - started
        ran = min(program.chunk, config.rounds - done)
        new = Metrics(*(a if name == "accepted" else a[:ran] for name, a in new._asdict().items()))
        if diverged is None and not new.finite.all():
            t, node = np.argwhere(~new.finite)[0]
            diverged = (done + int(t), int(node))
        done += ran
        seen.append(new)
        points.append(look(part if done < config.rounds else test))
        if progress is not None:
            progress({"round": done, "diverged": diverged, **metrics.summary(points[-1]["accuracy"])})

    curves = {k: np.stack([p[k] for p in points]) for k in points[0]}
    curves |= metrics.summary(curves["accuracy"])
    curves["train_loss"] = np.concatenate([s.loss for s in seen])
    for name in ("byzantine_candidates", "byzantine_selected"):
        curves[name] = np.concatenate([getattr(s, name) for s in seen])
    accepted = np.zeros((program.benign, len(experiment.graph.mask)), np.int32)
    slots, heard = (a[: program.benign] for a in experiment.graph)
    np.add.at(
        accepted,
        (np.arange(program.benign)[:, None], slots),
        np.where(heard, sum(s.accepted for s in seen), 0),
    )
    final = {name: curves[name][-1] for name in ("accuracy", "loss")}
    return Result(config, experiment.notices, curves, final, accepted, diverged, state, seconds)
