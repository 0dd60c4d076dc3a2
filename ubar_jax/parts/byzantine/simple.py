"""Attacks that look at nothing but the node's own model."""

import jax
import jax.numpy as jnp
from jax import Array

from ubar_jax.parts.byzantine.base import Positive, attacks
from ubar_jax.types import View


@attacks.register
def none(key: Array, view: View) -> Array:
    """No Byzantine nodes at all, whatever the ratio: the attack-free baseline."""
    return jnp.zeros((view.byzantine, view.own.shape[1]))


@attacks.register
def gaussian(key: Array, view: View, std: Positive = 1.0) -> Array:
    """Random vectors N(0, std^2), fresh each round. Knows nothing."""
    return std * jax.random.normal(key, (view.byzantine, view.own.shape[1]))


@attacks.register(trains=True)
def bit_flip(key: Array, view: View) -> Array:
    """Minus the node's own estimate; otherwise honest. Knows its own model."""
    return -view.own[view.benign :]


@attacks.register
def nonfinite(key: Array, view: View) -> Array:
    """NaN, +inf, -inf and 1e30 in turn, from node to node and round to round. Knows nothing."""
    values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e30])
    turn = values[(view.t + jnp.arange(view.byzantine)) % 4]
    return jnp.broadcast_to(turn[:, None], (view.byzantine, view.own.shape[1]))
