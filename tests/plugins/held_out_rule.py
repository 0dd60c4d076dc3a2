"""A rule that takes losses on held-out examples only."""

import jax.numpy as jnp

from ubar_jax import linalg, rules
from ubar_jax.parts.aggregation.two_stage import losses_of


@rules.register(pairs=lambda degree, count: degree, judges=("held_out",))
def best_of_all(inbox):
    """The neighbour of the lowest loss, if that is below own loss."""
    losses = losses_of(inbox, inbox.graph.mask)
    best = (linalg.ranks(losses) == 0) & (losses < inbox.own_loss[:, None])
    return linalg.mean(inbox, best & jnp.isfinite(losses)), {"selected": best}
