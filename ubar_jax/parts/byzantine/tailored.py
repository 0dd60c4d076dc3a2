"""Attacks that send a different message to each receiver."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.parts.byzantine.base import attacks
from ubar_jax.parts.byzantine.seen import living
from ubar_jax.registry import Number
from ubar_jax.types import View


def _metropolis(view: View) -> tuple[Array, Array]:
    """([n_b, K] Metropolis weights of honest neighbours, [n_b, 1] total weight of Byzantine neighbours)."""
    weights = linalg.metropolis(view.graph, view.benign)
    honest = jnp.where(view.graph.neighbours[: view.benign] < view.benign, weights, 0)
    return honest, jnp.sum(weights - honest, axis=1, keepdims=True)


def _weighted_honest(view: View, weights: Array) -> Array:
    """[n_b, d] sum of the honest neighbours' models with weights [n_b, K]."""
    ids = jnp.where(
        view.graph.neighbours[: view.benign] < view.benign, view.graph.neighbours[: view.benign], 0
    )
    rows = jnp.arange(view.benign)[:, None]
    matrix = jnp.zeros((view.benign, view.benign)).at[rows, ids].add(weights)
    return jnp.matmul(matrix, living(view, view.own[: view.benign]), precision=linalg.HIGHEST)


@attacks.register(tailored=True)
def dissensus(key: Array, view: View, strength: Annotated[float, Number(0)] = 1.5) -> Array:
    """Drives each receiver away from its neighbours: x_i - strength sum_good W (x_j - x_i) / sum_byz W.

    W are Metropolis weights. Knows all honest messages and the graph.
    """
    weights, byzantine = _metropolis(view)
    own = view.own[: view.benign]
    pull = _weighted_honest(view, weights) - jnp.sum(weights, axis=1, keepdims=True) * own
    return own - strength * pull / jnp.maximum(byzantine, 1e-30)


@attacks.register(tailored=True)
def isolation(key: Array, view: View) -> Array:
    """Cancels the honest neighbours of each receiver: (x_i - sum_honest W x) / sum_byz W; honest includes i.

    W are Metropolis weights; own weight is 1 minus the others. Knows all honest messages and the graph.
    """
    weights, byzantine = _metropolis(view)
    own = view.own[: view.benign]
    itself = 1 - jnp.sum(weights, axis=1, keepdims=True) - byzantine
    return (own - _weighted_honest(view, weights) - itself * own) / jnp.maximum(byzantine, 1e-30)
