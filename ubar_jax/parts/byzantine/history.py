"""Attacks that remember earlier rounds."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from ubar_jax.parts.byzantine.base import attacks
from ubar_jax.parts.byzantine.moments import alie_z
from ubar_jax.parts.byzantine.seen import seen_by_attackers, sigma
from ubar_jax.registry import Number
from ubar_jax.types import Start, View


def _initial_model(start: Start) -> Array:
    return jnp.repeat(start.own[:1], start.byzantine, axis=0)


@attacks.register(init=_initial_model)
def frozen(key: Array, view: View, memory: Array) -> tuple[Array, Array]:
    """The initial model x_0, for ever: a node that never trains. Knows nothing else."""
    return memory, memory


def _two_means(start: Start) -> Array:
    return jnp.repeat(start.own[:1, None], start.byzantine, axis=0).repeat(2, axis=1)  # [f, 2, d]


@attacks.register(init=_two_means)
def time_coupled(
    key: Array,
    view: View,
    memory: Array,
    z: Annotated[float | str, Number(words=("auto",))] = "auto",
) -> tuple[Array, Array]:
    """Holds the network back along its own path: mu - z sigma s, s the sign of mu's last move.

    After the idea of time-coupled attacks (Karimireddy, He and Jaggi 2021): small against the spread of one
    round, but in the same direction for many rounds, so that the errors add up. Remembers mu of the last two
    rounds. z is ALIE's. Knows its neighbours' messages, and n and f of the whole network.
    """
    seen = seen_by_attackers(view)
    mean = seen.centre + seen.mean
    z = alie_z(view.benign, view.byzantine) if isinstance(z, str) else z
    moved = jnp.sign(memory[:, 1] - memory[:, 0])
    return mean - z * sigma(seen) * moved, jnp.stack([memory[:, 1], mean], axis=1)
