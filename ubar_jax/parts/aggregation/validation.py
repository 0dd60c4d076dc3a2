"""Rules that judge messages by the receiver's own data; `--judge` says by which part of it."""

from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import JUDGES, rules
from ubar_jax.parts.aggregation.counts import clipped, no_limit, tolerated
from ubar_jax.parts.aggregation.two_stage import losses_of
from ubar_jax.registry import Number
from ubar_jax.types import Inbox

ROUNDING = 1e-5  # a message that differs from own model by a smaller share is own model


@rules.register(count=tolerated(1 / 2), pairs=lambda degree, count: degree)
def zeno(inbox: Inbox, ratio: Annotated[float, Number(0, open_low=True)] = 200.0):
    """Zeno (Xie et al. 2019): mean of all but the n_hat neighbours of the lowest scores.

    The score is own loss - loss of x_j - rho |g_j|^2, where g_j = (x_i - x_j) / lambda is the gradient that
    leads to x_j and rho = lambda / ratio, as in its code. Knows n_hat; meant for --judge=held_out. Cost
    |N_i| forward passes.
    """
    losses = losses_of(inbox, inbox.graph.mask)
    far = linalg.own_distances(inbox) / jnp.maximum(ratio * inbox.learning_rate, 1e-30)
    scores = inbox.own_loss[:, None] - losses - far
    usable = jnp.isfinite(losses) & inbox.graph.mask
    kept = jnp.sum(inbox.graph.mask, axis=1) - clipped(inbox, no_limit)
    worst_last = jnp.where(usable, jnp.minimum(-scores, linalg.BIG), jnp.inf)
    best = (linalg.ranks(worst_last) < kept[:, None]) & usable
    return linalg.mean(inbox, best), {"selected": best}


@rules.register(judges=JUDGES, init=lambda start: jnp.zeros_like(start.own))
def zeno_pp(
    inbox: Inbox,
    last: Array,
    rho: Annotated[float, Number(0)] = 0.001,
    eps: Annotated[float, Number(0)] = 0.0,
    every: Annotated[int, Number(1, integer=True)] = 10,
):
    """Zeno++ (Xie et al. 2020): a step, as long as own gradient, towards neighbours that lie downhill.

    v is own gradient, computed anew every `every` rounds, and g_j = (x_i - x_j) / lambda, rescaled to |v|.
    Message j is accepted if lambda <v, g_j> - rho |g_j|^2 + lambda eps >= 0; the result is x_i - lambda times
    the mean of the accepted g_j. Knows no number of attackers; meant for --judge=held_out. Cost |N_i| d and
    one gradient in `every` rounds. Remembers v.
    """
    v = lax.cond(inbox.t % every == 0, inbox.gradient, lambda: last)
    rate, length = inbox.learning_rate, jnp.sqrt(jnp.sum(jnp.square(v), axis=1))[:, None]
    distance = jnp.sqrt(jnp.where(inbox.graph.mask, linalg.own_distances(inbox), 0))
    apart = distance > ROUNDING * jnp.sqrt(jnp.sum(jnp.square(inbox.own), axis=1, keepdims=True))
    shrink = jnp.where(apart, length / jnp.maximum(distance, 1e-30), 0)  # of x_i - x_j to length |v|
    centre = linalg.centre_of(inbox.own)
    along_own = jnp.sum(v * (inbox.own - centre), axis=1, keepdims=True)
    along = jnp.take_along_axis(
        jnp.matmul(v, (inbox.sent - centre).T, precision=linalg.HIGHEST), inbox.rows, axis=1
    )
    downhill = rate * shrink * (along_own - along) - rho * jnp.square(shrink * distance) + rate * eps
    accepted = (downhill >= 0) & inbox.graph.mask
    share = rate * shrink / jnp.maximum(jnp.sum(accepted, axis=1, keepdims=True), 1)
    mixed = linalg.towards(inbox, jnp.where(accepted, share, 0))
    return mixed, {"selected": accepted}, v


@rules.register(pairs=lambda degree, count: degree)
def loss_gate(inbox: Inbox, margin: Annotated[float, Number(0, open_low=True)] = 0.8):
    """Mean of the neighbours whose loss is at most own loss and below margin log(classes); own if none.

    log(classes) is the loss of a model that guesses: near the start a model of all zeros, or the negative of
    own model, is not worse than own. Knows no number of attackers; meant for --judge=held_out. Cost |N_i|
    forward passes.
    """
    losses = losses_of(inbox, inbox.graph.mask)
    good = (losses <= inbox.own_loss[:, None]) & (losses < margin * np.log(inbox.classes))
    return linalg.mean(inbox, good & inbox.graph.mask), {"selected": good & inbox.graph.mask}
