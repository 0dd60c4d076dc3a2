"""Rules that combine the values of all messages per coordinate."""

from typing import Annotated

import jax.numpy as jnp
from jax import lax

from ubar_jax.numerics import order_statistics
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.parts.aggregation.counts import clipped, tolerated, trim_limit
from ubar_jax.registry import Number
from ubar_jax.types import Inbox


@rules.register(selects=lambda: False)
def dmedian(inbox: Inbox):
    """Dmedian: coordinate-wise median of the neighbours."""
    return order_statistics.coordinate_median(inbox, inbox.graph.mask), {}


@rules.register(
    count=tolerated(1 / 2),
    limit=trim_limit,
    alpha=lambda degree: 0.0,
    selects=lambda: False,
    orders=("while",),
)
def byrdie(inbox: Inbox, blocks: Annotated[int, Number(1, integer=True)] = 10):
    """ByRDiE (Yang and Bajwa 2019) by blocks: round t changes block t mod `blocks` of the coordinates only.

    There it takes the mean of own value and the neighbours' values without the n_hat largest and smallest,
    and the step; elsewhere it keeps x_i and undoes the step. The original changes one coordinate per round,
    which no model of thousands of parameters can afford; blocks=1 is the original BRIDGE-T. For alpha 0.
    Knows n_hat. Cost |N_i| d / blocks.
    """
    d = inbox.own.shape[1]
    size = -(-d // blocks)
    first = inbox.t % blocks * size
    start = jnp.minimum(first, d - size)  # the last block may be shorter
    own, sent = (lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in (inbox.own, inbox.sent))
    n_hat = clipped(inbox, trim_limit)
    trimmed = order_statistics.trimmed_mean(inbox._replace(own=own, sent=sent), inbox.graph.mask, n_hat)
    kept = (jnp.sum(inbox.graph.mask, axis=1) - 2 * n_hat)[:, None]
    still = inbox.own - inbox.update
    inside = (jnp.arange(size) + start >= first)[None]
    kept_still = lax.dynamic_slice_in_dim(still, start, size, axis=1)
    block = jnp.where(inside, (trimmed * kept + own) / (kept + 1), kept_still)
    return lax.dynamic_update_slice_in_dim(still, block, start, axis=1), {}
