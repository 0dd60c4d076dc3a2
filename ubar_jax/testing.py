"""Contract checks for rules and attacks; call check_rule and check_attack on your own parts.

    from ubar_jax.testing import check_rule
    check_rule("my_rule(strength=2)", reference=my_numpy_rule)

A reference handles one node at a time, in NumPy and float64: `reference(node, **arguments)` takes a `Node`
and returns (vector [d], indices of the accepted messages or None). The reference of a rule with memory is
called as `reference(node, memory, **arguments)` in several rounds and also returns what this node remembers,
in any form; at the start its memory is None. What a node remembers of a neighbour goes by `node.ids`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jax import Array

from ubar_jax.engine.round import without_lost
from ubar_jax.parts import aggregation, byzantine, topology
from ubar_jax.parts.aggregation import aggregate, count_neighbours, make_inbox, rules
from ubar_jax.parts.byzantine import attacks, messages_of, tailored_since
from ubar_jax.registry import Spec
from ubar_jax.types import Graph, Inbox, Leaf, Start, View

SLOTS = 16  # all cases have the same padded shapes, so that a check compiles a rule once
ROUNDS = 4  # that a rule or attack with memory is followed for
RATE, LENGTH, CLASSES = 0.1, 50, 10  # learning rate, rounds and classes of every case


class Case(NamedTuple):
    """A random network with models and messages; losses are distances to one target per receiver."""

    own: np.ndarray  # [r, d]
    sent: np.ndarray  # [n, d]
    graph: Graph  # [n, K]
    targets: np.ndarray  # [r, d]
    update: np.ndarray  # [r, d]
    benign: int


class Node(NamedTuple):
    """What one receiver knows, for a NumPy reference."""

    own: np.ndarray  # [d]
    messages: np.ndarray  # [k, d]: good messages only, by ascending sender id
    ids: list[int]  # their senders
    degree: int  # |N_i|, bad messages included
    byzantine: int  # true number of Byzantine neighbours
    own_loss: float
    loss: Callable[[np.ndarray], float]
    gradient: Callable[[], np.ndarray]  # of the loss, at own
    update: np.ndarray  # [d]
    weights: np.ndarray  # [k]: Metropolis weights of the messages
    benign: np.ndarray  # [k] bool
    t: int
    rounds: int
    learning_rate: float
    classes: int


def random_case(
    seed: int, benign: int = 9, byzantine: int = 5, d: int = 13, least: int = 1, connected: bool = False
) -> Case:
    """A random irregular graph with degrees >= `least`, and models around a common point.

    `connected` links the benign nodes in a chain: in a real run they are always connected.
    """
    rng = np.random.default_rng(seed)
    n = benign + byzantine
    graph = nx.gnp_random_graph(n, rng.choice([0.15, 0.3, 0.6]), seed=int(rng.integers(2**31)))
    if connected:
        nx.add_path(graph, map(int, rng.permutation(benign)))
    for i in range(n):
        others = [j for j in rng.permutation(n) if j != i and not graph.has_edge(i, j)]
        for j in others[: max(0, least - graph.degree(i))]:
            graph.add_edge(i, int(j))
    arrays = topology.to_arrays(graph)
    width = SLOTS - arrays.mask.shape[1]
    arrays = Graph(*(np.pad(a, ((0, 0), (0, width))) for a in arrays))
    centre = rng.normal(size=d)
    own = centre + rng.normal(size=(n, d))
    sent = own.copy()
    sent[benign:] += 3 * rng.normal(size=(byzantine, d)) * rng.random((byzantine, 1))
    targets = centre + rng.normal(size=(n, d))
    update = rng.normal(size=(benign, d)) / 10
    own32, sent32, targets32, update32 = (
        a.astype(np.float32) for a in (own[:benign], sent, targets[:benign], update)
    )
    return Case(own32, sent32, arrays, targets32, update32, benign)


def next_round(case: Case, seed: int) -> Case:
    """The case one round later: all models and messages have moved."""
    rng = np.random.default_rng([seed, 1])
    own, sent = (a + rng.normal(size=a.shape).astype(np.float32) / 3 for a in (case.own, case.sent))
    sent[: case.benign] = own
    return case._replace(own=own, sent=sent)


def counts_of(rule: Spec, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([r] degree, [r] true number of Byzantine neighbours, [r] the rule's count) of a case."""
    return count_neighbours(rule, case.graph, len(case.own), case.benign)


