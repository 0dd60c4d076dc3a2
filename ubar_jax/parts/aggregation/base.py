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

import jax.numpy as jnp
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.registry import Registry, Spec
from ubar_jax.types import Inbox

rules = Registry(
    "rule",
    given=1,
    traits={
        "count": None,
        "limit": None,
        "alpha": lambda degree: 0.5,
        "selects": lambda: True,
        "pairs": lambda degree, count: 0,
        "defends": True,
    },
    helpers=("count",),
)


def aggregate(rule: Spec, inbox: Inbox) -> tuple[Array, dict[str, Array]]:
    """What every rule has in common: bad messages are dropped; nothing left, R = x_i."""
    if rule.part.traits["defends"]:
        inbox = linalg.drop_bad(inbox)
    mixed, info = rule(inbox)
    heard = jnp.any(inbox.graph.mask, axis=1)
    return jnp.where(heard[:, None], mixed, inbox.own), info
