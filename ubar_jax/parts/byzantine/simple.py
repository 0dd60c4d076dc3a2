"""Attacks that use at most the node's own model."""

import jax
import jax.numpy as jnp
from jax import Array

from ubar_jax.parts.byzantine.base import Positive, attacks
from ubar_jax.types import View


@attacks.register
def none(key: Array, view: View) -> Array:
    """Attack-free baseline: no Byzantine nodes, whatever the ratio."""
    return jnp.zeros((view.byzantine, view.own.shape[1]))


@attacks.register
def gaussian(key: Array, view: View, std: Positive = 1.0) -> Array:
    """Random vectors from N(0, std^2), new in each round. Knows nothing."""
    return std * jax.random.normal(key, (view.byzantine, view.own.shape[1]))


@attacks.register(trains=True)
def bit_flip(key: Array, view: View) -> Array:
    """The node's own model, negated; otherwise honest. Knows its own model."""
    return -view.own[view.benign :]


@attacks.register
def nonfinite(key: Array, view: View) -> Array:
    """NaN, +inf, -inf and 1e30, alternating over nodes and rounds. Knows nothing."""
    values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e30])
    turn = values[(view.t + jnp.arange(view.byzantine)) % 4]
    return jnp.broadcast_to(turn[:, None], (view.byzantine, view.own.shape[1]))
