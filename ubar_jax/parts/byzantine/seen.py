"""What attackers see of the honest models, and statistics of it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.types import View


class Seen(NamedTuple):
    """The honest models that each attacker sees: those of its benign neighbours."""

    adjacent: Array  # [f, n_b] bool
    count: Array  # type: ignore[assignment]  # [f, 1], at least 1
    centre: Array  # [1, d]: mean of the usual honest models, so that no digits are lost near consensus
    honest: Array  # [n_b, d]: honest models about the centre
    mean: Array  # [f, d]: of the seen ones, about the centre


def seen_by_attackers(view: View) -> Seen:
    """Who sees whom, and the mean of what is seen (of nobody: the mean of all)."""
    ids, mask = (a[view.benign :] for a in view.graph)
    rows = jnp.arange(view.byzantine)[:, None]
    seen = mask & (ids < view.benign)
    adjacent = jnp.zeros((view.byzantine, view.benign), bool).at[rows, jnp.where(seen, ids, 0)].max(seen)
    centre = linalg.centre_of(view.own[: view.benign])
    honest = living(view, view.own[: view.benign] - centre)
    count = jnp.maximum(jnp.sum(adjacent, axis=1, keepdims=True), 1)
    return Seen(adjacent, count, centre, honest, average_of(adjacent, count, honest))


def living(view: View, vectors: Array) -> Array:
    """[n_b, d] the benign nodes' vectors, 0 for those who have left the view's graph: 0 * NaN is NaN."""
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
    """[f, d] deviation per coordinate of what each attacker sees; of a single vector exactly 0."""
    squares = average_of(seen.adjacent, seen.count, jnp.square(seen.honest))
    variance = jnp.maximum(squares - jnp.square(seen.mean), 0)
    return jnp.where(seen.count > 1, jnp.sqrt(variance), 0)


def widest(seen: Seen) -> Array:
    """[f] the largest squared distance between two seen models."""
    both = seen.adjacent[:, :, None] & seen.adjacent[:, None, :]
    return jnp.max(jnp.where(both, honest_distances(seen)[None], 0), axis=(1, 2))
