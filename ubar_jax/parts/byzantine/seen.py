"""The honest models that attackers see, and their statistics."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.types import View


class Seen(NamedTuple):
    """The honest models that each attacker sees: those of its benign neighbours."""

    adjacent: Array  # [f, n_b] bool
    count: Array  # type: ignore[assignment]  # [f, 1], at least 1
    centre: Array  # [1, d]: mean of honest models without outliers; avoids cancellation near consensus
    honest: Array  # [n_b, d]: honest models minus the centre
    mean: Array  # [f, d]: mean of the seen models, minus the centre


def seen_by_attackers(view: View) -> Seen:
    """Which honest models each attacker sees, and their mean (the centre if it sees none)."""
    ids, mask = (a[view.benign :] for a in view.graph)
    rows = jnp.arange(view.byzantine)[:, None]
    seen = mask & (ids < view.benign)
    adjacent = jnp.zeros((view.byzantine, view.benign), bool).at[rows, jnp.where(seen, ids, 0)].max(seen)
    centre = linalg.centre_of(view.own[: view.benign])
    honest = living(view, view.own[: view.benign] - centre)
    count = jnp.maximum(jnp.sum(adjacent, axis=1, keepdims=True), 1)
    return Seen(adjacent, count, centre, honest, average_of(adjacent, count, honest))


def living(view: View, vectors: Array) -> Array:
    """[n_b, d] the benign nodes' vectors, 0 for nodes without edges in the view: 0 * NaN would be NaN."""
    return jnp.where(jnp.any(view.graph.mask[: view.benign], axis=1, keepdims=True), vectors, 0)


def average_of(adjacent: Array, count: Array, vectors: Array) -> Array:
    """[f, d] mean over the adjacent rows of `vectors` [n_b, d]."""
    return jnp.matmul(adjacent / count, vectors, precision=linalg.HIGHEST)


def honest_distances(seen: Seen) -> Array:
    """[n_b, n_b] squared distances between honest models."""
    gram = jnp.matmul(seen.honest, seen.honest.T, precision=linalg.HIGHEST)
    norms = jnp.diagonal(gram)
    return jnp.maximum(norms[:, None] + norms[None, :] - (gram + gram.T), 0)


def sigma(seen: Seen) -> Array:
    """[f, d] standard deviation per coordinate of the models each attacker sees; exactly 0 for one model."""
    squares = average_of(seen.adjacent, seen.count, jnp.square(seen.honest))
    variance = jnp.maximum(squares - jnp.square(seen.mean), 0)
    return jnp.where(seen.count > 1, jnp.sqrt(variance), 0)


def widest(seen: Seen) -> Array:
    """[f] the largest squared distance between two seen models."""
    both = seen.adjacent[:, :, None] & seen.adjacent[:, None, :]
    return jnp.max(jnp.where(both, honest_distances(seen)[None], 0), axis=(1, 2))
