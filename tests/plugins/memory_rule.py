"""A rule with memory: neighbours that were far away in the last round, too, are not heard."""

import jax.numpy as jnp

from ubar_jax import linalg, rules


def nobody_is_suspect(start):
    return jnp.zeros((len(start.own), start.slots), bool)


@rules.register(init=nobody_is_suspect)
def second_chance(inbox, suspect):
    """The neighbours that were among the farther half at most once in a row."""
    order = linalg.ranks(linalg.own_distances(inbox))
    far = (order >= (inbox.degree[:, None] + 1) // 2) & inbox.graph.mask
    heard = inbox.graph.mask & ~(far & suspect)
    return linalg.mean(inbox, heard), {"selected": heard}, far
