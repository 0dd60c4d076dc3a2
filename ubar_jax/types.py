"""The nouns of the simulator, and the letters their shapes are written in.

n nodes, n_b of them benign (rows [0, n_b)) and f Byzantine (rows [n_b, n)); K neighbour slots
(the largest degree, padded); d parameters of one model; b batch; m message rows; r receivers that
run the rule (n_b, or n where the attack needs Byzantine nodes that follow the protocol); P pairs of
a receiver and a message that it evaluates on its own batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax import Array

if TYPE_CHECKING:
    from ubar_jax.config import Config

Leaf = Any  # jax.Array on the device, np.ndarray on the host, ShapeDtypeStruct while tracing


class Graph(NamedTuple):
    """Who hears whom. Slots are sorted by sender id, so the first slot wins a tie."""

    neighbours: Leaf  # [n, K] int32: sender ids; padding repeats id 0
    mask: Leaf  # [n, K] bool: which slots are real


class Data(NamedTuple):
    """A training set and its split over the nodes, resident on the device."""

    x: Leaf  # [N, H, W, C] uint8
    y: Leaf  # [N] int32
    shards: Leaf  # [n, s] int32: the examples of every node
    mean: Leaf  # [C] float32: of the training set, on the scale of x
    std: Leaf  # [C] float32


class Task(NamedTuple):
    """A model as pure functions of ONE node's parameters."""

    init: Callable[[Array], Any]  # key -> params
    loss: Callable[[Any, Array, Array], Array]  # params, [b, H, W, C] float32, [b] -> []
    predict: Callable[[Any, Array], Array]  # params, [b, H, W, C] float32 -> [b, classes]


class RoundState(NamedTuple):
    """What the next round needs. Rows are the r nodes that train."""

    params: Any  # leaves [r, ...]
    opt_state: Any  # leaves [r, ...]
    t: Leaf  # [] int32: finished rounds
    key: Leaf  # [] key: the run's; a round folds t into it


class Knobs(NamedTuple):
    """Numbers that may differ between runs of one compiled program."""

    learning_rate: Leaf  # []
    alpha: Leaf  # [r]: weight of a node's own model in the update
    count: Leaf  # [r] int32: the rule's per-node count (see `rules`), 0 where it has none
    rounds_per_epoch: Leaf  # [] int32
    attack: dict[str, Leaf]  # {name: []}: the attack's real-valued arguments


class Inbox(NamedTuple):
    """All that a rule may look at: what the receivers hold and what they were sent."""

    own: Array  # [r, d]
    sent: Array  # [m, d]: every message of the round once
    rows: Array  # [r, K] int32: the row of `sent` that a slot reads
    graph: Graph  # [r, K]: the receivers' slots; a dropped message has its mask off
    degree: Array  # [r] int32: |N_i|, dropped messages included
    count: Array  # type: ignore[assignment]  # [r] int32: the rule's per-node count
    t: Array  # [] int32
    own_loss: Array  # [r]: loss of `own` on the receiver's batch of this round
    loss_of: Callable[[Array, Array], Array]  # receiver [P], row [P] -> [P]: on the RECEIVER's batch;
    # a receiver r stands for none, and any number may come back
    pairs: int  # P: how many losses the rule may ask for (static)


@dataclass(frozen=True, kw_only=True)
class View:
    """All that an omniscient attacker may look at."""

    own: Array  # [n, d] (or [n_b, d] where the attack does not train): models at the round's start
    update: Array  # like own: the step each node is about to add, -lambda * direction
    graph: Graph  # [n, K], without benign nodes whose model is lost (round.without_lost)
    benign: int  # n_b (static)
    byzantine: int  # f (static)
    benign_slots: int  # H: all benign neighbours of any node are in its first H slots (static)
    t: Array  # [] int32
    deployed: Callable[[Array], tuple]  # messages [n, d], the honest ones as they are -> what the rule makes
    # of them, (mixed, info)


class Metrics(NamedTuple):
    """What a person looks at after every round."""

    loss: Array  # []: mean training loss of the benign nodes, before the step
    finite: Array  # [n_b] bool: is the model after the step finite
    byzantine_candidates: Array  # []: Byzantine share of the edges kept by stage 1, NaN without one
    byzantine_selected: Array  # []: Byzantine share of the accepted edges, NaN if none are selected
    accepted: Array  # [n_b, K] bool: accepted edges (all False for coordinate-wise rules)
    scalars: dict[str, Array]  # {name: []}: the scalars of the rule's info


class Result(NamedTuple):
    """What a run gives."""

    config: "Config"  # canonical
    digest: str
    notices: list[str]
    curves: dict[str, np.ndarray]  # over evaluations: round [E], accuracy and loss [E, n_b], worst, mean,
    # std, consensus, seconds [E]; over rounds: train_loss, byzantine_candidates, byzantine_selected [T]
    final: dict[str, np.ndarray]  # accuracy and loss of every benign node [n_b], on the whole test set
    accepted: np.ndarray  # [n_b, n] how many rounds the receiver accepted the sender
    diverged: tuple[int, int] | None  # first (round, node) whose model is not finite
    rounds_per_epoch: int
    state: RoundState
    seconds: dict[str, float]  # setup, compilation, rounds, evaluation; its share of what ran together