def _quadratic(x, target):
    return ((x - target) ** 2).mean(-1)


def inbox_of(own, sent, graph: Graph, targets, count, update=None, benign: int = 0, t=0) -> Inbox:
    """The inbox of a case; a receiver's loss is its mean squared distance to its target."""
    update = jnp.zeros_like(own) if update is None else update
    own, sent, graph, targets, count, update, t = jax.tree.map(
        jnp.asarray, (own, sent, graph, targets, count, update, t)
    )
    return make_inbox(
        own=own,
        sent=sent,
        graph=graph,
        benign=benign,
        count=count,
        t=t,
        rounds=jnp.asarray(LENGTH),
        own_loss=_quadratic(own, targets),
        loss_of=lambda receiver, row: _quadratic(sent[row], targets[receiver]),
        pairs=len(own) * graph.mask.shape[1],
        gradient=lambda: 2 * (own - targets) / own.shape[1],
        update=update,
        learning_rate=jnp.float32(RATE),
        classes=CLASSES,
        key=jax.random.key(0),
    )


def start_of(own: Leaf, graph: Graph, byzantine: int) -> Start:
    """What a part with memory starts from."""
    return Start(jnp.asarray(own), graph.mask.shape[1], byzantine, jax.random.key(1))


def make_runner(rule: Spec) -> tuple[Callable, list]:
    """`run(case, count) -> (mixed, info, memory)`, jitted, and a list that gets one entry per trace."""
    traces: list[None] = []

    def run(arrays, count, memory, t, benign):
        traces.append(None)
        own, sent, graph, targets, update, _ = arrays
        return aggregate(rule, inbox_of(own, sent, graph, targets, count, update, benign, t), memory)

    jitted = jax.jit(run, static_argnums=4)

    def call(case: Case, count: np.ndarray, compiled: bool = True, memory: Any = None, t: int = 0):
        """From the first memory, if none is given."""
        if memory is None:
            byzantines = len(case.sent) - case.benign
            memory = aggregation.first_memory(rule, start_of(case.own, case.graph, byzantines))
        arrays = case._replace(benign=0)
        mixed, info, memory = (jitted if compiled else run)(arrays, count, memory, np.int32(t), case.benign)
        return np.asarray(mixed), {k: np.asarray(v) for k, v in info.items()}, memory

    return call, traces


def by_reference(
    rule: Spec, reference: Callable, case: Case, memories: list | None = None, t: int = 0
) -> tuple[np.ndarray, list, list]:
    """([r, d], accepted ids or None, memories): the reference at every receiver, without bad messages."""
    degree, byzantine, _ = counts_of(rule, case)
    degrees = np.asarray(case.graph.mask).sum(1)
    mixed: list[np.ndarray] = []
    accepted: list[list[int] | None] = []
    memories = memories or [None] * len(case.own)
    for i in range(len(case.own)):
        ids = case.graph.neighbours[i][case.graph.mask[i]]
        if rule.traits.defends:
            with np.errstate(over="ignore", invalid="ignore"):
                ids = ids[np.isfinite(np.square(case.sent[ids]).sum(1, dtype=np.float32))]
        own, target = case.own[i].astype(float), case.targets[i].astype(float)

        def loss(x, target=target):
            return float(_quadratic(x, target))

        def gradient(own=own, target=target):
            return 2 * (own - target) / len(own)

        node = Node(
            own=own,
            messages=case.sent[ids].astype(float),
            ids=[int(j) for j in ids],
            degree=int(degree[i]),
            byzantine=int(byzantine[i]),
            own_loss=loss(own),
            loss=loss,
            gradient=gradient,
            update=case.update[i].astype(float),
            weights=1 / (1 + np.maximum(degrees[i], degrees[ids])),
            benign=ids < case.benign,
            t=t,
            rounds=LENGTH,
            learning_rate=RATE,
            classes=CLASSES,
        )
        if rule.traits.init is not None:
            vector, chosen, memories[i] = reference(node, memories[i], **dict(rule.arguments))
        elif len(ids):
            vector, chosen = reference(node, **dict(rule.arguments))
        if not len(ids):
            vector, chosen = own, []
        mixed.append(vector)
        accepted.append(None if chosen is None else sorted(int(ids[j]) for j in chosen))
    return np.stack(mixed), accepted, memories


