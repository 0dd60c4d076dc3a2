"""From a Config to a checked Experiment: its program, and the arrays that the program is called with."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import networkx as nx
import numpy as np

from ubar_jax import memory
from ubar_jax.config import Config, canonical
from ubar_jax.parts import data as data_module
from ubar_jax.parts import topology
from ubar_jax.parts.aggregation import count_neighbours, rules
from ubar_jax.parts.byzantine import attacks, check_range
from ubar_jax.parts.optimisation import optimizers, schedules
from ubar_jax.parts.tasks import make_task, models
from ubar_jax.registry import ConfigError, Spec
from ubar_jax.types import Data, Graph, Knobs, Task


@dataclass(frozen=True)
class Learner:
    """What one node trains and is tested on, as far as it decides compiled code."""

    model: str
    make_model: Callable | None  # of a registered model: registered anew, it is compiled anew
    shape: tuple[int, ...]
    classes: int
    examples: int  # in the training set
    share: int  # of them a node


@dataclass(frozen=True)
class Program:
    """All that decides the compiled code: runs of equal programs share it."""

    learner: Learner
    rule: Spec  # without the arguments of its count, which is a knob
    attack: Spec  # without its real-valued arguments, which are knobs
    strengths: tuple[str, ...]  # the names of those
    optimizer: Spec
    schedule: Spec
    benign: int
    byzantine: int
    benign_slots: int
    trained: int
    slots: int
    pairs: int
    batch: int
    chunk: int  # rounds a dispatch
    ragged: bool  # whether the last chunk is shorter


class Experiment(NamedTuple):
    """A run, checked and ready."""

    config: Config  # canonical
    digest: str  # its digest when it was prepared: the user's own files may change meanwhile
    notices: list[str]
    program: Program
    network: nx.Graph
    graph: Graph
    data: Data
    knobs: Knobs
    test: tuple[np.ndarray, np.ndarray]


@functools.lru_cache(maxsize=32)
def task_of(learner: Learner) -> Task:
    """The learner's model as pure functions, after checking that it runs."""
    return make_task(learner.model, learner.shape, learner.classes)


def model_size(learner: Learner) -> int:
    """d."""
    params = jax.eval_shape(task_of(learner).init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def check_share(config: Config, examples: int, share: int) -> None:
    """Refuses a batch that a node's share of the training set does not fill."""
    if share < config.batch_size:
        n = config.nodes + config.byzantine
        raise ConfigError(
            f"batch_size={config.batch_size} is larger than a node's share: {config.dataset} has "
            f"{examples} training examples, {share} for each of {n} nodes; take "
            + (f"a batch_size of at most {share}, or fewer nodes" if share else "fewer nodes")
        )


def check_memory(config: Config, learner: Learner, images: np.ndarray, slots: float, links: float) -> None:
    """Refuses a run that does not fit into memory; `slots` is K and `links` the number of edges."""
    n, chunk = config.nodes + config.byzantine, min(config.eval_every, config.rounds)
    evaluations = 2 + config.rounds // chunk
    host = {
        "the graph": memory.EDGE * links,
        "every round's and evaluation's numbers": config.nodes * (config.rounds + 8 * evaluations),
    }
    device = {
        "models": 4 * memory.COPIES * n * model_size(learner),
        "images": images.nbytes,
        "neighbour lists": 5 * n * slots,
        "batches between two evaluations": 4 * config.nodes * chunk * config.batch_size,
    }
    advice = "take fewer nodes, a smaller model or fewer rounds between evaluations"
    memory.check_fits("this run", host, memory.host_memory(), "take fewer nodes, links or rounds")
    memory.check_fits("this run", device, memory.device_memory(), advice)


def prepare(config: Config) -> Experiment:
    """Checks everything that can be checked and puts the arrays together; compiles nothing.

    Cheap checks come first: what cannot work is refused before a graph is built.
    """
    config, notices = canonical(config)
    benign, byzantine = config.nodes, config.byzantine
    n = benign + byzantine
    dataset = data_module.load(config.dataset)
    examples = len(dataset.train_y)
    check_share(config, examples, examples // n)
    sharding = data_module.shardings.parse(config.sharding)
    shards = sharding(np.random.default_rng([config.seed, 2]), dataset.train_y, n)
    share = shards.shape[1]
    check_share(config, examples, share)
    learner = Learner(
        model=config.model,
        make_model=None if ":" in config.model else models.parse(config.model).part.function,
        shape=dataset.train_x.shape[1:],
        classes=dataset.classes,
        examples=examples,
        share=share,
    )
    network_spec = topology.topologies.parse(config.topology)
    degree = network_spec.traits.degree
    links = n / 2 * degree(n, **network_spec.of(degree))
    check_memory(config, learner, dataset.train_x, 0, links)
    network = topology.build(network_spec, benign, byzantine, config.seed)
    widest = max(degree for _, degree in network.degree())
    check_memory(config, learner, dataset.train_x, widest, network.number_of_edges())
    graph = topology.to_arrays(network)
    rule, attack = rules.parse(config.rule), attacks.parse(config.attack)
    trained = n if attack.traits.trains else benign
    degree, _, count = count_neighbours(rule, graph, trained, benign)
    traits = rule.traits
    if traits.limit is not None:
        limit = traits.limit(degree, **rule.of(traits.limit))
        if concerned := int((count > limit)[:benign].sum()):
            notices.append(
                f"{rule} needs more neighbours than {concerned} of {benign} benign nodes have; there the "
                "largest number of Byzantine neighbours that it is defined for is assumed, or none"
            )
    alpha = config.alpha
    if alpha is None:
        alpha = traits.alpha(degree, **rule.of(traits.alpha))
    alpha = np.broadcast_to(alpha, degree.shape)
    strengths = {k: v for k, v in attack.arguments if isinstance(v, float)}
    words = tuple((k, v) for k, v in attack.arguments if k not in strengths)
    if byzantine and (setup := attack.traits.setup):
        numbers, said = setup(network, benign, byzantine, config.rounds, rule, **attack.of(setup))
        strengths |= numbers
        notices += said
    check_range(attack, strengths)
    chunk = min(config.eval_every, config.rounds)
    program = Program(
        learner=learner,
        rule=Spec(rule.part, tuple(rule.of(rule.part.function).items())),
        attack=Spec(attack.part, words),
        strengths=tuple(sorted(strengths)),
        optimizer=optimizers.parse(config.optimizer),
        schedule=schedules.parse(config.schedule),
        benign=benign,
        byzantine=byzantine,
        benign_slots=topology.benign_slots(graph, benign),
        trained=trained,
        slots=graph.mask.shape[1],
        pairs=topology.round_up(int(np.sum(traits.pairs(degree, count)))),
        batch=config.batch_size,
        chunk=chunk,
        ragged=config.rounds % chunk != 0,
    )
    knobs = Knobs(
        learning_rate=np.float32(config.learning_rate),
        alpha=alpha.astype(np.float32),
        count=count,
        rounds_per_epoch=np.int32(share // config.batch_size),
        attack={k: np.float32(v) for k, v in strengths.items()},
    )
    shards = shards.astype(np.int32)
    data = Data(dataset.train_x, dataset.train_y, shards, *data_module.statistics(config.dataset))
    return Experiment(
        config=config,
        digest=config.digest(),
        notices=notices,
        program=program,
        network=network,
        graph=graph,
        data=data,
        knobs=knobs,
        test=(dataset.test_x, dataset.test_y),
    )
