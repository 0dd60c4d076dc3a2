"""The shared types, and the letters that denote their dimensions.

n nodes, n_b of them benign (rows [0, n_b)) and f Byzantine (rows [n_b, n)); K neighbour slots
(the largest degree, padded); d parameters per model; b examples per batch; m message rows; r receivers
that run the rule (n_b, or n if the attack needs Byzantine nodes that follow the protocol); P
(receiver, message) pairs for which the receiver computes the message's loss; L local steps per round.
"""

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax import Array

if TYPE_CHECKING:
    from ubar_jax.config import Config
    from ubar_jax.experiments.pictures import Animation, Figure

Leaf = Any  # jax.Array on the device, np.ndarray on the host, ShapeDtypeStruct while tracing


class Graph(NamedTuple):
    """The neighbours of every node. Slots are sorted by sender id, so the first slot wins a tie."""

    neighbours: Leaf  # [n, K] int32: sender ids; padding repeats id 0
    mask: Leaf  # [n, K] bool: which slots are real


class Data(NamedTuple):
    """A training set, resident on the device."""

    x: Leaf  # [N, H, W, C] uint8
    y: Leaf  # [N] int32
    mean: Leaf  # [C] float32: per channel of the training set, in units of x
    std: Leaf  # [C] float32


class Shares(NamedTuple):
    """The split of a training set over the nodes: indices of examples."""

    train: Leaf  # [n, s] int32: those that each node trains on
    held_out: Leaf | None = None  # [n, v] int32: those that it never trains on


class Drawn(NamedTuple):
    """The examples that every node draws for one round."""

    train: Leaf  # [r, L b] int32
    judge: Leaf | None = None  # [r, b] int32: on which losses of models are taken; None: the first b of train


class Task(NamedTuple):
    """A model as pure functions of ONE node's parameters."""

    init: Callable[[Array], Any]  # key -> params
    loss: Callable[[Any, Array, Array], Array]  # params, [b, H, W, C] float32, [b] -> []
    predict: Callable[[Any, Array], Array]  # params, [b, H, W, C] float32 -> [b, classes]


class RoundState(NamedTuple):
    """State between chunks of rounds; during a chunk see `round.to_rows`. Rows are the r nodes that train."""

    params: Any  # leaves [r, ...]
    opt_state: Any  # leaves [r, ...]
    t: Leaf  # [] int32: number of finished rounds
    key: Leaf  # [] key: the run's PRNG key; each round folds t into it
    rule_memory: Any = ()  # leaves [r, ...]: what the rule remembers; () if it has no memory
    attack_memory: Any = ()  # leaves [f, ...]: what the attack remembers


class Start(NamedTuple):
    """What a rule or attack may use to build its first memory, before round 0."""

    own: Array  # [r, d]: the models of the nodes that train, all equal
    slots: int  # K
    byzantine: int  # f
    key: Array  # [] key


class Knobs(NamedTuple):
    """Values that may differ between runs of one compiled program."""

    learning_rate: Leaf  # []
    alpha: Leaf  # [r]: weight of a node's own model in the update
    count: Leaf  # [r] int32: the rule's per-node count (see `aggregation.base`), 0 if it has none
    rounds_per_epoch: Leaf  # [] int32
    attack: dict[str, Leaf]  # {name: []}: the attack's real-valued arguments


