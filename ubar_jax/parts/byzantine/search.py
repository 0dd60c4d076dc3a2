"""Search for the largest gamma at which Krum still chooses v = mu + gamma E.

An attacker sees its benign neighbours. At each such receiver i it assumes that all Byzantine neighbours of i
send v. Each squared distance from v to an honest model is a quadratic in gamma, and the distances between
honest models do not depend on gamma. A search step therefore needs only scalars, no vectors of size d.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.numerics import linalg, order_statistics
from ubar_jax.parts.aggregation.counts import krum_limit
from ubar_jax.parts.byzantine.seen import Seen, honest_distances
from ubar_jax.types import View


class Quadratics(NamedTuple):
    """|mu + gamma E - x_j|^2 = base + 2 gamma slope + gamma^2 square, per attacker and honest node."""

    base: Array  # [f, n_b]
    slope: Array  # [f, n_b]: E . (mu - x_j)
    square: Array  # [f, 1]: |E|^2


def quadratics(seen: Seen, along: Array, square: Array) -> Quadratics:
    """The quadratics of a direction E, given `along` = E . x_j [f, n_b] and `square` = |E|^2 [f, 1].

    mu is the mean of the seen models, so the rest follows from distances between honest models.
    """
    weights = seen.adjacent / seen.count
    apart = jnp.matmul(weights, honest_distances(seen), precision=linalg.HIGHEST)
    base = jnp.maximum(apart - jnp.sum(weights * apart, axis=1, keepdims=True) / 2, 0)
    return Quadratics(base, jnp.sum(weights * along, axis=1, keepdims=True) - along, square)


def krum_chooses(view: View, seen: Seen, distances: Quadratics) -> Callable[[Array], Array]:
    """`chosen(gamma [f]) -> [f] bool`: Krum takes v at a majority of the attacker's benign receivers.

    Receiver i has honest neighbours h in its first H slots and c copies of v. Krum's score sums the T
    smallest squared distances. Score of v: c - 1 zeros, then the nearest honest models. Score of h: the T
    smallest among its honest distances and c copies of z = |h - v|^2, which is the minimum over j of (sum of
    the j smallest honest distances) + (T - j) z. The honest node wins a tie, because its id is smaller.
    """
    n_b, big = view.benign, linalg.BIG
    ids, mask = (a[:n_b] for a in view.graph)
    copies = jnp.sum(mask & (ids >= n_b), axis=1)  # [n_b]
    degree = jnp.sum(mask, axis=1)
    n_hat = jnp.clip((degree + 1) // 2, 0, jnp.maximum(krum_limit(degree), 0))  # the paper's n_hat at rho 0.4
    terms = jnp.maximum(degree - n_hat - 2, 1)
    to_v = (terms - (copies - 1))[None, :, None, None]  # number of honest distances in v's score
    honest = (mask & (ids < n_b))[:, : view.benign_slots]  # [n_b, H]
    slots = jnp.where(honest, ids[:, : view.benign_slots], 0)

    # Distances between a receiver's honest neighbours: sorted once, stored as prefix sums.
    between = honest_distances(seen)[slots[:, :, None], slots[:, None, :]]
    pairs = honest[:, :, None] & honest[:, None, :] & ~jnp.eye(view.benign_slots, dtype=bool)[None]
    ordered = jnp.sort(jnp.where(pairs, between, big), axis=2)
    finite = jnp.where(ordered < big, ordered, 0)
    prefix = jnp.concatenate([jnp.zeros_like(finite[:, :, :1]), jnp.cumsum(finite, axis=2)], axis=2)
    j = jnp.arange(prefix.shape[2])
    allowed = (j[None] <= terms[:, None]) & (j[None] >= (terms - copies)[:, None])
    allowed &= j[None] <= (jnp.sum(honest, axis=1) - 1)[:, None]  # [n_b, H + 1]
    of_z = jnp.maximum(terms[:, None] - j[None], 0)[None, :, None, :]
    prefix = jnp.where(allowed[:, None, :] & honest[:, :, None], prefix, big)[None]  # [1, n_b, H, H + 1]

    base, slope = distances.base[:, slots], distances.slope[:, slots]  # [f, n_b, H]
    needed = jnp.sum(seen.adjacent, axis=1) // 2 + 1

    def chosen(gamma: Array) -> Array:
        # A distance is gamma^2 |E|^2 + rest. The first part is the same for all honest models and, at large
        # gamma, absorbs the rest in float32, so both parts of the scores are subtracted separately.
        rest = jnp.where(honest[None], base + 2 * gamma[:, None, None] * slope, big)
        rest_v = order_statistics.sum_of_smallest(
            [rest[:, :, k, None, None] for k in range(view.benign_slots)], to_v
        )
        lead = (jnp.square(gamma)[:, None] * distances.square)[:, :, None, None]
        excess = lead * (to_v - of_z) + (rest_v - of_z * rest[:, :, :, None] - prefix)
        wins = jnp.all((excess < 0) | ~honest[None, :, :, None], axis=(2, 3))  # [f, n_b]
        return jnp.sum(seen.adjacent & wins, axis=1) >= needed

    return chosen


def largest(chosen: Callable[[Array], Array], size: int, cap: float = 1e6) -> Array:
    """[f] the largest gamma that is chosen: doubling from 1, then bisection to a relative error of 1e-4.

    0 if no gamma above 1e-9 is chosen, cap if all are. Stops when the search of every attacker has converged.
    """

    def double(state):
        low, high, going = state
        yes = chosen(high) & going
        return jnp.where(yes, high, low), jnp.where(yes, 2 * high, high), yes & (high < cap)

    def bisect(state):
        low, high, _ = state
        middle = (low + high) / 2
        yes = chosen(middle)
        low, high = jnp.where(yes, middle, low), jnp.where(yes, high, middle)
        return low, high, unsettled(low, high)

    def unsettled(low, high):
        return (low < cap) & (high > 1e-9) & (high - low > 1e-4 * high)

    zero = jnp.zeros(size)
    state = (zero, zero + 1, jnp.ones(size, bool))
    low, high, _ = lax.while_loop(lambda state: jnp.any(state[2]), double, state)
    state = (low, high, unsettled(low, high))
    low, _, _ = lax.while_loop(lambda state: jnp.any(state[2]), bisect, state)
    return jnp.minimum(low, cap)


def against(seen: Seen, delta: Array) -> Quadratics:
    """The quadratics of mu - lambda delta, delta [f, d]."""
    along = -jnp.matmul(delta, seen.honest.T, precision=linalg.HIGHEST)
    return quadratics(seen, along, jnp.sum(jnp.square(delta), axis=1, keepdims=True))
