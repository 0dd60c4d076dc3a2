"""Rules that drop the messages farthest from own model or from the mean of the others."""

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.parts.aggregation.counts import clipped, no_limit, tolerated
from ubar_jax.registry import Number
from ubar_jax.types import Inbox

ROUNDING = 1e-5  # squared distances that differ by a smaller share are equal; the smallest id is dropped


@rules.register(count=tolerated(1 / 2), alpha=lambda degree: 0.0, orders=("then", "while"))
def nna(inbox: Inbox):
    """NNA: mean of own model and all but the n_hat farthest neighbours (Farhadkhani et al. 2023).

    With --optimizer="momentum(decay=0.99, dampening=0.99)" it is MoNNA. Knows n_hat. Cost |N_i| d.
    """
    kept = jnp.sum(inbox.graph.mask, axis=1) - clipped(inbox, no_limit)
    near = (linalg.ranks(linalg.own_distances(inbox)) < kept[:, None]) & inbox.graph.mask
    return linalg.mean_with_own(inbox, near), {"selected": near}


@rules.register(count=tolerated(1 / 2), alpha=lambda degree: 0.0, orders=("then", "while"))
def ios(inbox: Inbox):
    """IOS: n_hat times drop the neighbour farthest from the weighted mean of the rest (Wu, Chen, Ling 2023).

    The mean is over N_i and i with Metropolis weights; own model is never dropped. Knows the neighbours'
    degrees and n_hat. Cost |N_i|^2 d; the pairwise distances are shared by all receivers.
    """
    weights = jnp.concatenate([inbox.weights, linalg.own_weight(inbox)], axis=1)
    kept = _without_farthest(linalg.all_distances(inbox), weights, clipped(inbox, no_limit))
    kept &= inbox.graph.mask
    weights = jnp.where(kept, inbox.weights, 0)
    total = jnp.sum(weights, axis=1, keepdims=True) + linalg.own_weight(inbox)
    return linalg.towards(inbox, weights / total), {"selected": kept}


@rules.register(count=tolerated(1 / 2), alpha=lambda degree: 0.0, orders=("then", "while"))
def faba(inbox: Inbox):
    """FABA: n_hat times drop the neighbour farthest from the mean of the rest (Xia et al. 2019).

    The mean is over N_i; the result is the mean of own model and those that are left. Knows n_hat. Cost
    |N_i|^2 d; the pairwise distances are shared by all receivers.
    """
    distances = linalg.slot_distances(inbox)
    distances = jnp.where(jnp.isfinite(distances), jnp.minimum(distances, linalg.BIG / 4), 0)
    weights = jnp.pad(inbox.graph.mask.astype(jnp.float32), ((0, 0), (0, 1)))  # own model has no weight
    distances = jnp.pad(distances, ((0, 0), (0, 1), (0, 1)))
    kept = _without_farthest(distances, weights, clipped(inbox, no_limit)) & inbox.graph.mask
    return linalg.mean_with_own(inbox, kept), {"selected": kept}


def _without_farthest(distances: Array, weights: Array, drops: Array) -> Array:
    """[r, K] slots left after dropping, `drops` [r] times, the one farthest from the rest's weighted mean.

    distances [r, K + 1, K + 1] and weights [r, K + 1] include own model as the last, which is never dropped.
    |x_j - mean|^2 is the weighted mean of |x_j - x_k|^2 over k, less the same number for all j.
    """

    def drop(step, left):
        now = jnp.where(left, weights, 0)
        now = now / jnp.maximum(jnp.sum(now, axis=1, keepdims=True), 1e-30)
        far = jnp.matmul(distances, now[:, :, None], precision=linalg.HIGHEST)[:, :-1, 0]
        far = jnp.where(left[:, :-1], far, -1)
        first = jnp.argmax(far >= (1 - ROUNDING) * jnp.max(far, axis=1, keepdims=True), axis=1)
        gone = jnp.arange(left.shape[1])[None] == first[:, None]
        return left & ~(gone & (step < drops)[:, None])

    left = (weights > 0).at[:, -1].set(True)
    return jax.lax.fori_loop(0, weights.shape[1] - 1, drop, left)[:, :-1]


@rules.register(orders=("then", "while"))
def balance(
    inbox: Inbox,
    gamma: Annotated[float, Number(0, open_low=True)] = 0.3,
    kappa: Annotated[float, Number(0)] = 1.0,
):
    """BALANCE (Fang et al. 2024): mean of the messages with |x_j - x_i| <= gamma exp(-kappa t / T) |x_i|.

    Own model if there are none. Knows gamma, which must fit the length T of the run: at 2 a model accepts its
    own negative. Cost |N_i| d.
    """
    fading = jnp.exp(-kappa * inbox.t.astype(jnp.float32) / inbox.rounds.astype(jnp.float32))
    radius = gamma * fading * jnp.sqrt(jnp.sum(jnp.square(inbox.own), axis=1))
    near = (jnp.sqrt(linalg.own_distances(inbox)) <= radius[:, None]) & inbox.graph.mask
    return linalg.mean(inbox, near), {"selected": near}
