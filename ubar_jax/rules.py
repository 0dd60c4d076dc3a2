"""Aggregation rules: one function each, from an Inbox to (what to mix in [r, d], info).

A rule that depends on how many neighbours are benign or Byzantine has a `count`: a function of the
degrees, run once on the host in exact arithmetic, whose per-node result is `inbox.count`. Its
arguments are the rule's. Traits: `alpha`, the rule's own weight of x_i in the update (a number, or a
function of the degrees); `pairs`, how many messages a node evaluates on its batch, from (degree,
count); `defends`, whether bad messages are dropped before the rule sees them.

`info["selected"]` [r, K] says which slots were accepted, `info["candidates"]` which ones stage 1
kept; coordinate-wise rules have neither.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from ubar_jax import linalg
from ubar_jax.registry import Number, Registry
from ubar_jax.types import Inbox

rules = Registry(
    "rule",
    given=1,
    traits={"count": None, "alpha": 0.5, "pairs": lambda degree, count: degree, "defends": True},
    helpers=("count",),
)

RHO = Number(0, 1, open_low=True, words=("conservative", "oracle"))
GUARD = 1e-9  # floor and ceil of products such as 0.29 * 100 and 10 * (1 - 0.7)


def benign_neighbours(degree: np.ndarray, byzantine: np.ndarray, rho: RHO = 0.4) -> np.ndarray:
    """[r] how many neighbours UBAR keeps: max(1, floor(rho_i |N_i|)).

    degree [r]; byzantine [r], the true number of Byzantine neighbours. "conservative" assumes one
    benign neighbour, "oracle" knows each node's true share.
    """
    if rho == "oracle":
        share = 1 - byzantine / degree
    else:
        share = 0 if rho == "conservative" else rho
    return np.maximum(1, np.floor(share * degree + GUARD)).astype(np.int32)


def aggregate(rule: Callable, defends: bool, inbox: Inbox) -> tuple[Array, dict[str, Array]]:
    """What every rule has in common: bad messages are dropped; nothing left, R = x_i."""
    if defends:
        inbox = linalg.drop_bad(inbox)
    mixed, info = rule(inbox)
    heard = jnp.any(inbox.graph.mask, axis=1)
    return jnp.where(heard[:, None], mixed, inbox.own), info


@rules.register(alpha=lambda degree: 1 / (degree + 1), defends=False)
def average(inbox: Inbox):
    """Plain mean of the neighbours, undefended; alpha 1 / (|N_i| + 1) makes it the mean with x_i."""
    return linalg.undefended_mean(inbox), {"selected": inbox.graph.mask}


@rules.register(count=benign_neighbours, pairs=lambda degree, count: count)
def ubar(inbox: Inbox):
    """UBAR: the rho |N_i| closest neighbours; of those, the ones whose loss is not above own."""
    near = closest(inbox)
    good = no_worse(inbox, near)
    return linalg.mean(inbox, good), {"candidates": near, "selected": good}


@rules.register(count=benign_neighbours)
def ubar_distance(inbox: Inbox):
    """Ablation of UBAR: its distance stage only."""
    near = closest(inbox)
    return linalg.mean(inbox, near), {"candidates": near, "selected": near}


@rules.register
def ubar_loss(inbox: Inbox):
    """Ablation of UBAR: its loss stage only, over all neighbours."""
    good = no_worse(inbox, inbox.graph.mask)
    return linalg.mean(inbox, good), {"selected": good}


def closest(inbox: Inbox) -> Array:
    """[r, K] the `count` neighbours closest to own model (UBAR, stage 1)."""
    near = linalg.ranks(linalg.own_distances(inbox)) < inbox.count[:, None]
    return near & inbox.graph.mask


def no_worse(inbox: Inbox, candidates: Array) -> Array:
    """[r, K] candidates whose loss is at most own; else the single best (UBAR, stage 2)."""
    losses = losses_of(inbox, candidates)
    good = candidates & (losses <= inbox.own_loss[:, None]) & jnp.isfinite(losses)
    best = (linalg.ranks(losses) == 0) & jnp.isfinite(losses)
    return jnp.where(jnp.any(good, axis=1)[:, None], good, best)


def losses_of(inbox: Inbox, candidates: Array) -> Array:
    """[r, K] loss of the candidates' messages on the receiver's own batch, +inf elsewhere.

    Only the kept candidates are evaluated, as one flat list of at most `inbox.pairs` pairs.
    """
    receiver, slot = jnp.nonzero(candidates, size=inbox.pairs, fill_value=0)
    losses = inbox.loss_of(receiver, inbox.rows[receiver, slot])
    real = jnp.arange(inbox.pairs) < jnp.sum(candidates)
    losses = jnp.where(real & ~jnp.isnan(losses), losses, jnp.inf)
    return jnp.full(candidates.shape, jnp.inf).at[receiver, slot].min(losses)
