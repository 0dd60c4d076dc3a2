"""How far an attacker may go: would Krum still choose mu + gamma E?

An attacker a sees its benign neighbours. At each of them, i, it imagines that all of i's Byzantine
neighbours send its vector v = mu + gamma E. Every squared distance from v to an honest model is a
quadratic in gamma, and the honest models' distances among themselves do not depend on it, so that a
step of a search is scalar algebra: nothing of size d.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ubar_jax import linalg
from ubar_jax.rules import krum_limit
from ubar_jax.types import View


class Seen(NamedTuple):
    """The honest models that each attacker sees: those of its benign neighbours."""

    adjacent: Array  # [f, n_b] bool
    count: Array  # [f, 1], at least 1
    centre: Array  # [1, d]: mean of all honest models, so that no digits are lost near consensus
    honest: Array  # [n_b, d]: honest models about the centre
    mean: Array  # [f, d]: of the seen ones, about the centre


def seen_by_attackers(view: View) -> Seen:
    """Who sees whom, and the mean of what is seen (of nobody: the mean of all)."""
    ids, mask = (a[view.benign :] for a in view.graph)
    rows = jnp.arange(view.byzantine)[:, None]
    seen = mask & (ids < view.benign)
    adjacent = jnp.zeros((view.byzantine, view.benign), bool).at[rows, jnp.where(seen, ids, 0)].max(seen)
    honest = view.own[: view.benign]
    centre = jnp.mean(honest, axis=0, keepdims=True)
    honest = honest - centre
    count = jnp.maximum(jnp.sum(adjacent, axis=1, keepdims=True), 1)
    return Seen(adjacent, count, centre, honest, average_of(adjacent, count, honest))


def average_of(adjacent: Array, count: Array, vectors: Array) -> Array:
    """[f, d] mean over the adjacent rows of `vectors` [n_b, d]."""
    return jnp.matmul(adjacent / count, vectors, precision=linalg.HIGHEST)


def honest_distances(seen: Seen) -> Array:
    """[n_b, n_b] squared distances between honest models."""
    gram = jnp.matmul(seen.honest, seen.honest.T, precision=linalg.HIGHEST)
    norms = jnp.diagonal(gram)
    return jnp.maximum(norms[:, None] + norms[None, :] - (gram + gram.T), 0)


def distances_from(seen: Seen, mean: Array) -> Array:
    """[f, n_b] squared distances from every attacker's mean [f, d] to every honest model."""
    product = jnp.matmul(mean, seen.honest.T, precision=linalg.HIGHEST)
    norms = jnp.sum(jnp.square(seen.honest), axis=1)[None, :]
    return jnp.maximum(jnp.sum(jnp.square(mean), axis=1)[:, None] + norms - 2 * product, 0)


class Quadratics(NamedTuple):
    """|mu + gamma E - x_j|^2 = base + 2 gamma slope + gamma^2 square, per attacker and honest node."""

    base: Array  # [f, n_b]
    slope: Array  # [f, n_b]: E . (mu - x_j)
    square: Array  # [f, 1]: |E|^2


def krum_chooses(view: View, seen: Seen, distances: Quadratics) -> Callable[[Array], Array]:
    """`chosen(gamma [f]) -> [f] bool`: Krum takes v at a majority of the attacker's benign receivers.

    Receiver i has the honest neighbours h and c copies of v. Krum sums the T smallest distances. From
    v: c - 1 zeros, then the nearest honest ones. From h: of the sorted honest distances and c times
    z = |h - v|^2, the T smallest sum to the minimum over j of (the j smallest honest) + (T - j) z.
    A tie goes to the honest node, whose id is smaller.
    """
    n_b, big = view.benign, linalg.BIG
    ids, mask = (a[:n_b] for a in view.graph)
    honest = mask & (ids < n_b)
    slots = jnp.where(honest, ids, 0)
    copies = jnp.sum(mask & (ids >= n_b), axis=1)  # [n_b]
    degree = jnp.sum(mask, axis=1)
    n_hat = jnp.clip((degree + 1) // 2, 0, jnp.maximum(krum_limit(degree), 0))  # the paper's, at rho 0.4
    terms = jnp.maximum(degree - n_hat - 2, 1)

    # Between the honest neighbours of a receiver: sorted once, as prefix sums.
    between = honest_distances(seen)[slots[:, :, None], slots[:, None, :]]
    pairs = honest[:, :, None] & honest[:, None, :] & ~jnp.eye(ids.shape[1], dtype=bool)[None]
    ordered = jnp.sort(jnp.where(pairs, between, big), axis=2)
    finite = jnp.where(ordered < big, ordered, 0)
    prefix = jnp.concatenate([jnp.zeros_like(finite[:, :, :1]), jnp.cumsum(finite, axis=2)], axis=2)
    j = jnp.arange(prefix.shape[2])
    allowed = (j[None] <= terms[:, None]) & (j[None] >= (terms - copies)[:, None])
    allowed &= j[None] <= (jnp.sum(honest, axis=1) - 1)[:, None]  # [n_b, K + 1]
    copies_used = jnp.maximum(terms[:, None] - j[None], 0)
    prefix = jnp.where(allowed[:, None, :] & honest[:, :, None], prefix, big)  # [n_b, K, K + 1]

    # The attacker's receivers, as slots of its own row.
    receivers, heard = (a[n_b:] for a in view.graph)  # [f, K]
    heard = heard & (receivers < n_b)
    receivers = jnp.where(heard, receivers, 0)
    needed = jnp.sum(heard, axis=1) // 2 + 1
    attackers = jnp.arange(view.byzantine)[:, None, None]
    to_v = terms[receivers] - (copies[receivers] - 1)  # [f, K] honest distances in v's score
    prefix, of_z = prefix[receivers], copies_used[receivers][:, :, None, :]
    there = honest[receivers]

    def chosen(gamma: Array) -> Array:
        # A distance is gamma^2 |E|^2 + rest. The first part is common to all and, at a large gamma, hides
        # the rest in float32, so the two scores are compared part by part.
        rest = (distances.base + 2 * gamma[:, None] * distances.slope)[attackers, slots[receivers]]
        rest = jnp.where(there, rest, big)  # [f, K, K]: to the receiver's honest neighbours
        nearest = linalg.sort_arrays([rest[:, :, k] for k in range(rest.shape[2])])
        rest_v = sum(jnp.where(k < to_v, v, 0) for k, v in enumerate(nearest))[:, :, None, None]
        lead = (jnp.square(gamma)[:, None] * distances.square)[:, :, None, None]
        excess = lead * (to_v[:, :, None, None] - of_z) + (rest_v - prefix - of_z * rest[:, :, :, None])
        wins = jnp.all((excess < 0) | ~there[:, :, :, None], axis=(2, 3))
        return jnp.sum(heard & wins, axis=1) >= needed

    return chosen


def largest(chosen: Callable[[Array], Array], size: int, cap: float = 1e6) -> Array:
    """[f] the largest gamma that is chosen: doubling from 1, then bisection to 1e-3 of it.

    0 if none is; the cap if all are.
    """

    def doubling(_, state):
        low, high, going = state
        yes = chosen(high) & going
        return jnp.where(yes, high, low), jnp.where(yes, 2 * high, high), yes

    zero = jnp.zeros(size)
    low, high, _ = lax.fori_loop(0, 21, doubling, (zero, zero + 1, jnp.ones(size, bool)))

    def bisect(_, state):
        low, high = state
        middle = (low + high) / 2
        yes = chosen(middle)
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    low, high = lax.fori_loop(0, 30, bisect, (low, high))
    return jnp.minimum(low, cap)