def check_rule(spec: str, reference: Callable | None = None, graphs: int = 20, relabel: bool = True) -> None:
    """Asserts the contract of a registered rule.

    It equals its reference on random irregular graphs, in several rounds if it has memory; ignores the
    contents of masked slots; returns v if all nodes hold and send v and take no step; stays finite under bad
    messages if it defends; gives the same result jitted and eager; compiles once; and does not depend on the
    numbering of the nodes (`relabel`; pass False for rules whose scores tie by construction: ties go to the
    smallest sender id).
    """
    rule = rules.parse(spec)
    run, traces = make_runner(rule)
    close: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4}
    for seed in range(graphs):
        case = random_case(seed, least=1 + seed % 4)
        _, _, count = counts_of(rule, case)
        mixed, _, memory = run(case, count)
        assert mixed.shape == case.own.shape, f"{spec}: {mixed.shape} instead of {case.own.shape}"
        for leaf in jax.tree.leaves(memory):
            assert leaf.shape[:1] == (len(case.own),), f"{spec}: memory without the receivers in front"
        if reference is not None:
            _check_reference(rule, reference, case, run, close)

        garbage = np.random.default_rng(seed).integers(0, len(case.sent), case.graph.mask.shape)
        slots = np.where(case.graph.mask, case.graph.neighbours, garbage).astype(np.int32)
        again, _, _ = run(case._replace(graph=Graph(slots, case.graph.mask)), count)
        np.testing.assert_allclose(again, mixed, err_msg=f"{spec}: reads masked slots", **close)

        same = case.own[:1]
        alike = case._replace(own=np.repeat(same, len(case.own), 0), sent=np.repeat(same, len(case.sent), 0))
        alike = alike._replace(update=np.zeros_like(case.update))
        v, _, _ = run(alike, count)
        np.testing.assert_allclose(v, alike.own, err_msg=f"{spec}: all send v, result is not v", **close)

        if rule.traits.defends:
            mixed, _, _ = run(with_bad_messages(case), count)
            assert np.isfinite(mixed).all(), f"{spec}: a bad message got into an honest model"
            if reference is not None:
                _check_reference(rule, reference, with_bad_messages(case), run, close)
            large = case.sent.copy()
            large[case.benign :] = 0.9 * np.sqrt(np.finfo(np.float32).max / large.shape[1])
            mixed, _, memory = run(case._replace(sent=large), count)
            assert np.isfinite(mixed).all(), f"{spec}: overflows on a large but valid message"
            mixed, _, _ = run(case, count, memory=memory, t=1)
            assert np.isfinite(mixed).all(), f"{spec}: a large but valid message stays in its memory"
    if relabel:
        case = random_case(graphs, least=7)
        _check_relabelling(rule, case, run, close)
    eager, _, _ = run(case, counts_of(rule, case)[2], compiled=False)
    jitted, _, _ = run(case, counts_of(rule, case)[2])
    np.testing.assert_allclose(eager, jitted, err_msg=f"{spec}: jitted and eager differ", **close)
    assert len(traces) == 2, f"{spec}: traced {len(traces) - 1} times for one shape"


