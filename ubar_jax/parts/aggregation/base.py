"""Aggregation rules: one function per rule, from an Inbox to (mixed [r, d], info).

A rule that depends on the number of benign or Byzantine neighbours has a `count`: a function of the degrees
that runs once on the host in exact arithmetic; its result per node is `inbox.count`. Its arguments become
arguments of the rule. `limit` is the largest count that the rule is defined for, given the number of
messages; larger counts are clipped, and the user gets a notice. Further traits: `alpha`, the rule's default
weight of x_i in the update, from the degrees; `pairs`, the number of messages that a node evaluates on its
batch, from (degree, count), by default none; `defends`, whether bad messages are dropped before the rule
runs; `selects`, whether the rule accepts or rejects whole messages.

`info["selected"]` [r, K] marks the accepted slots, `info["candidates"]` [r, K] those kept by stage 1;
coordinate-wise rules return neither.
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
    """What the simulator must know about a rule. Functions may take arguments of the rule by name."""

    count: Callable[..., np.ndarray] | None = None  # degree [r], Byzantine neighbours [r] -> inbox.count [r]
    limit: Callable[..., Any] | None = None  # messages [r] -> largest count allowed [r]
    alpha: Callable[..., Any] = lambda degree: 0.5  # degree [r] -> weight of own model in the update
    selects: Callable[..., bool] = lambda: True  # whether it accepts or rejects whole messages
    pairs: Callable[..., Any] = lambda degree, count: 0  # losses per node, from degree [r] and count [r]
    defends: bool = True  # whether bad messages are dropped before the rule runs


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
    """The inbox of the receivers in `graph` [r, K]; by default a slot reads its sender's row of `sent`."""
    degree = jnp.sum(graph.mask, axis=1)
    rows = graph.neighbours if rows is None else rows
    return Inbox(own, sent, rows, graph, degree, count, t, own_loss, loss_of, pairs)


def aggregate(rule: Rule, inbox: Inbox) -> tuple[Array, dict[str, Array]]:
    """Apply a rule: drop bad messages if it defends; return x_i for receivers without any message left."""
    if rule.traits.defends:
        inbox = linalg.drop_bad(inbox)
    mixed, info = rule(inbox)
    heard = jnp.any(inbox.graph.mask, axis=1)
    return jnp.where(heard[:, None], mixed, inbox.own), info
