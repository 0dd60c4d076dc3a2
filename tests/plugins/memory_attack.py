"""An attack with memory: it sends what its neighbours sent in the last round."""

import jax.numpy as jnp

from ubar_jax import attacks
from ubar_jax.parts.byzantine.seen import seen_by_attackers


@attacks.register(init=lambda start: jnp.repeat(start.own[:1], start.byzantine, axis=0))
def echo(key, view, last):
    """The mean of its neighbours' last messages, negated. Knows its neighbours' messages."""
    seen = seen_by_attackers(view)
    return -last, seen.centre + seen.mean