def with_bad_messages(case: Case) -> Case:
    """The case with NaN, infinities and overflowing norms from the Byzantine nodes."""
    bad = case.sent.copy()
    values = np.array([np.nan, np.inf, -np.inf, 1e30, 3e38], np.float32)
    bad[case.benign :] = np.resize(values, len(bad) - case.benign)[:, None]
    bad[case.benign, 1:] = case.sent[case.benign, 1:]  # one NaN coordinate is enough
    return case._replace(sent=bad)


def _check_reference(rule: Spec, reference: Callable, case: Case, run: Callable, close: dict) -> None:
    """The rule equals its reference: in one round, or in several if it has memory."""
    memory, memories, count = None, None, counts_of(rule, case)[2]
    for t in range(1 if rule.traits.init is None else ROUNDS):
        mixed, info, memory = run(case, count, memory=memory, t=t)
        expected, accepted, memories = by_reference(rule, reference, case, memories, t)
        message = f"{rule}: not its reference in round {t}"
        np.testing.assert_allclose(mixed, expected, err_msg=message, **close)
        if "selected" in info:
            for i, ids in enumerate(accepted):
                got = sorted(case.graph.neighbours[i][info["selected"][i] & case.graph.mask[i]])
                assert got == ids, f"{message}: node {i} accepted {got}, its reference accepted {ids}"
        case = next_round(case, t)


def _check_relabelling(rule, case, run, close):
    rng = np.random.default_rng(0)
    n, benign = len(case.sent), case.benign
    new = np.concatenate([rng.permutation(benign), benign + rng.permutation(n - benign)])
    old = np.argsort(new)  # node old[i] gets number i
    neighbours, mask = np.zeros_like(case.graph.neighbours), np.zeros_like(case.graph.mask)
    for i in range(n):
        ids = np.sort(new[case.graph.neighbours[old[i]][case.graph.mask[old[i]]]])
        neighbours[i, : len(ids)], mask[i, : len(ids)] = ids, True
    moved = Case(
        case.own[old[:benign]],
        case.sent[old],
        Graph(neighbours, mask),
        case.targets[old[:benign]],
        case.update[old[:benign]],
        benign,
    )
    before, _, _ = run(case, counts_of(rule, case)[2])
    after, _, _ = run(moved, counts_of(rule, moved)[2])
    message = f"{rule}: depends on the numbering of the nodes"
    np.testing.assert_allclose(after, before[old[:benign]], err_msg=message, **close)


class Scene(NamedTuple):
    """The arrays that an attacker sees, all of them traced."""

    own: Leaf  # [n, d], or [n_b, d] if Byzantine nodes do not train
    update: Leaf
    graph: Graph
    targets: Leaf
    count: Leaf
    t: Leaf


def random_scene(seed: int, attack: Spec, deployed: Spec) -> tuple[Scene, int, int]:
    """(a random scene, number of benign nodes, number of Byzantine nodes); `deployed` is the rule."""
    case = random_case(seed, least=2, connected=True)
    trains = attack.traits.trains
    own = case.sent if trains else case.sent[: case.benign]
    update = np.random.default_rng(seed).normal(size=own.shape).astype(np.float32) / 10
    count = counts_of(deployed, case)[2]
    scene = Scene(own, update, case.graph, case.targets, count, np.int32(seed))
    return scene, case.benign, len(case.sent) - case.benign


@functools.partial(jax.jit, static_argnums=(0, 1))  # a search by an attack calls it hundreds of times
def _mix(deployed: Spec, benign: int, scene: Scene, sent: Array) -> tuple[Array, dict[str, Array]]:
    inbox = inbox_of(scene.own[:benign], sent, scene.graph, scene.targets, scene.count, benign=benign)
    return aggregate(deployed, inbox)[:2]


