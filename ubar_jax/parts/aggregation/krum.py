"""Krum, Multi-Krum and recursive Krum: neighbours with the smallest distances to other neighbours."""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.numerics.order_statistics import sum_of_smallest_per_row
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.parts.aggregation.counts import clipped, krum_limit, tolerated
from ubar_jax.registry import Number
from ubar_jax.types import Inbox


def krum_order(inbox: Inbox, n_hat: Array) -> Array:
    """[r, K] rank of each neighbour by Krum's score; of equal scores the smaller sender id ranks first.

    The score of j is the sum of the left - n_hat - 2 (at least one) smallest squared distances from
    x_j to the other neighbours. The paper prints "+ 2"; Krum's original definition has - 2.
    """
    left = jnp.sum(inbox.graph.mask, axis=1)
    scores = sum_of_smallest_per_row(linalg.slot_distances(inbox), jnp.maximum(left - n_hat - 2, 1))
    return linalg.ranks(_of_free(inbox.graph.mask, scores))


def _of_free(free: Array, scores: Array) -> Array:
    """[r, K] the scores; +inf for slots that are not free."""
    return jnp.where(free, jnp.minimum(scores, linalg.BIG), jnp.inf)


def recursive_krum(inbox: Inbox, n_hat: Array) -> Array:
    """[r, K] the left - 2 n_hat neighbours picked by running Krum repeatedly, each pick being removed.

    Scores have max(1, left - n_hat - 2) terms, `left` shrinking with each pick. Distances are sorted once.
    """
    distances = linalg.slot_distances(inbox)
    order = jnp.argsort(distances, axis=2, stable=True)
    nearest = jnp.take_along_axis(distances, order, axis=2)
    wanted = jnp.sum(inbox.graph.mask, axis=1) - 2 * n_hat

    def pick(step, state):
        free, there = state
        terms = jnp.maximum(jnp.sum(free, axis=1) - n_hat - 2, 1)[:, None, None]
        counted = there & (jnp.cumsum(there, axis=2) <= terms)
        scores = jnp.sum(jnp.where(counted, nearest, 0), axis=2)
        best = jnp.argmin(_of_free(free, scores), axis=1)
        best = jnp.where(step < wanted, best, -1)
        free &= jnp.arange(free.shape[1])[None, :] != best[:, None]
        return free, there & (order != best[:, None, None])

    start = inbox.graph.mask, jnp.isfinite(nearest)
    free, _ = jax.lax.fori_loop(0, inbox.graph.mask.shape[1], pick, start)
    return inbox.graph.mask & ~free


@rules.register(count=tolerated(1 / 2), limit=krum_limit)
def dkrum(inbox: Inbox):
    """DKrum: the neighbour with the smallest sum of squared distances to its nearest other neighbours."""
    best = (krum_order(inbox, clipped(inbox, krum_limit)) == 0) & inbox.graph.mask
    return linalg.only(inbox, best), {"selected": best}


def multi_krum_limit(values, m):
    """Krum's limit; -1, below any count, if there are fewer than m neighbours."""
    return krum_limit(values) if m == "auto" else np.where(m > values, -1, krum_limit(values))


@rules.register(count=tolerated(1 / 2), limit=multi_krum_limit)
def multi_krum(inbox: Inbox, m: Annotated[int | str, Number(1, integer=True, words=("auto",))] = "auto"):
    """Multi-Krum: mean of the m neighbours with the best Krum scores; auto is |N_i| - n_hat."""
    n_hat = clipped(inbox, krum_limit)
    wanted = jnp.sum(inbox.graph.mask, axis=1) - n_hat if isinstance(m, str) else jnp.full_like(n_hat, m)
    best = (krum_order(inbox, n_hat) < wanted[:, None]) & inbox.graph.mask
    return linalg.mean(inbox, best), {"selected": best}
