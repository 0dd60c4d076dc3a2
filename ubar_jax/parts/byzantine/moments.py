"""Attacks along the mean or standard deviation of the seen models, with fixed or optimised strength."""

from statistics import NormalDist
from typing import Annotated

import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.parts.byzantine.base import attacks
from ubar_jax.parts.byzantine.seen import Seen, average_of, living, seen_by_attackers, sigma
from ubar_jax.registry import Number
from ubar_jax.types import View


def alie_z(benign: int, byzantine: int) -> float:
    """ALIE's z: the largest z at which attackers and honest outliers form a majority."""
    n = benign + byzantine
    supporters = max(1, n // 2 + 1 - byzantine)
    return NormalDist().inv_cdf(max((benign - supporters) / benign, 1e-6))


@attacks.register
def alie(key: Array, view: View, z: Annotated[float | str, Number(words=("auto",))] = "auto") -> Array:
    """A little is enough: mu - z sigma. Knows its neighbours' messages, and n and f of the whole network."""
    seen = seen_by_attackers(view)
    z = alie_z(view.benign, view.byzantine) if isinstance(z, str) else z
    return seen.centre + seen.mean - z * sigma(seen)


@attacks.register
def ipm(key: Array, view: View, eps: Annotated[float, Number(0)] = 0.5) -> Array:
    """Inner-product manipulation: -eps mu. Knows its neighbours' messages."""
    seen = seen_by_attackers(view)
    return -eps * (seen.centre + seen.mean)


def most_damaging(view: View, seen: Seen, direction: Array) -> Array:
    """[f, d] mu + gamma direction, with the one gamma >= 0 for all attackers that does most damage.

    Damage is the mean distance of the deployed rule's output from the mean of the honest neighbours. The line
    search evaluates the rule 16 times: steps from 0 double while damage grows; then each failed trial
    multiplies the step by -0.8.
    """
    ids, mask = (a[: view.benign] for a in view.graph)
    honest = mask & (ids < view.benign)
    rows = jnp.arange(view.benign)[:, None]
    near = jnp.zeros((view.benign, view.benign), bool).at[rows, jnp.where(honest, ids, 0)].max(honest)
    wanted = average_of(near, jnp.maximum(near.sum(1, keepdims=True), 1), seen.honest) + seen.centre

    def message(gamma):
        return seen.centre + seen.mean + gamma * direction

    def damage(gamma):
        mixed, _ = view.deployed(jnp.concatenate([view.own[: view.benign], message(gamma)]))
        moved = living(view, mixed[: view.benign] - wanted)
        return jnp.mean(jnp.sqrt(jnp.sum(jnp.square(moved), axis=1)))

    def evaluate(_, state):
        best, most, step, growing = state
        gamma = jnp.abs(best + step)
        found = damage(gamma)
        better = found > most
        growing = growing & better
        step = jnp.where(growing, 2 * step, jnp.where(better, step, -0.8 * step))
        return jnp.where(better, gamma, best), jnp.maximum(most, found), step, growing

    start = (jnp.zeros(()), damage(jnp.zeros(())), jnp.ones(()), jnp.ones((), bool))
    return message(lax.fori_loop(0, 15, evaluate, start)[0])


@attacks.register
def alie_optimised(key: Array, view: View) -> Array:
    """mu - gamma sigma, with the gamma of 16 trials that does most damage.

    Knows all honest messages, the deployed rule and the batches on which the rule evaluates messages.
    """
    seen = seen_by_attackers(view)
    return most_damaging(view, seen, -sigma(seen))


@attacks.register
def ipm_optimised(key: Array, view: View) -> Array:
    """mu - gamma mu, with the gamma of 16 trials that does most damage.

    Knows all honest messages, the deployed rule and the batches on which the rule evaluates messages.
    """
    seen = seen_by_attackers(view)
    return most_damaging(view, seen, -(seen.centre + seen.mean))
