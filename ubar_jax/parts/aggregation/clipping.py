"""Rules that clip the messages' distances to a centre."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.parts.aggregation.counts import tolerated
from ubar_jax.registry import Number
from ubar_jax.types import Inbox

Radius = Annotated[float | str, Number(0, open_low=True, words=("adaptive", "oracle"))]
ROUNDING = 1e-6  # sums of weights that differ by less are equal


@rules.register(
    count=tolerated(1 / 2),
    alpha=lambda degree: 0.0,
    selects=lambda: False,
    orders=("then", "while"),
)
def scclip(inbox: Inbox, tau: Radius = "adaptive"):
    """Self-centred clipping, ClippedGossip (He, Karimireddy and Jaggi 2022).

    x_i + sum_j W_ij clip(x_j - x_i, tau_i), W Metropolis weights. tau is a number; adaptive, for n_hat
    Byzantine neighbours; or oracle, for the true ones: tau_i^2 is the sum of W_ij |x_j - x_i|^2 over the
    honest j over the Byzantine weight. Adaptive takes the n_hat largest weights for the Byzantine weight, and
    for honest the closest neighbours, as long as their weight and own weight leave more than that. Knows the
    neighbours' degrees and tau, n_hat or who is benign. Cost |N_i| d.
    """
    squares = jnp.where(inbox.graph.mask, linalg.own_distances(inbox), 0)
    limit = tau**2 if isinstance(tau, float) else _squared_radius(inbox, squares, tau)[:, None]
    return linalg.towards(inbox, inbox.weights * _scale(squares, limit)), {}


def _squared_radius(inbox: Inbox, squares: Array, tau: str) -> Array:
    """[r] tau_i^2, adaptive or oracle; BIG if no neighbour is taken for Byzantine."""
    if tau == "oracle":
        honest = inbox.graph.mask & inbox.benign
        lying = jnp.sum(jnp.where(honest, 0, inbox.weights), axis=1)
    else:
        largest = linalg.ranks(-inbox.weights) < inbox.count[:, None]
        lying = jnp.sum(jnp.where(largest, inbox.weights, 0), axis=1)
        near = linalg.ranks(jnp.where(inbox.graph.mask, squares, jnp.inf))
        within = near[:, None, :] <= near[:, :, None]  # [r, slot, slots that are no farther]
        reached = linalg.own_weight(inbox) + jnp.sum(jnp.where(within, inbox.weights[:, None, :], 0), axis=2)
        honest = inbox.graph.mask & (reached < 1 - lying[:, None] - ROUNDING)
    spread = jnp.sum(jnp.where(honest, inbox.weights * jnp.minimum(squares, linalg.BIG / 4), 0), axis=1)
    return jnp.where(lying > ROUNDING, spread / jnp.maximum(lying, ROUNDING), linalg.BIG)


@rules.register(
    alpha=lambda degree: 0.0,
    selects=lambda: False,
    orders=("then", "while"),
    init=lambda start: start.own,
)
def centred_clipping(
    inbox: Inbox,
    centre: Array,
    tau: Annotated[float, Number(0, open_low=True)] = 1.0,
    steps: Annotated[int, Number(1, integer=True)] = 1,
):
    """Centred clipping (Karimireddy, He and Jaggi 2021): v + mean of clip(x_j - v, tau) over N_i and i.

    Repeated `steps` times. Remembers v, which starts at x_0. Knows tau, the scale of honest differences.
    Cost steps |N_i| d.
    """
    heard = jnp.sum(inbox.graph.mask, axis=1, keepdims=True)

    def step(_, centre):
        about = inbox._replace(own=centre)
        squares = jnp.where(inbox.graph.mask, linalg.own_distances(about), 0)
        away = inbox.own - centre
        mine = _scale(jnp.sum(jnp.square(away), axis=1, keepdims=True), tau**2) / (heard + 1)
        return linalg.towards(about, _scale(squares, tau**2) / (heard + 1)) + mine * away

    centre = lax.fori_loop(0, steps, step, centre)
    return centre, {}, centre


def _scale(squares: Array, limit: Array | float) -> Array:
    """min(1, tau / distance), from the squares of both."""
    return jnp.minimum(1, jnp.sqrt(limit / jnp.maximum(squares, 1e-30)))
