"""Topologies: networkx graphs with placed Byzantine nodes, converted to padded neighbour lists.

Benign nodes come first. A topology with the trait `places` places the Byzantine nodes itself (the paper's
construction). The others draw a graph of all n nodes, in which Byzantine positions are drawn at random until
the benign subgraph is connected.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import networkx as nx
import numpy as np

from ubar_jax.registry import ConfigError, Number, Registry, Spec
from ubar_jax.types import Graph

DRAWS = 1000  # maximum number of random graphs drawn to find a connected one
DENSE = 2000  # maximum number of benign nodes for which eigenvalues are computed
ALIKE = 10  # number of networks that sizes are taken from
MANY = 500  # nodes above which they are not


@dataclass(frozen=True)
class TopologyTraits:
    """What the simulator must know about a topology."""

    places: bool = False  # whether it places the Byzantine nodes itself
    degree: Callable[..., float] = lambda n: 0  # expected mean degree; may take the topology's arguments
    reads: str | None = None  # name of the argument that is a file path
    # (rng, (benign, byzantine), arguments) -> [n, n] bool: the links of a sample network of this kind, used
    # only to choose padded sizes; it need not be connected
    like: Callable[..., np.ndarray] | None = None


topologies = Registry("topology", given=2, traits=TopologyTraits)


def _links(rng: np.random.Generator, nodes: tuple[int, int], connection: float = 0.4) -> np.ndarray:
    """The links of an Erdos-Renyi graph; a node without any is linked to the one before it."""
    links = np.triu(rng.random((sum(nodes), sum(nodes))) < connection, 1)
    links |= links.T
    lonely = np.flatnonzero(~links.any(axis=1))
    links[lonely, lonely - 1] = links[lonely - 1, lonely] = True
    return links


@topologies.register(places=True, degree=lambda n, connection: connection * (n - 1), like=_links)
def erdos_renyi(
    seed: int, nodes: tuple[int, int], connection: Annotated[float, Number(0, 1, open_low=True)] = 0.4
) -> nx.Graph:
    """The paper's topology: connected Erdos-Renyi graph of benign nodes, Byzantine nodes linked at random."""
    benign, byzantine = nodes
    for draw in range(DRAWS):
        graph = nx.gnp_random_graph(benign, connection, seed=_stream(seed, 0, draw))
        if nx.is_connected(graph):
            break
    else:
        enough = min(1.0, math.ceil(100 * (math.log(benign) + 2) / benign) / 100)
        raise ConfigError(
            f"no connected graph of {benign} benign nodes in {DRAWS} draws at connection ratio "
            f"{connection:g}; try --connection={enough:g} or more"
        )
    rng = np.random.default_rng([seed, 1])
    for i in range(benign, benign + byzantine):
        links = np.zeros(0, int)
        # Node i draws its links to nodes 0..i-1; redraw if there are none.
        while not len(links):
            links = np.flatnonzero(rng.random(i) < connection)
        graph.add_edges_from((i, int(j)) for j in links)
    return graph


@topologies.register(degree=lambda n: n - 1)
def complete(seed: int, n: int) -> nx.Graph:
    """Every node is linked to every other."""
    return nx.complete_graph(n)


@topologies.register
def ring(seed: int, n: int) -> nx.Graph:
    """A cycle: two neighbours per node."""
    return nx.cycle_graph(n) if n > 2 else nx.path_graph(n)


@topologies.register
def star(seed: int, n: int) -> nx.Graph:
    """One benign hub that is linked to all other nodes."""
    return nx.star_graph(n - 1)