class Inbox(NamedTuple):
    """Everything a rule may use: the receivers' own models and the messages sent to them."""

    own: Array  # [r, d]: x_i, or x_i + u_i in the order `then`
    sent: Array  # [m, d]: each message of the round, stored once
    rows: Array  # [r, K] int32: the row of `sent` that each slot reads
    graph: Graph  # [r, K]: the receivers' slots; dropped messages are masked out
    degree: Array  # [r] int32: |N_i|, including dropped messages
    count: Array  # type: ignore[assignment]  # [r] int32: the rule's per-node count
    t: Array  # [] int32
    own_loss: Array  # [r]: loss of `own` on the judge's examples, b per receiver and round
    loss_of: Callable[[Array, Array], Array]  # receiver [P], row [P] -> [P]: on the RECEIVER's examples;
    # index r is padding; its result is unspecified
    pairs: int  # P: maximum number of losses the rule may request (static)
    gradient: Callable[[], Array]  # () -> [r, d]: gradient at `own` on the judge's examples
    update: Array  # [r, d]: u_i, the step that the receiver takes in this round
    weights: Array  # [r, K]: Metropolis weights, 0 in empty slots; own weight is 1 minus their sum
    benign: Array  # [r, K] bool: whether the sender is benign; only for oracles
    learning_rate: Array  # []: in this round
    rounds: Array  # [] int32: length of the run
    classes: int  # number of classes (static)
    key: Array  # [] key: the rule's own randomness in this round


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything an omniscient attacker may use."""

    own: Array  # [n, d] ([n_b, d] if the attack does not train): what honest nodes send, x_i, or x_i + u_i
    # in the order `then`
    update: Array  # like own: u_i, the update of each node in this round, -lambda * direction
    graph: Graph  # [n, K], without benign nodes whose model is unusable (round.without_lost)
    benign: int  # n_b (static)
    byzantine: int  # f (static)
    benign_slots: int  # H: every node's benign neighbours are in its first H slots (static)
    t: Array  # [] int32
    deployed: Callable[[Array], tuple]  # messages [n, d], honest rows unchanged -> (mixed, info), the output
    # of the deployed rule


class Metrics(NamedTuple):
    """Measurements of one round."""

    loss: Array  # []: mean training loss of the benign nodes, before the step
    finite: Array  # [n_b] bool: whether the model is finite after the step
    byzantine_candidates: Array  # []: Byzantine share of the edges kept by stage 1, NaN without a stage 1
    byzantine_selected: Array  # []: Byzantine share of the accepted edges, NaN if there are none
    accepted: Array  # [n_b, K] bool: accepted edges (all False for coordinate-wise rules)
    scalars: dict[str, Array]  # {name: []}: scalars from the rule's info


class Result(NamedTuple):
    """The result of a run."""

    config: "Config"  # canonical
    digest: str
    notices: list[str]
    curves: dict[str, np.ndarray]  # per evaluation: round [E], accuracy and loss [E, n_b], worst, mean,
    # std, consensus, seconds [E]; per round: train_loss, byzantine_candidates, byzantine_selected [T]
    final: dict[str, np.ndarray]  # [n_b] accuracy and loss per benign node on the whole test set
    accepted: np.ndarray  # [n_b, n] number of rounds in which the receiver accepted the sender
    diverged: tuple[int, int] | None  # first (round, node) whose model is not finite
    rounds_per_epoch: int
    state: RoundState
    seconds: dict[str, float]  # setup, compilation, rounds, evaluation; this run's share of shared work
    links: np.ndarray  # [M, 2] int32: receiver and sender of every link to a benign node
    # [E, M] per evaluation: rounds since the one before in which the link's message was accepted; None if the
    # run was resumed from a checkpoint that does not have it
    accepted_since: np.ndarray | None

    def __repr__(self) -> str:
        return "\n".join(f"{name:9} {value}" for name, value in self._told().items())

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in self._told().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def _told(self) -> dict[str, str]:
        """What a reader wants to know first, by name."""
        config, accuracy = self.config, self.final["accuracy"]
        told = {
            "run": f"{config.rule} under {config.attack}",
            "network": f"{config.nodes} benign and {config.byzantine} Byzantine nodes, {config.topology}",
            "learning": f"{config.model} on {config.dataset}, {config.rounds} rounds, seed {config.seed}",
            "accuracy": f"worst benign node {accuracy.min():.1%}, mean {accuracy.mean():.1%}",
            "seconds": ", ".join(f"{name} {spent:.1f}" for name, spent in self.seconds.items()),
        }
        if self.diverged is not None:
            told["diverged"] = "in round {}, at node {}".format(*self.diverged)
        return told | ({"notices": "; ".join(self.notices)} if self.notices else {})

    # Drawing is in a layer above, and loaded by the first figure.

    def plot(self) -> "Figure":
        """Test accuracy over time: every benign node, their mean, and the worst of them."""
        from ubar_jax.experiments import drawing

        return drawing.accuracy(self)

    def network(self) -> "Figure":
        """The network with its attackers."""
        from ubar_jax.experiments import drawing

        return drawing.draw_network(self)

    def accepted_edges(self) -> "Figure":
        """Share of rounds in which each node (row) accepted the message of each neighbour (column)."""
        from ubar_jax.experiments import drawing

        return drawing.draw_accepted(self)

    def animate(self) -> "Animation":
        """The network over the rounds, with the nodes' accuracy and the accepted messages."""
        from ubar_jax.experiments import drawing

        return drawing.animate(self)
