"""Fang's attacks against Krum and against medians and trimmed means."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.parts.byzantine.base import attacks
from ubar_jax.parts.byzantine.search import against, krum_chooses
from ubar_jax.parts.byzantine.seen import (
    Seen,
    average_of,
    living,
    seen_by_attackers,
    widest,
)
from ubar_jax.types import View


def _moves(view: View, seen: Seen) -> Array:
    """[f, d] sign of the mean update that the seen nodes are about to add."""
    update = living(view, view.update[: view.benign])
    return jnp.sign(average_of(seen.adjacent, seen.count, update))


@attacks.register
def fang_krum(key: Array, view: View) -> Array:
    """mu - lambda s against Krum, s the sign of the seen nodes' mean update; lambda is halved until chosen.

    Chosen means the same as for mhamdi: all Byzantine neighbours of a receiver are assumed to send the same
    vector. At the first lambda the distance to mu is the largest distance of a seen model from mu plus the
    largest distance between two seen models; lambda is 0 if 40 halvings do not suffice. Knows its
    neighbours' messages and the updates they are about to add, the honest messages that its receivers get and
    how many Byzantine neighbours they have.
    """
    seen = seen_by_attackers(view)
    moves = _moves(view, seen)
    distances = against(seen, moves)
    chosen = krum_chooses(view, seen, distances)
    farthest = jnp.max(jnp.where(seen.adjacent, distances.base, 0), axis=1)
    start = (jnp.sqrt(widest(seen)) + jnp.sqrt(farthest)) / math.sqrt(view.own.shape[1])

    def halve(state):
        halvings, strength, taken = state
        strength = jnp.where(taken, strength, strength / 2)
        return halvings + 1, strength, chosen(strength)

    def go_on(state):
        halvings, strength, taken = state
        return (halvings < 40) & jnp.any(~taken & (strength > 0))

    _, strength, taken = lax.while_loop(go_on, halve, (0, start, chosen(start)))
    return seen.centre + seen.mean - jnp.where(taken, strength, 0)[:, None] * moves


@attacks.register
def fang_trimmed(key: Array, view: View) -> Array:
    """Against median and trimmed mean: values beyond the seen extreme, opposite to the mean update.

    Per coordinate, uniform between the extreme and twice or half of it, whichever lies outwards. Knows its
    neighbours' messages and the updates they are about to add.
    """
    seen = seen_by_attackers(view)
    moves = _moves(view, seen)
    ids, mask = (a[view.benign :] for a in view.graph)
    mask = mask & (ids < view.benign)
    slots = [(view.own[: view.benign][ids[:, k] * mask[:, k]], mask[:, k, None]) for k in range(ids.shape[1])]
    low = high = jnp.zeros_like(moves)
    nobody = jnp.ones_like(mask[:, :1])
    for value, there in slots:
        low = jnp.where(there & (nobody | (value < low)), value, low)
        high = jnp.where(there & (nobody | (value > high)), value, high)
        nobody = nobody & ~there
    draw = jax.random.uniform(key, moves.shape)
    below = low - draw * jnp.where(low > 0, low / 2, -low)
    above = high + draw * jnp.where(high > 0, high, -high / 2)
    return jnp.where(moves > 0, below, above)