def view_of(scene: Scene, benign: int, byzantine: int, deployed: Spec) -> View:
    """The View of a scene, as an attack gets it."""
    scene = jax.tree.map(jnp.asarray, scene)
    mix = functools.partial(_mix, deployed, benign, scene)
    return View(
        own=scene.own,
        update=scene.update,
        graph=without_lost(scene.graph, scene.own[:benign], deployed),
        benign=benign,
        byzantine=byzantine,
        benign_slots=benign,  # large enough for any graph, so that an attack is compiled once
        t=scene.t,
        deployed=mix,
    )


def check_attack(spec: str, reference: Callable | None = None, graphs: int = 10) -> None:
    """Asserts the contract of a registered attack.

    It returns one vector per Byzantine node (a tailored attack: per benign node); equals `reference(key,
    view, **arguments)`, which gets the same View; gives the same result for the same key, jitted and eager
    (the deployed rule is always jitted); and compiles once for all strengths. An attack with memory is
    followed for several rounds; its reference is called as `reference(key, view, memory, **arguments)` and
    returns (messages, memory), its memory being None at the start.
    """
    attack, deployed = attacks.parse(spec), rules.parse("ubar")
    strengths = {k: v for k, v in attack.arguments if isinstance(v, float)}
    traits = attack.traits
    traces: list[None] = []

    def send(key, scene, memory, traced):
        traces.append(None)
        return messages_of(attack, key, view_of(scene, benign, byzantines, deployed), memory, **traced)

    jitted = jax.jit(send)
    close: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4}
    for seed in range(graphs):
        scene, benign, byzantines = random_scene(seed, attack, deployed)
        numbers = dict(strengths)
        if traits.setup:
            network = nx.Graph(
                (i, int(j)) for i, (ids, real) in enumerate(zip(*scene.graph, strict=True)) for j in ids[real]
            )
            setup = traits.setup
            numbers |= setup(network, benign, byzantines, 1000, deployed, **attack.of(setup))[0]
        traced = {k: jnp.float32(v) for k, v in numbers.items()}
        rows = byzantines if tailored_since(attack) is None else byzantines * traits.trains + benign
        memory = byzantine.first_memory(attack, start_of(scene.own, scene.graph, byzantines))
        remembered = None
        for t in range(1 if traits.init is None else ROUNDS):
            key = jax.random.fold_in(jax.random.key(seed), t) if t else jax.random.key(seed)
            first, after = jitted(key, scene, memory, traced)
            again, _ = jitted(key, scene, memory, traced)
            expected = (rows, scene.own.shape[1])
            assert first.shape == expected, f"{spec}: sends {first.shape}, not {expected}"
            np.testing.assert_array_equal(first, again, err_msg=f"{spec}: two calls with the same key differ")
            if reference is not None:
                view = view_of(scene, benign, byzantines, deployed)
                arguments = {**dict(attack.arguments), **numbers}
                if traits.init is None:
                    told = reference(key, view, **arguments)
                else:
                    told, remembered = reference(key, view, remembered, **arguments)
                message = f"{spec}: not its reference in round {t}"
                np.testing.assert_allclose(first, told, err_msg=message, **close)
            last, memory = (key, scene, memory, traced), after
            scene = moved_scene(scene, t)
    eager, _ = send(*last)
    np.testing.assert_allclose(eager, jitted(*last)[0], err_msg=f"{spec}: jitted and eager differ", **close)
    assert len(traces) == 2, f"{spec}: traced {len(traces) - 1} times for one shape"


def moved_scene(scene: Scene, seed: int) -> Scene:
    """The scene one round later: all models have moved."""
    rng = np.random.default_rng([seed, 2])
    own = scene.own + rng.normal(size=scene.own.shape).astype(np.float32) / 3
    return scene._replace(own=own, t=np.int32(scene.t + 1))
