"""Attacks that move as far from the mean as they can without being detected."""

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.numerics import linalg
from ubar_jax.parts.byzantine.base import attacks
from ubar_jax.parts.byzantine.search import against, krum_chooses, largest, quadratics
from ubar_jax.parts.byzantine.seen import Seen, honest_distances, seen_by_attackers, sigma, widest
from ubar_jax.registry import Choice, ConfigError, Number
from ubar_jax.types import View


def _check_surrogate(network, benign, byzantine, rounds, rule, surrogate: str, gamma: float | str):
    selects = rule.traits.selects
    if surrogate == "deployed" and gamma == "search" and not selects(**rule.of(selects)):
        raise ConfigError(
            f"mhamdi(surrogate=deployed) needs a rule that selects whole messages, but {rule} combines all "
            "of them; use surrogate=krum"
        )
    return {}, []


@attacks.register(setup=_check_surrogate)
def mhamdi(
    key: Array,
    view: View,
    norm: Annotated[int | str, Choice((2, "inf"))] = 2,
    surrogate: Annotated[str, Choice(("krum", "deployed"))] = "krum",
    gamma: Annotated[float | str, Number(0, words=("search",))] = "search",
) -> Array:
    """Hidden vulnerability: mu + gamma E with the largest gamma that goes unnoticed, searched in every round.

    E is the unit vector of the coordinate with the largest seen deviation (norm 2) or all ones (inf).
    Unnoticed means chosen by Krum (or by the deployed rule, if it selects) at a majority of the attacker's
    benign receivers, assuming that all Byzantine neighbours of a receiver send the same vector; gamma is 0 if
    no vector is chosen. "deployed" runs the rule once per attacker in each of about 20 search steps. Knows
    its neighbours' messages, the honest messages that its receivers get and how many Byzantine neighbours
    they have; for "deployed" also the rule and the batches on which it evaluates messages.
    """
    seen = seen_by_attackers(view)
    if norm == 2:
        coordinate = linalg.argmax(sigma(seen))
        direction = jax.nn.one_hot(coordinate, view.own.shape[1])
        along = seen.honest[:, coordinate].T  # [f, n_b]: E . x_j
        square = jnp.ones((view.byzantine, 1))
    else:
        direction = jnp.ones_like(seen.mean)
        along = jnp.broadcast_to(jnp.sum(seen.honest, axis=1)[None], (view.byzantine, view.benign))
        square = jnp.full((view.byzantine, 1), float(view.own.shape[1]))
    if isinstance(gamma, str):
        if surrogate == "krum":
            chosen = krum_chooses(view, seen, quadratics(seen, along, square))
        else:
            chosen = _deployed_chooses(view, seen, direction)
        return _moved(seen, largest(chosen, view.byzantine)[:, None], direction)
    return _moved(seen, gamma, direction)


def _moved(seen: Seen, gamma: Array | float, direction: Array) -> Array:
    return seen.centre + seen.mean + gamma * direction


def _deployed_chooses(view: View, seen: Seen, direction: Array):
    """Like `krum_chooses`, but runs the deployed rule, once per attacker."""
    ids, mask = (a[: view.benign] for a in view.graph)
    honest = view.own[: view.benign]

    def one(attacker, mean, direction, gamma):
        vector = (seen.centre[0] + mean + gamma * direction)[None]
        everyone = jnp.concatenate([honest, jnp.repeat(vector, view.byzantine, axis=0)])
        selected = view.deployed(everyone)[1]["selected"][: view.benign]
        receives = jnp.any(mask & (ids == view.benign + attacker), axis=1)
        taken = jnp.any(mask & (ids >= view.benign) & selected, axis=1)  # sent by any Byzantine neighbour
        return 2 * jnp.sum(receives & taken) > jnp.sum(receives)

    def chosen(gamma):
        rows = (jnp.arange(view.byzantine), seen.mean, direction, gamma)
        return lax.map(lambda row: one(*row), rows)

    return chosen


Direction = Annotated[str, Choice(("std", "sign", "unit"))]


def _direction(seen: Seen, name: str) -> Array:
    """[f, d] sigma, sign(mu) or mu / |mu|."""
    mean = seen.centre + seen.mean
    if name == "std":
        return sigma(seen)
    if name == "sign":
        return jnp.sign(mean)
    return mean / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(mean), axis=1, keepdims=True)), 1e-30)


def _least_nonzero(square: Array) -> Array:
    return jnp.maximum(square, 1e-30)


@attacks.register
def min_max(key: Array, view: View, direction: Direction = "std") -> Array:
    """mu - lambda delta, no farther from any seen vector than the two farthest seen vectors are apart.

    Takes the largest such lambda: each squared distance is a quadratic in lambda, so it is the smallest of
    their roots. Knows its neighbours' messages.
    """
    seen = seen_by_attackers(view)
    delta = _direction(seen, direction)
    base, slope, square = against(seen, delta)
    square = _least_nonzero(square)
    room = jnp.maximum(jnp.square(slope) + square * (widest(seen)[:, None] - base), 0)
    roots = jnp.where(seen.adjacent, (jnp.sqrt(room) - slope) / square, jnp.inf)
    strength = jnp.min(roots, axis=1, keepdims=True)
    return seen.centre + seen.mean - jnp.where(jnp.isfinite(strength), strength, 0) * delta


@attacks.register
def min_sum(key: Array, view: View, direction: Direction = "std") -> Array:
    """mu - lambda delta, its sum of squared distances to seen vectors at most the largest sum of a seen one.

    Takes the largest such lambda. mu is the mean of the seen vectors, so lambda adds lambda^2 |delta|^2 per
    seen vector to the sum. Knows its neighbours' messages.
    """
    seen = seen_by_attackers(view)
    delta = _direction(seen, direction)
    sums = jnp.matmul(seen.adjacent.astype(jnp.float32), honest_distances(seen), precision=linalg.HIGHEST)
    sums = jnp.where(seen.adjacent, sums, 0)
    # The squared distances to the mean sum to half the mean of `sums`.
    room = jnp.max(sums, axis=1, keepdims=True) - jnp.sum(sums, axis=1, keepdims=True) / (2 * seen.count)
    square = _least_nonzero(jnp.sum(jnp.square(delta), axis=1, keepdims=True))
    return seen.centre + seen.mean - jnp.sqrt(jnp.maximum(room, 0) / (seen.count * square)) * delta
