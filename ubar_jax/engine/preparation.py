"""Check a Config; build its program and the arrays that the program is called with."""

from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx
import numpy as np

from ubar_jax import memory
from ubar_jax.config import Config, Resolved, resolve
from ubar_jax.engine import devices
from ubar_jax.engine.program import Learner, Program, model_size, task_of
from ubar_jax.parts import data, topology
from ubar_jax.parts.aggregation import count_neighbours, losses_per_round
from ubar_jax.parts.aggregation.counts import GUARD
from ubar_jax.parts.byzantine import attacks, check_range
from ubar_jax.parts.tasks import models, users_class
from ubar_jax.registry import ConfigError, Spec
from ubar_jax.types import Data, Graph, Knobs, Shares


class Experiment(NamedTuple):
    """A run, checked and ready."""

    resolved: Resolved
    notices: list[str]
    program: Program
    network: nx.Graph
    graph: Graph
    data: Data
    shares: Shares
    knobs: Knobs
    test: tuple[np.ndarray, np.ndarray]

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def digest(self) -> str:
        return self.resolved.digest

    @property
    def drawn_from(self) -> Shares:
        """The shares of the nodes that train, as far as examples are drawn from them."""
        trained, (train, held_out) = self.program.trained, self.shares
        if self.program.judge != "held_out" or held_out is None:
            return Shares(train[:trained])
        return Shares(train[:trained], held_out[:trained])


class AtNodes(NamedTuple):
    """The rule's numbers at each of the r receivers of a network."""

    count: np.ndarray  # type: ignore[assignment]  # [r] int32: `inbox.count`
    alpha: np.ndarray  # [r] float32: weight of own model
    pairs: int  # P, padded
    notices: list[str]


