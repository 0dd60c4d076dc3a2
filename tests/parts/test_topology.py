import math

import networkx as nx
import numpy as np
import pytest

from ubar_jax.numerics import linalg
from ubar_jax.parts import topology
from ubar_jax.parts.topology import benign_slots, build, numbers_of, round_up, to_arrays, topologies
from ubar_jax.registry import ConfigError

GENERATED = [name for name in topologies.parts if name != "file"]


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize(("benign", "byzantine"), [(12, 0), (8, 4), (13, 3), (3, 9)])
def test_every_topology_places_byzantine_nodes_last_and_keeps_the_benign_connected(name, benign, byzantine):
    spec = topologies.parse(name)
    graph = build(spec, benign, byzantine, seed=5)
    assert sorted(graph) == list(range(benign + byzantine))
    assert nx.is_connected(graph.subgraph(range(benign)))
    assert min(d for _, d in graph.degree()) >= 1
    assert nx.utils.graphs_equal(graph, build(spec, benign, byzantine, seed=5))
    if name in ("erdos_renyi", "scale_free", "small_world"):
        others = [build(spec, benign, byzantine, seed=s) for s in range(6, 12)]
        assert not all(nx.utils.graphs_equal(graph, other) for other in others)


def test_the_attack_free_baseline_has_the_same_benign_graph():
    spec = topologies.parse("erdos_renyi(connection=0.4)")
    alone = build(spec, 30, 0, seed=1)
    for byzantine in (3, 13, 30):
        attacked = build(spec, 30, byzantine, seed=1)
        assert set(alone.edges) == set(attacked.subgraph(range(30)).edges)


def test_byzantine_nodes_are_linked_with_the_connection_ratio():
    spec = topologies.parse("erdos_renyi(connection=0.4)")
    links = [build(spec, 20, 20, seed=s).degree(i) for s in range(20) for i in range(20, 40)]
    assert np.mean(links) == pytest.approx(0.4 * 39, rel=0.03)


def test_arrays_hold_the_graph_sorted_and_padded():
    graph = build(topologies.parse("scale_free"), 20, 4, seed=0)
    arrays = to_arrays(graph)
    for i in range(24):
        assert arrays.neighbours[i][arrays.mask[i]].tolist() == sorted(graph.neighbors(i))


def test_sizes_are_rounded_up_to_a_few():
    sizes = {round_up(k) for k in range(1, 129)}
    assert len(sizes) <= 25 and all(k <= round_up(k) <= 1.25 * k + 3 for k in range(1, 1000))


def test_star_hub_is_benign_and_ring_can_hold_many_attackers():
    star = build(topologies.parse("star"), 5, 15, seed=0)
    assert max(star.degree(i) for i in range(5)) == 19
    ring = build(topologies.parse("ring"), 10, 30, seed=0)
    assert nx.is_connected(ring.subgraph(range(10)))


@pytest.mark.parametrize("suffix", ["graphml", "txt"])
def test_a_file_gives_its_graph(tmp_path, suffix):
    path = tmp_path / f"net.{suffix}"
    graph = nx.relabel_nodes(nx.petersen_graph(), "node{}".format)
    (nx.write_graphml if suffix == "graphml" else nx.write_edgelist)(graph, path)
    built = build(topologies.parse(f"file(path={str(path)!r})"), 7, 3, seed=0)
    assert nx.is_isomorphic(built, nx.petersen_graph())
    assert nx.is_connected(built.subgraph(range(7)))


def test_a_graphml_file_may_mark_its_byzantine_nodes(tmp_path):
    graph = nx.path_graph(5)
    graph.nodes[0]["byzantine"] = True
    nx.write_graphml(graph, tmp_path / "net.graphml")
    built = build(topologies.parse(f"file({str(tmp_path / 'net.graphml')!r})"), 4, 1, seed=0)
    assert list(built.neighbors(4)) == [0]


def _file(tmp_path, graph):
    nx.write_graphml(graph, tmp_path / "net.graphml")
    return f"file(path={str(tmp_path / 'net.graphml')!r})"


def test_files_that_cannot_serve_are_refused(tmp_path):
    def refused(spec, message, benign=4, byzantine=0):
        with pytest.raises(ConfigError, match=message):
            build(topologies.parse(spec), benign, byzantine, seed=0)

    refused("file(path='no/such.graphml')", "does not exist")
    refused(_file(tmp_path, nx.path_graph(4, nx.DiGraph)), "is directed")
    refused(_file(tmp_path, nx.path_graph(5)), "has 5 nodes, but the run has 4 benign")
    refused(_file(tmp_path, nx.Graph([(0, 1), (2, 3)])), "disconnected among its benign nodes")
    lonely = nx.path_graph(3)
    lonely.add_node("x")
    refused(_file(tmp_path, lonely), "node 'x' has no neighbour")
    marked = nx.path_graph(5)
    marked.nodes[2]["byzantine"] = True
    refused(_file(tmp_path, marked), "disconnected among its benign nodes", 4, 1)
    refused(_file(tmp_path, marked), "marks 1 nodes as byzantine, but the run has 2", 3, 2)
    (tmp_path / "net.graphml").write_text("not xml")
    refused(f"file(path={str(tmp_path / 'net.graphml')!r})", "cannot be read")


