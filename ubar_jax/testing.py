"""Contract checks for rules and attacks; call check_rule and check_attack on your own parts.

    from ubar_jax.testing import check_rule
    check_rule("my_rule(strength=2)", reference=my_numpy_rule)

A reference handles one node at a time, in NumPy and float64: `reference(node, **arguments)` takes a `Node`
and returns (vector [d], indices of the accepted messages or None).
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
from ubar_jax.parts import topology
from ubar_jax.parts.aggregation import aggregate, count_neighbours, make_inbox, rules
from ubar_jax.parts.byzantine import attacks, tailored_since
from ubar_jax.registry import Spec
from ubar_jax.types import Graph, Inbox, Leaf, View

SLOTS = 16  # all cases have the same padded shapes, so that a check compiles a rule once


class Case(NamedTuple):
    """A random network with models and messages; losses are distances to one target per receiver."""

    own: np.ndarray  # [r, d]
    sent: np.ndarray  # [n, d]
    graph: Graph  # [n, K]
    targets: np.ndarray  # [r, d]
    benign: int


class Node(NamedTuple):
    """What one receiver knows, for a NumPy reference."""

    own: np.ndarray  # [d]
    messages: np.ndarray  # [k, d]: good messages only, by ascending sender id
    degree: int  # |N_i|, bad messages included
    byzantine: int  # true number of Byzantine neighbours
    own_loss: float
    loss: Callable[[np.ndarray], float]


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
    own32, sent32, targets32 = (a.astype(np.float32) for a in (own[:benign], sent, targets[:benign]))
    return Case(own32, sent32, arrays, targets32, benign)


def counts_of(rule: Spec, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([r] degree, [r] true number of Byzantine neighbours, [r] the rule's count) of a case."""
    return count_neighbours(rule, case.graph, len(case.own), case.benign)


def _quadratic(x, target):
    return ((x - target) ** 2).mean(-1)


def inbox_of(own, sent, graph: Graph, targets, count) -> Inbox:
    """The inbox of a case; a receiver's loss is its mean squared distance to its target."""
    own, sent, graph, targets, count = jax.tree.map(jnp.asarray, (own, sent, graph, targets, count))
    heard = Graph(*(a[: len(own)] for a in graph))
    return make_inbox(
        own=own,
        sent=sent,
        graph=heard,
        count=count,
        t=jnp.zeros((), jnp.int32),
        own_loss=_quadratic(own, targets),
        loss_of=lambda receiver, row: _quadratic(sent[row], targets[receiver]),
        pairs=heard.mask.size,
    )


def make_runner(rule: Spec) -> tuple[Callable, list]:
    """`run(case, count) -> (mixed, info)`, jitted, and a list that gets one entry per trace."""
    traces: list[None] = []

    def run(own, sent, graph, targets, count):
        traces.append(None)
        return aggregate(rule, inbox_of(own, sent, graph, targets, count))

    jitted = jax.jit(run)

    def call(case: Case, count: np.ndarray, compiled: bool = True):
        arrays = (case.own, case.sent, case.graph, case.targets, count)
        mixed, info = (jitted if compiled else run)(*arrays)
        return np.asarray(mixed), {k: np.asarray(v) for k, v in info.items()}

    return call, traces


def by_reference(rule: Spec, reference: Callable, case: Case) -> tuple[np.ndarray, list]:
    """([r, d], accepted ids or None): the reference at every receiver, after dropping bad messages."""
    degree, byzantine, _ = counts_of(rule, case)
    mixed: list[np.ndarray] = []
    accepted: list[list[int] | None] = []
    for i in range(len(case.own)):
        ids = case.graph.neighbours[i][case.graph.mask[i]]
        if rule.traits.defends:
            with np.errstate(over="ignore", invalid="ignore"):
                ids = ids[np.isfinite(np.square(case.sent[ids]).sum(1, dtype=np.float32))]
        own, target = case.own[i].astype(float), case.targets[i].astype(float)
        if not len(ids):
            mixed.append(own)
            accepted.append([])
            continue

        def loss(x, target=target):
            return float(_quadratic(x, target))

        messages = case.sent[ids].astype(float)
        node = Node(own, messages, int(degree[i]), int(byzantine[i]), loss(own), loss)
        vector, chosen = reference(node, **dict(rule.arguments))
        mixed.append(vector)
        accepted.append(None if chosen is None else sorted(int(ids[j]) for j in chosen))
    return np.stack(mixed), accepted