def prepare(config: Config | Resolved) -> Experiment:
    """Checks everything that can be checked and builds the arrays; compiles nothing.

    Cheap checks come first: impossible settings are refused before a graph is built.
    """
    run = config if isinstance(config, Resolved) else resolve(config)
    config = run.config
    dataset = data.load(config.dataset)
    shares = split_data(run, dataset)
    learner = Learner(
        model=config.model,
        make_model=users_class(config.model)
        if ":" in config.model
        else models.parse(config.model).part.function,
        shape=dataset.train_x.shape[1:],
        classes=dataset.classes,
    )
    task_of(learner)
    network = build_network(run, learner, dataset.train_x)
    others = topology.alike(run.topology, config.nodes, config.byzantine)
    graph = topology.to_arrays(network, others)
    trained = len(network) if run.attack.traits.trains else config.nodes
    rule = at_nodes(run, graph, trained, others)
    strengths, said = strengths_of(run, network)
    chunk = min(config.eval_every, config.rounds)
    program = Program(
        learner=learner,
        examples=len(dataset.train_y),
        share=shares.train.shape[1],
        rule=Spec(run.rule.part, tuple(run.rule.of(run.rule.part.function).items())),
        attack=Spec(run.attack.part, tuple((k, v) for k, v in run.attack.arguments if k not in strengths)),
        strengths=tuple(sorted(strengths)),
        optimizer=run.optimizer,
        schedule=run.schedule,
        benign=config.nodes,
        byzantine=config.byzantine,
        benign_slots=topology.benign_slots(graph, config.nodes, others),
        trained=trained,
        slots=graph.mask.shape[1],
        pairs=rule.pairs,
        batch=config.batch_size,
        chunk=chunk,
        ragged=config.rounds % chunk != 0,
        order=config.order or run.rule.traits.orders[0],  # type: ignore[arg-type]  # checked
        judge=config.judge,  # type: ignore[arg-type]
        local_steps=config.local_steps,
        held_out=0 if shares.held_out is None else shares.held_out.shape[1],
        devices=devices.used(),
        inner=tuple(attacks.inner(run.attack)),
    )
    knobs = Knobs(
        learning_rate=np.float32(config.learning_rate),
        alpha=rule.alpha,
        count=rule.count,
        rounds_per_epoch=np.int32(program.share // (config.batch_size * config.local_steps)),
        attack={k: np.float32(v) for k, v in strengths.items()},
    )
    return Experiment(
        resolved=run,
        notices=[*run.notices, *rule.notices, *said],
        program=program,
        network=network,
        graph=graph,
        data=Data(dataset.train_x, dataset.train_y, *data.statistics(config.dataset)),
        shares=shares,
        knobs=knobs,
        test=(dataset.test_x, dataset.test_y),
    )


def split_data(run: Resolved, dataset: data.Dataset) -> Shares:
    """Every node's examples; refuses shares that do not fill a round."""
    config, examples = run.config, len(dataset.train_y)
    n = config.nodes + config.byzantine
    check_share(config, examples, examples // n)
    shards = run.sharding(np.random.default_rng([config.seed, 2]), dataset.train_y, n).astype(np.int32)
    check_share(config, examples, shards.shape[1])
    if not config.held_out:
        return Shares(shards)
    np.random.default_rng([config.seed, 3]).permuted(shards, axis=1, out=shards)
    kept, held_out = np.split(shards, [shards.shape[1] - held_out_of(config, shards.shape[1])], axis=1)
    return Shares(kept, held_out)


def held_out_of(config: Config, share: int) -> int:
    """How many examples of a share are held out."""
    return int(config.held_out * share + GUARD)


def check_share(config: Config, examples: int, share: int) -> None:
    """Refuses a round that needs more examples than a node's share of the training set has."""
    size, steps, held_out = config.batch_size, config.local_steps, held_out_of(config, share)
    n, left = config.nodes + config.byzantine, share - held_out
    has = f"{config.dataset} has {examples} training examples, {share} for each of {n} nodes"
    if held_out:
        has += f", of which {held_out} are held out"
    if left < size:
        raise ConfigError(
            f"batch_size={size} is larger than a node's share: {has}; take "
            + (f"a batch_size of at most {left}, or fewer nodes" if left else "fewer nodes")
        )
    if left < steps * size:
        raise ConfigError(
            f"local_steps={steps} with batch_size={size} needs {steps * size} examples per round, more than "
            f"an epoch: {has}; take at most {left // size} local steps, a smaller batch_size, or fewer nodes"
        )
    if config.judge == "held_out" and held_out < size:
        raise ConfigError(
            f"the held-out part is smaller than a batch: {has}, and judge='held_out' needs "
            f"batch_size={size}; hold out more (held_out), or take a smaller batch_size or fewer nodes"
        )


def build_network(run: Resolved, learner: Learner, images: np.ndarray) -> nx.Graph:
    """The run's network; memory is checked before it is built, by the expected degree, and after."""
    config, degree = run.config, run.topology.traits.degree
    n = config.nodes + config.byzantine
    check_memory(config, learner, images, 0, n / 2 * degree(n, **run.topology.of(degree)))
    network = topology.build(run.topology, config.nodes, config.byzantine, config.seed)
    check_memory(config, learner, images, topology.largest_degree(network), network.number_of_edges())
    return network


def check_memory(config: Config, learner: Learner, images: np.ndarray, slots: int, links: float) -> None:
    """Refuses a run that does not fit into memory; `slots` is K and `links` the number of edges."""
    n, chunk = config.nodes + config.byzantine, min(config.eval_every, config.rounds)
    evaluations = 2 + config.rounds // chunk
    host = {
        "the graph": memory.EDGE * links,
        "every round's and evaluation's numbers": config.nodes * (config.rounds + 8 * evaluations),
        "accepted links": config.nodes * slots * evaluations * np.min_scalar_type(chunk).itemsize,
    }
    device: dict[str, float] = {
        "models": 4 * memory.COPIES * n * model_size(learner),
        "images": images.nbytes,
        "neighbour lists": 5 * n * slots,
        "batches between two evaluations": 4 * config.nodes * chunk * config.batch_size * config.local_steps,
    }
    advice = "take fewer nodes, a smaller model or fewer rounds between evaluations"
    memory.check_fits("this run", host, memory.host_memory(), "take fewer nodes, links or rounds")
    memory.check_fits("this run", device, memory.device_memory(), advice)


def at_nodes(run: Resolved, graph: Graph, receivers: int, others: Sequence[Graph] = ()) -> AtNodes:
    """The rule's count, alpha and pairs at the first `receivers` nodes of the graph.

    Pairs are enough for the other networks, too.
    """
    config, rule, traits = run.config, run.rule, run.rule.traits
    degree, _, count = count_neighbours(rule, graph, receivers, config.nodes)
    notices = []
    if traits.limit is not None:
        limit = traits.limit(degree, **rule.of(traits.limit))
        if concerned := int((count > limit)[: config.nodes].sum()):
            notices.append(
                f"{rule} needs more neighbours than {concerned} of {config.nodes} benign nodes have; there "
                "the largest number of Byzantine neighbours that it is defined for is assumed, or none"
            )
    alpha = config.alpha
    if alpha is None:
        alpha = traits.alpha(degree, **rule.of(traits.alpha))
    counted = [(degree, count)]
    counted += [count_neighbours(rule, other, receivers, config.nodes)[::2] for other in others]
    pairs = topology.round_up(max(losses_per_round(rule, *numbers) for numbers in counted))
    return AtNodes(count, np.broadcast_to(alpha, degree.shape).astype(np.float32), pairs, notices)


def strengths_of(run: Resolved, network: nx.Graph) -> tuple[dict[str, float], list[str]]:
    """(the attack's real-valued arguments and what its setup adds to them, notices)."""
    config, attack = run.config, run.attack
    notices: list[str] = []
    strengths = {k: v for k, v in attack.arguments if isinstance(v, float)}
    if config.byzantine and (setup := attack.traits.setup):
        settings = (network, config.nodes, config.byzantine, config.rounds, run.rule)
        numbers, notices = setup(*settings, **attack.of(setup))
        strengths |= numbers
    check_range(attack, strengths)
    return strengths, notices