@topologies.register
def torus(seed: int, n: int) -> nx.Graph:
    """A periodic grid, as square as the number of nodes allows: four neighbours per node."""
    side = next((a for a in range(math.isqrt(n), 2, -1) if n % a == 0), None)
    if side is None:
        fits = next(m for m in range(n + 1, 2 * n + 12) if any(m % a == 0 for a in _sides(m)))
        raise ConfigError(
            f"a torus needs a number of nodes that is a product of two numbers >= 3, and {n} "
            f"(benign and Byzantine together) is not; {fits} is"
        )
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(side, n // side, periodic=True))


def _sides(n: int) -> range:
    return range(3, math.isqrt(n) + 1)


@topologies.register(degree=lambda n, degree: degree)
def random_regular(seed: int, n: int, degree: Annotated[int, Number(2, integer=True)] = 4) -> nx.Graph:
    """Random connected graph in which all nodes have the same degree."""
    if degree >= n or degree * n % 2:
        raise ConfigError(
            f"random_regular(degree={degree}) of {n} nodes does not exist; degree must be below "
            "the number of nodes (benign and Byzantine) and their product even"
        )
    return _until_connected(
        lambda draw: nx.random_regular_graph(degree, n, seed=_stream(seed, 0, draw)),
        f"random_regular(degree={degree}) of {n} nodes",
    )


@topologies.register(degree=lambda n, degree: degree)
def small_world(
    seed: int,
    n: int,
    degree: Annotated[int, Number(2, integer=True)] = 4,
    rewire: Annotated[float, Number(0, 1)] = 0.1,
) -> nx.Graph:
    """Watts-Strogatz: a ring lattice with a share of its links rewired at random."""
    if degree >= n:
        raise ConfigError(f"small_world(degree={degree}) needs more than {degree} nodes, not {n}")
    if degree % 2:
        raise ConfigError(f"small_world(degree={degree}) must be even: half on each side of the ring")
    return _until_connected(
        lambda draw: nx.watts_strogatz_graph(n, degree, rewire, seed=_stream(seed, 0, draw)),
        f"small_world(degree={degree}, rewire={rewire:g}) of {n} nodes",
    )


@topologies.register(degree=lambda n, links: 2 * links)
def scale_free(seed: int, n: int, links: Annotated[int, Number(1, integer=True)] = 2) -> nx.Graph:
    """Barabasi-Albert: each new node links to `links` others, preferring those of high degree."""
    if links >= n:
        raise ConfigError(f"scale_free(links={links}) needs more than {links} nodes, not {n}")
    return nx.barabasi_albert_graph(n, links, seed=_stream(seed, 0))


@topologies.register(places=True, reads="path")
def file(seed: int, nodes: tuple[int, int], path: str) -> nx.Graph:
    """Graph from an edge list or a .graphml file; .graphml nodes may have the attribute byzantine=true."""
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"graph file {path!r} does not exist (looked in {source.absolute()})")
    try:
        if source.suffix == ".graphml":
            graph = nx.read_graphml(source)
        else:
            graph = nx.read_edgelist(source)
    except Exception as error:
        raise ConfigError(
            f"graph file {path!r} cannot be read ({error}); give a .graphml file, or an edge list "
            "with two node names per line"
        ) from error
    if graph.is_directed():
        raise ConfigError(
            f"graph file {path!r} is directed; links must go both ways (edgedefault='undirected')"
        )
    graph = nx.Graph(graph)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    benign, byzantine = nodes
    if len(graph) != benign + byzantine:
        raise ConfigError(
            f"graph file {path!r} has {len(graph)} nodes, but the run has {benign} benign and "
            f"{byzantine} Byzantine ones; set --nodes and --byzantine_ratio to match"
        )
    if lonely := [v for v in graph if graph.degree(v) == 0]:
        raise ConfigError(f"graph file {path!r}: node {lonely[0]!r} has no neighbour; link it")
    marked = [v for v, bad in graph.nodes(data="byzantine") if str(bad).lower() in ("true", "1")]
    if not marked:
        return place(nx.convert_node_labels_to_integers(graph), byzantine, seed, f"file {path!r}")
    if len(marked) != byzantine:
        raise ConfigError(
            f"graph file {path!r} marks {len(marked)} nodes as byzantine, but the run has "
            f"{byzantine}; set --nodes and --byzantine_ratio to match"
        )
    if not nx.is_connected(graph.subgraph(set(graph) - set(marked))):
        raise ConfigError(f"graph file {path!r} is disconnected among its benign nodes; add links")
    return _benign_first(graph, marked)


def place(graph: nx.Graph, byzantine: int, seed: int, what: str) -> nx.Graph:
    """Relabel a graph so that `byzantine` random nodes come last and the others stay connected.

    Positions are drawn uniformly until the benign nodes are connected. If 100 draws fail (likely on a
    ring), Byzantine nodes are chosen one by one, each at random among the nodes whose removal leaves
    the rest connected; every connected graph has such a node.
    """
    if not nx.is_connected(graph):
        raise ConfigError(f"{what} is disconnected among its benign nodes; add links between them")
    rng = np.random.default_rng([seed, 1])
    nodes = list(graph)
    for _ in range(100):
        taken = [nodes[i] for i in rng.choice(len(nodes), byzantine, replace=False)]
        if nx.is_connected(graph.subgraph(set(nodes) - set(taken))):
            return _benign_first(graph, taken)
    rest, taken = graph.copy(), []
    for _ in range(byzantine):
        free = sorted(set(rest) - set(nx.articulation_points(rest)))
        taken.append(free[rng.integers(len(free))])
        rest.remove_node(taken[-1])
    return _benign_first(graph, taken)


def build(spec: Spec[TopologyTraits], benign: int, byzantine: int, seed: int) -> nx.Graph:
    """The network of a run: a networkx graph of nodes 0..n-1, benign nodes first."""
    if spec.traits.places:
        graph = spec(seed, (benign, byzantine))
    else:
        graph = place(spec(seed, benign + byzantine), byzantine, seed, str(spec))
    if lonely := [v for v in graph if graph.degree(v) == 0]:
        raise ConfigError(f"topology {spec}: node {lonely[0]} has no neighbour; add links")
    return graph