def check_rule(spec: str, reference: Callable | None = None, graphs: int = 20, relabel: bool = True) -> None:
    """Asserts the contract of a registered rule.

    It equals its reference on random irregular graphs; ignores the contents of masked slots; returns v if
    all nodes hold and send v; stays finite under bad messages if it defends; gives the same result jitted
    and eager; compiles once; and does not depend on the numbering of the nodes (`relabel`; pass False for
    rules whose scores tie by construction: ties go to the smallest sender id).
    """
    rule = rules.parse(spec)
    run, traces = make_runner(rule)
    close: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4}
    for seed in range(graphs):
        case = random_case(seed, least=1 + seed % 4)
        _, _, count = counts_of(rule, case)
        mixed, info = run(case, count)
        assert mixed.shape == case.own.shape, f"{spec}: {mixed.shape} instead of {case.own.shape}"
        if reference is not None:
            _compare(rule, reference, case, mixed, info, close)

        garbage = np.random.default_rng(seed).integers(0, len(case.sent), case.graph.mask.shape)
        slots = np.where(case.graph.mask, case.graph.neighbours, garbage).astype(np.int32)
        again, _ = run(case._replace(graph=Graph(slots, case.graph.mask)), count)
        np.testing.assert_allclose(again, mixed, err_msg=f"{spec}: reads masked slots", **close)

        same = case.own[:1]
        alike = case._replace(own=np.repeat(same, len(case.own), 0), sent=np.repeat(same, len(case.sent), 0))
        v, _ = run(alike, count)
        np.testing.assert_allclose(v, alike.own, err_msg=f"{spec}: all send v, result is not v", **close)

        if rule.traits.defends:
            bad = case.sent.copy()
            values = np.array([np.nan, np.inf, -np.inf, 1e30, 3e38], np.float32)
            bad[case.benign :] = np.resize(values, len(bad) - case.benign)[:, None]
            bad[case.benign, 1:] = case.sent[case.benign, 1:]  # one NaN coordinate is enough
            poisoned = case._replace(sent=bad)
            mixed, info = run(poisoned, count)
            assert np.isfinite(mixed).all(), f"{spec}: a bad message got into an honest model"
            if reference is not None:
                _compare(rule, reference, poisoned, mixed, info, close)
            bad[case.benign :] = 0.9 * np.sqrt(np.finfo(np.float32).max / bad.shape[1])
            mixed, _ = run(case._replace(sent=bad), count)
            assert np.isfinite(mixed).all(), f"{spec}: overflows on a large but valid message"
    if relabel:
        case = random_case(graphs, least=7)
        _check_relabelling(rule, case, run, close)
    eager, _ = run(case, counts_of(rule, case)[2], compiled=False)
    jitted, _ = run(case, counts_of(rule, case)[2])
    np.testing.assert_allclose(eager, jitted, err_msg=f"{spec}: jitted and eager differ", **close)
    assert len(traces) == 2, f"{spec}: traced {len(traces) - 1} times for one shape"


def _compare(rule, reference, case, mixed, info, close):
    expected, accepted = by_reference(rule, reference, case)
    np.testing.assert_allclose(mixed, expected, err_msg=f"{rule}: not its reference", **close)
    if "selected" in info:
        for i, ids in enumerate(accepted):
            got = sorted(case.graph.neighbours[i][info["selected"][i] & case.graph.mask[i]])
            assert got == ids, f"{rule}: node {i} accepted {got}, its reference accepted {ids}"


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
        benign,
    )
    before, _ = run(case, counts_of(rule, case)[2])
    after, _ = run(moved, counts_of(rule, moved)[2])
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
    inbox = inbox_of(scene.own[:benign], sent, scene.graph, scene.targets, scene.count)
    return aggregate(deployed, inbox)


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
    (the deployed rule is always jitted); and compiles once for all strengths.
    """
    attack, deployed = attacks.parse(spec), rules.parse("ubar")
    strengths = {k: v for k, v in attack.arguments if isinstance(v, float)}
    traits = attack.traits
    traces: list[None] = []

    def send(key, scene, traced):
        traces.append(None)
        return attack(key, view_of(scene, benign, byzantine, deployed), **traced)

    jitted = jax.jit(send)
    close: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4}
    for seed in range(graphs):
        scene, benign, byzantine = random_scene(seed, attack, deployed)
        numbers = dict(strengths)
        if traits.setup:
            network = nx.Graph(
                (i, int(j)) for i, (ids, real) in enumerate(zip(*scene.graph, strict=True)) for j in ids[real]
            )
            setup = traits.setup
            numbers |= setup(network, benign, byzantine, 1000, deployed, **attack.of(setup))[0]
        traced = {k: jnp.float32(v) for k, v in numbers.items()}
        key = jax.random.key(seed)
        first, again = (np.asarray(jitted(key, scene, traced)) for _ in range(2))
        rows = byzantine if tailored_since(attack) is None else byzantine * traits.trains + benign
        expected = (rows, scene.own.shape[1])
        assert first.shape == expected, f"{spec}: sends {first.shape}, not {expected}"
        np.testing.assert_array_equal(first, again, err_msg=f"{spec}: two calls with the same key differ")
        if reference is not None:
            view = view_of(scene, benign, byzantine, deployed)
            expected = reference(key, view, **{**dict(attack.arguments), **numbers})
            np.testing.assert_allclose(first, expected, err_msg=f"{spec}: not its reference", **close)
    eager = np.asarray(send(key, scene, traced))
    np.testing.assert_allclose(eager, first, err_msg=f"{spec}: jitted and eager differ", **close)
    assert len(traces) == 2, f"{spec}: traced {len(traces) - 1} times for one shape"
