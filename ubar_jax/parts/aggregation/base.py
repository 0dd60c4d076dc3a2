"""Aggregation rules: one function per rule, from an Inbox to (mixed [r, d], info).

A rule that depends on the number of benign or Byzantine neighbours has a `count`: a function of the degrees
that runs once on the host in exact arithmetic; its result per node is `inbox.count`. Its arguments become
arguments of the rule. `limit` is the largest count that the rule is defined for, given the number of
messages; larger counts are clipped, and the user gets a notice. Further traits: `alpha`, the rule's default
weight of x_i in the update, from the degrees; `pairs`, the number of messages that a node evaluates on its
batch, from (degree, count), by default none; `defends`, whether bad messages are dropped before the rule
runs; `selects`, whether the rule accepts or rejects whole messages.

`orders` are the orders of a round that the rule works with, its own first: `while` (the paper: gradient at
x_i, mixing of x_j, then the step) and `then` (step first: own model and messages are x + u). `judges` are the
examples on which it may take losses; a rule that asks for none need not name any.

A rule with memory is registered with `init`, from a `Start` to its first memory, a pytree whose leaves have
the receivers in front. It then is a function from (inbox, memory) to (mixed, info, memory).

`info["selected"]` [r, K] marks the accepted slots, `info["candidates"]` [r, K] those kept by stage 1;
coordinate-wise rules return neither.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.registry import Registry, Spec
from ubar_jax.types import Graph, Inbox, Start

Order = Literal["while", "then"]
Judge = Literal["batch", "next", "held_out"]
JUDGES: tuple[Judge, ...] = ("batch", "next", "held_out")


@dataclass(frozen=True)
class RuleTraits:
    """What the simulator must know about a rule. Functions may take arguments of the rule by name."""

    count: Callable[..., np.ndarray] | None = None  # degree [r], Byzantine neighbours [r] -> inbox.count [r]
    limit: Callable[..., Any] | None = None  # messages [r] -> largest count allowed [r]
    alpha: Callable[..., Any] = lambda degree: 0.5  # degree [r] -> weight of own model in the update
    selects: Callable[..., bool] = lambda: True  # whether it accepts or rejects whole messages
    pairs: Callable[..., Any] | None = None  # losses per node, from degree [r] and count [r]; None: no losses
    defends: bool = True  # whether bad messages are dropped before the rule runs
    orders: tuple[Order, ...] = ("while", "then")  # the orders that it works with, its own first
    judges: tuple[Judge, ...] | None = None  # the judges that it works with; None: all if it has pairs
    init: Callable[..., Any] | None = None  # Start -> its first memory; None: it remembers nothing

    @property
    def judged_by(self) -> tuple[Judge, ...]:
        """The judges that the rule works with; () if it takes no losses."""
        if self.judges is None:
            return () if self.pairs is None else JUDGES
        return self.judges


Rule = Spec[RuleTraits]
rules = Registry(
    "rule",
    given=1,
    traits=RuleTraits,
    helpers=("count",),
    contract="A rule is a function from an inbox to (what to mix in [r, d], info {name: array}); one with "
    "init= is a function from (inbox, memory) to (mixed, info, memory).",
)


def make_inbox(
    *,
    own: Array,
    sent: Array,
    graph: Graph,
    benign: int,
    count: Array,
    t: Array,
    rounds: Array,
    own_loss: Array,
    loss_of: Callable[[Array, Array], Array],
    pairs: int,
    gradient: Callable[[], Array],
    update: Array,
    learning_rate: Array,
    classes: int,
    key: Array,
    rows: Array | None = None,
) -> Inbox:
    """The inbox of the first r nodes of `graph` [n, K], r being the length of `own`.

    By default a slot reads its sender's row of `sent`. The first `benign` nodes are benign.
    """
    heard = Graph(*(a[: len(own)] for a in graph))
    return Inbox(
        own=own,
        sent=sent,
        rows=heard.neighbours if rows is None else rows,
        graph=heard,
        degree=jnp.sum(heard.mask, axis=1),
        count=count,
        t=t,
        own_loss=own_loss,
        loss_of=loss_of,
        pairs=pairs,
        gradient=gradient,
        update=update,
        weights=linalg.metropolis(graph, len(own)),
        benign=heard.neighbours < benign,
        learning_rate=learning_rate,
        rounds=rounds,
        classes=classes,
        key=key,
    )


def losses_per_round(rule: Rule, degree: np.ndarray, count: np.ndarray) -> int:
    """The number of losses that the rule asks for in one round, over all receivers."""
    pairs = rule.traits.pairs
    return 0 if pairs is None else int(np.sum(pairs(degree, count)))


def first_memory(rule: Rule, start: Start) -> Any:
    """What the rule remembers before round 0; () if it has no memory."""
    init = rule.traits.init
    return () if init is None else init(start, **rule.of(init))


def aggregate(rule: Rule, inbox: Inbox, memory: Any = ()) -> tuple[Array, dict[str, Array], Any]:
    """Apply a rule: (mixed, info, memory). Drops bad messages if it defends.

    Receivers without any message left get x_i.
    """
    if rule.traits.defends:
        inbox = linalg.drop_bad(inbox)
    mixed, info, memory = _checked(rule, inbox, memory)
    heard = jnp.any(inbox.graph.mask, axis=1)
    return jnp.where(heard[:, None], mixed, inbox.own), info, memory


def _checked(rule: Rule, inbox: Inbox, memory: Any) -> tuple[Array, dict[str, Array], Any]:
    """Applies the rule; refuses a result of the wrong form or shape."""
    remembers = rule.traits.init is not None
    out = rule(inbox, memory) if remembers else rule(inbox)
    if not isinstance(out, tuple) or len(out) != 2 + remembers:
        told = f"{len(out)} things" if isinstance(out, tuple) else f"a {type(out).__name__}"
        raise rule.part.wrong(f"returned {told} instead of {2 + remembers}")
    mixed, info, memory = out if remembers else (*out, memory)
    if jnp.shape(mixed) != inbox.own.shape:
        r, d = inbox.own.shape
        raise rule.part.wrong(f"returned shape {list(jnp.shape(mixed))} to mix in, not [r, d] = [{r}, {d}]")
    if not isinstance(info, dict):
        raise rule.part.wrong(f"returned a {type(info).__name__} as info, not a dict")
    for name in ("selected", "candidates"):
        edges = jnp.asarray(info.get(name, inbox.graph.mask))
        if edges.shape != inbox.graph.mask.shape or edges.dtype != bool:
            (r, k), told = inbox.graph.mask.shape, f"{edges.dtype} of shape {list(edges.shape)}"
            raise rule.part.wrong(f"returned {name!r} as {told}, not bool of [r, K] = [{r}, {k}]")
    return mixed, info, memory
