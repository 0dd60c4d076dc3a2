"""Aggregation rules: one function each, from an Inbox to (what to mix in [r, d], info).

A rule that depends on how many neighbours are benign or Byzantine has a `count`: a function of the
degrees, run once on the host in exact arithmetic, whose per-node result is `inbox.count`. Its
arguments are the rule's. `limit` is the largest count that the rule is defined for with so many
neighbours; larger ones are clipped, and the user is told. Further traits: `alpha`, the rule's own
weight of x_i in the update, from the degrees; `pairs`, how many messages a node evaluates on its
batch, from (degree, count), by default none; `defends`, whether bad messages are dropped before the
rule sees them; `selects`, whether it accepts or refuses whole messages.

`info["selected"]` [r, K] says which slots were accepted, `info["candidates"]` which ones stage 1
kept; coordinate-wise rules have neither.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.registry import Registry, Spec
from ubar_jax.types import Graph, Inbox


@dataclass(frozen=True)
class RuleTraits:
    """What the simulator needs to know of a rule. Functions may take arguments of the rule by name."""

    count: Callable[..., np.ndarray] | None = None  # degree [r], Byzantine neighbours [r] -> inbox.count [r]
    limit: Callable[..., Any] | None = None  # messages [r] -> largest count that the rule is defined for
    alpha: Callable[..., Any] = lambda degree: 0.5  # degree [r] -> weight of own model in the update
    selects: Callable[..., bool] = lambda: True  # whether it accepts or refuses whole messages
    pairs: Callable[..., Any] = lambda degree, count: 0  # losses per node, from degree [r] and count [r]
    defends: bool = True  # whether bad messages are dropped before the rule sees them


Rule = Spec[RuleTraits]
rules = Registry("rule", given=1, traits=RuleTraits, helpers=("count",))


def make_inbox(
    *,
    own: Array,
    sent: Array,
    graph: Graph,
    count: Array,
    t: Array,
    own_loss: Array,
    loss_of: Callable[[Array, Array], Array],
    pairs: int,
    rows: Array | None = None,
) -> Inbox:
    """The inbox of the receivers of `graph` [r, K]; without `rows` a slot reads its sender's row."""
    degree = jnp.sum(graph.mask, axis=1)
    rows = graph.neighbours if rows is None else rows
    return Inbox(own, sent, rows, graph, degree, count, t, own_loss, loss_of, pairs)


def aggregate(rule: Rule, inbox: Inbox) -> tuple[Array, dict[str, Array]]:
    """What every rule has in common: bad messages are dropped; nothing left, R = x_i."""
    if rule.traits.defends:
        inbox = linalg.drop_bad(inbox)
    mixed, info = rule(inbox)
    heard = jnp.any(inbox.graph.mask, axis=1)
    return jnp.where(heard[:, None], mixed, inbox.own), info
