"""Bulyan: recursive Krum, then the mean around the median."""

import jax.numpy as jnp

from ubar_jax.numerics import order_statistics
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.parts.aggregation.counts import bulyan_limit, clipped, tolerated
from ubar_jax.parts.aggregation.krum import recursive_krum
from ubar_jax.types import Inbox


@rules.register(count=tolerated(1 / 4), limit=bulyan_limit)
def dbulyan(inbox: Inbox):
    """DBulyan: recursive DKrum, then per coordinate the mean of the values nearest to the median."""
    n_hat = clipped(inbox, bulyan_limit)
    picked = recursive_krum(inbox, n_hat)
    keep = jnp.sum(picked, axis=1) - 2 * n_hat
    return order_statistics.mean_around_median(inbox, picked, keep), {"selected": picked}