@pytest.mark.parametrize(
    ("spec", "benign", "message"),
    [
        ("torus", 13, "13 .* is not; 15 is"),
        ("random_regular(degree=3)", 7, "does not exist"),
        ("small_world(degree=9)", 8, "needs more than 9 nodes"),
        ("scale_free(links=9)", 8, "needs more than 9 nodes"),
        ("erdos_renyi(connection=0.02)", 30, "try --connection=0.19 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(spec, benign, message):
    with pytest.raises(ConfigError, match=message):
        build(topologies.parse(spec), benign, 0, seed=0)


def test_the_suggested_connection_ratio_works():
    for n in (5, 10, 30, 100):
        enough = min(1.0, np.ceil(100 * (np.log(n) + 2) / n) / 100)
        build(topologies.parse(f"erdos_renyi(connection={enough})"), n, 0, seed=0)


def test_benign_neighbours_are_in_the_first_slots():
    for seed in range(5):
        network = build(topologies.parse("erdos_renyi(connection=0.3)"), 20, 40, seed)
        graph = to_arrays(network)
        width = benign_slots(graph, 20)
        assert width < graph.mask.shape[1]
        benign = graph.mask & (graph.neighbours < 20)
        assert not benign[:, width:].any()
        assert benign.sum(1).max() == max(sum(v < 20 for v in network[u]) for u in network) <= width


@pytest.mark.parametrize(
    ("byzantine", "seed", "connectivity", "most", "mean", "share", "ties", "gap"),
    [
        (3, 0, 4.0, 3, 1.1, 0.71, 0, 0.26),
        (3, 1, 5.8, 3, 1.1, 0.80, 0, 0.36),
        (13, 0, 4.0, 9, 5, 0.47, 3, 0.21),
        (13, 2, 6.2, 9, 5.6, 0.53, 0, 0.30),
        (30, 0, 4.0, 19, 12, 0.28, 22, 0.15),
        (30, 1, 5.8, 17, 12, 0.33, 15, 0.22),
        (30, 2, 6.2, 19, 12.6, 0.33, 19, 0.22),
    ],
)
def test_numbers_of_a_network_are_those_computed_by_others(
    byzantine, seed, connectivity, most, mean, share, ties, gap
):
    """From a table of these networks that was computed independently, to the digits that it gives."""
    graph = build(topologies.parse("erdos_renyi(connection=0.4)"), 30, byzantine, seed)
    found = numbers_of(graph, 30)
    assert found.algebraic_connectivity == pytest.approx(connectivity, abs=0.05)
    assert found.most_byzantine_neighbours == most
    assert found.mean_byzantine_neighbours == pytest.approx(mean, abs=0.5)
    assert found.least_benign_share == pytest.approx(share, abs=0.005)
    assert found.nodes_with_byzantine_majority_or_tie == ties
    assert found.spectral_gap == pytest.approx(gap, abs=0.0051)


def test_numbers_of_a_network_small_enough_to_check_by_hand():
    """A path 0-1-2 of benign nodes; node 0 has two Byzantine neighbours, node 2 has one."""
    graph = nx.Graph([(0, 1), (1, 2), (0, 3), (0, 4), (2, 3)])
    found = numbers_of(graph, 3)
    assert found[:3] == (2, pytest.approx(7 / 3), 3)
    assert found[3:6] == (1, 2, pytest.approx(1 / 3))
    assert found[6:8] == (1, 2)
    assert found.algebraic_connectivity == pytest.approx(1)
    slots = to_arrays(graph)
    weights = np.zeros((3, 5))
    np.add.at(weights, (np.arange(3)[:, None], slots.neighbours[:3]), np.asarray(linalg.metropolis(slots, 3)))
    block = weights[:, :3] + np.diag(1 - weights[:, :3].sum(1))
    assert found.spectral_gap == pytest.approx(1 - sorted(abs(np.linalg.eigvals(block)))[1], abs=1e-6)


def test_eigenvalues_of_large_networks_are_left_out(monkeypatch):
    monkeypatch.setattr(topology, "DENSE", 9)
    graph = build(topologies.parse("ring"), 10, 2, seed=0)
    assert [math.isnan(number) for number in numbers_of(graph, 10)] == [False] * 8 + [True] * 2
