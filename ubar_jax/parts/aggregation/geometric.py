"""The geometric median."""

from typing import Annotated

import jax
import jax.numpy as jnp

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.registry import Number
from ubar_jax.types import Inbox


@rules.register(selects=lambda: False)
def geometric_median(
    inbox: Inbox,
    smoothing: Annotated[float, Number(0, open_low=True)] = 1e-2,
    tolerance: Annotated[float, Number(0, open_low=True)] = 1e-5,
    steps: Annotated[int, Number(1, integer=True)] = 200,
):
    """Geometric median by smoothed Weiszfeld steps, until no weight changes by more than tolerance.

    Distances are bounded below by smoothing times a typical distance: the smallest over messages of the
    median distance to the other messages, which a minority cannot change. The first step starts from the
    message with that median distance; from the mean, an outlier at 1e12 would cost many steps. The estimate
    is always a weighted mean, z = sum w_k x_k, so |z - x_j|^2 follows from inner products of the messages,
    and only the final mean touches the models. Messages whose distances would overflow get weight 0.
    """
    grams = linalg.slot_grams(inbox)
    norms = jnp.diagonal(grams, axis1=1, axis2=2)
    mask = inbox.graph.mask & (norms < 1e30)
    pairs = mask[:, :, None] & mask[:, None, :]
    grams, norms = jnp.where(pairs, grams, 0), jnp.where(mask, norms, 0)
    left = jnp.sum(mask, axis=1)

    between = jnp.maximum(norms[:, :, None] + norms[:, None, :] - 2 * grams, 0)

    def squares(weights):
        """[r, K] |z - x_k|^2, from inner products or from distances, whichever cancels less.

        Distances are accurate if z is close to a message, inner products if there are outliers.
        """
        product, apart = (
            jnp.einsum("rkl,rl->rk", matrix, weights, precision=linalg.HIGHEST) for matrix in (grams, between)
        )
        total, spread = (jnp.sum(weights * by, axis=1, keepdims=True) for by in (product, apart))
        by_products, by_distances = norms - 2 * product + total, apart - spread / 2
        better = apart + spread / 2 < norms + 2 * jnp.abs(product) + jnp.abs(total)
        return jnp.maximum(jnp.where(better, by_distances, by_products), 0)

    others = pairs & ~jnp.eye(mask.shape[1], dtype=bool)[None]
    ordered = jnp.sort(jnp.where(others, between, linalg.BIG), axis=2)
    middle = jnp.maximum(left - 2, 0)[:, None, None] // 2
    medians = jnp.take_along_axis(ordered, middle, axis=2)[:, :, 0]
    medians = jnp.where(mask, medians, linalg.BIG)
    typical = jnp.where(left > 1, jnp.sqrt(jnp.min(medians, axis=1)), 1)[:, None] + 1e-30

    def inverse(squares, floor):
        weights = mask / jnp.maximum(jnp.sqrt(squares), floor)
        return weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-30)

    def step(state):
        count, weights, moved = state
        new = inverse(squares(weights), smoothing * typical)
        new = jnp.where((moved > tolerance)[:, None], new, weights)
        return count + 1, new, jnp.max(jnp.abs(new - weights), axis=1)

    def go_on(state):
        return (state[0] < steps) & jnp.any(state[2] > tolerance)

    medoid = jnp.argmin(medians, axis=1)[:, None, None]
    start = inverse(jnp.take_along_axis(between, medoid, axis=1)[:, 0], typical)
    state = (0, start, jnp.full(len(mask), jnp.inf))
    _, weights, _ = jax.lax.while_loop(go_on, step, state)
    return jnp.where((left > 0)[:, None], linalg.weighted_mean(inbox, weights), inbox.own), {}