def alike(spec: Spec[TopologyTraits], benign: int, byzantine: int) -> list[Graph]:
    """Sample networks with the same settings, whatever the seed; neighbour lists have a slot per node.

    Sizes are padded to theirs, too, so that seeds share a program. None for topologies without the trait
    `like`, or of more than MANY nodes.
    """
    like, n = spec.traits.like, benign + byzantine
    if like is None or n > MANY:
        return []
    links = [like(_stream(n, k), (benign, byzantine), **spec.of(like)) for k in range(ALIKE)]
    return [Graph(np.broadcast_to(np.arange(n), (n, n)), mask) for mask in links]


def to_arrays(graph: nx.Graph, others: Sequence[Graph] = ()) -> Graph:
    """networkx -> neighbour lists as NumPy arrays, padded to the largest degree here and in the others."""
    n = len(graph)
    width = round_up(max(largest_degree(graph), *(int(other.mask.sum(1).max()) for other in others), 0))
    neighbours, mask = np.zeros((n, width), np.int32), np.zeros((n, width), bool)
    for i in range(n):
        ids = sorted(graph.neighbors(i))
        neighbours[i, : len(ids)], mask[i, : len(ids)] = ids, True
    return Graph(neighbours, mask)


def largest_degree(graph: nx.Graph) -> int:
    """The largest degree of any node."""
    return max(degree for _, degree in graph.degree())


class NetworkNumbers(NamedTuple):
    """What a network is to its benign nodes i, with h_i benign and b_i Byzantine neighbours."""

    least_degree: int  # degrees are h_i + b_i
    mean_degree: float
    largest_degree: int
    mean_byzantine_neighbours: float  # of b_i
    most_byzantine_neighbours: int
    least_benign_share: float  # of h_i / (h_i + b_i)
    nodes_with_byzantine_majority: int  # those with b_i > h_i
    nodes_with_byzantine_majority_or_tie: int  # those with b_i >= h_i
    algebraic_connectivity: float  # mu_2 of the benign nodes' Laplacian
    spectral_gap: float  # 1 - |lambda_2| of the benign block of the Metropolis matrix, with the weights of
    # Byzantine neighbours on the diagonal


def numbers_of(graph: nx.Graph, benign: int) -> NetworkNumbers:
    """The numbers of a network whose first nodes are benign; eigenvalues are NaN above DENSE benign nodes."""
    h = np.array([sum(j < benign for j in graph[i]) for i in range(benign)])
    degree = np.array([len(graph[i]) for i in range(benign)])
    b = degree - h
    connectivity = gap = math.nan
    if benign <= DENSE:
        links = nx.to_numpy_array(graph.subgraph(range(benign)), nodelist=range(benign), weight=None)
        connectivity = float(np.linalg.eigvalsh(np.diag(h) - links)[1])
        metropolis = links / (1 + np.maximum.outer(degree, degree))
        metropolis += np.diag(1 - metropolis.sum(axis=1))
        gap = 1 - float(np.sort(np.abs(np.linalg.eigvalsh(metropolis)))[-2])
    return NetworkNumbers(
        least_degree=int(degree.min()),
        mean_degree=float(degree.mean()),
        largest_degree=int(degree.max()),
        mean_byzantine_neighbours=float(b.mean()),
        most_byzantine_neighbours=int(b.max()),
        least_benign_share=float((h / degree).min()),
        nodes_with_byzantine_majority=int((b > h).sum()),
        nodes_with_byzantine_majority_or_tie=int((b >= h).sum()),
        algebraic_connectivity=connectivity,
        spectral_gap=gap,
    )


def benign_slots(graph: Graph, benign: int, others: Sequence[Graph] = ()) -> int:
    """Number of leading slots that hold all benign neighbours (the smallest ids) of any node, rounded up.

    Here and in the other networks.
    """
    most = max(int(np.max(np.sum(g.mask & (g.neighbours < benign), axis=1))) for g in (graph, *others))
    return min(round_up(most, 8), graph.mask.shape[1])


def round_up(size: int, least: int = 4) -> int:
    """Round up to a few sizes (steps of `least` or 1/8 to 1/4 of the size), so that runs share programs."""
    step = max(least, 2 ** (max(size - 1, 1).bit_length() - 3))
    return -(-size // step) * step


def _until_connected(draw_graph, what: str) -> nx.Graph:
    for draw in range(DRAWS):
        graph = draw_graph(draw)
        if nx.is_connected(graph):
            return graph
    raise ConfigError(f"no connected {what} in {DRAWS} draws; give every node more links")


def _benign_first(graph: nx.Graph, byzantine: list) -> nx.Graph:
    order = [v for v in graph if v not in set(byzantine)] + list(byzantine)
    return nx.relabel_nodes(graph, {v: i for i, v in enumerate(order)})


def _stream(*numbers: int) -> np.random.Generator:
    return np.random.default_rng(numbers)
