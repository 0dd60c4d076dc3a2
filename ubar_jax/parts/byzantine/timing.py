"""Attacks that depend on the round or on a path in the graph."""

import math
from typing import Annotated, Any

import jax.numpy as jnp
import networkx as nx
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.parts.byzantine.base import attacks, check_range, first_memory, messages_of, tailored_since
from ubar_jax.registry import ConfigError, Number
from ubar_jax.types import Start, View


def _sleeper_setup(network, benign, byzantine, rounds, rule, attack: str, start: int):
    inner = attacks.parse(attack)
    if inner.part.name in ("none", "sleeper"):
        raise ConfigError(f"sleeper cannot wake up as {attack!r}; name another attack, as in sleeper(alie)")
    check_range(inner, dict(inner.arguments))
    numbers: dict[str, float] = {}
    notices: list[str] = []
    if setup := inner.traits.setup:
        numbers, notices = setup(network, benign, byzantine, rounds, rule, **inner.of(setup))
    if start >= rounds:
        notices = [*notices, f"sleeper(start={start}) never wakes: the run ends after {rounds} rounds"]
    return numbers, notices


def _sleeper_tailored(attack: str, start: int) -> int | None:
    return None if tailored_since(attacks.parse(attack)) is None else start


def _sleeper_poison(labels: Array, classes: int, t: Array, attack: str, start: int) -> Array:
    inner = attacks.parse(attack)
    if (poison := inner.traits.poison) is None:
        return labels
    return jnp.where(t >= start, poison(labels, classes, t, **inner.of(poison)), labels)


def _sleeper_init(start_of_run: Start, attack: str) -> Any:
    return first_memory(attacks.parse(attack), start_of_run)


@attacks.register(
    trains=True,
    setup=_sleeper_setup,
    tailored=_sleeper_tailored,
    poison=_sleeper_poison,
    init=_sleeper_init,
)
def sleeper(
    key: Array,
    view: View,
    memory: Any,
    attack: str = "alie",
    start: Annotated[int, Number(0, integer=True)] = 100,
    **numbers: Array,
) -> tuple[Array, Any]:
    """Honest until round `start`, then another attack, as in sleeper(alie, start=50).

    Knows its own model before `start`, then what the other attack knows.
    """
    inner, honest = attacks.parse(attack), view.own[view.benign :]
    awake, memory = messages_of(inner, key, view, memory, **numbers)
    if tailored_since(inner) is not None:
        return jnp.concatenate([honest, awake]), memory  # broadcast rows, then one row per receiver
    return jnp.where(view.t >= start, awake, honest), memory


def _theorem1_setup(network, benign, byzantine, rounds, rule, target: int, size: float, start: int):
    if target >= benign:
        raise ConfigError(f"theorem1(target={target}): there are only the benign nodes 0 to {benign - 1}")
    if not nx.has_path(network, benign, target):
        raise ConfigError(f"theorem1(target={target}): there is no path from the Byzantine node {benign}")
    path = nx.shortest_path(network, benign, target)[1:]
    gain = math.prod(network.degree(v) + 1 for v in path)
    if abs(size) * gain > float(linalg.BIG):
        raise ConfigError(
            f"theorem1(target={target}, size={size:g}) would have to send {gain:g} times its size, too large "
            f"for float32; take a smaller size or a target that is less than {len(path)} steps away"
        )
    never = f"theorem1(start={start}) never strikes: the run ends after {rounds} rounds"
    return {"gain": float(gain)}, [never] if start >= rounds else []


@attacks.register(trains=True, setup=_theorem1_setup)
def theorem1(
    key: Array,
    view: View,
    target: Annotated[int, Number(0, integer=True)] = 0,
    size: Annotated[float, Number()] = 1.0,
    start: Annotated[int, Number(0, integer=True)] = 0,
    *,
    gain: Array,
) -> Array:
    """The paper's Theorem 1: the first Byzantine node moves a target by `size` in every coordinate.

    Once, in round `start`, it adds size times the product of |N_s| + 1 along the shortest path to the
    target. In other rounds it is honest; the other Byzantine nodes always are. Knows the graph and its own
    model.
    """
    honest = view.own[view.benign :]
    shift = jnp.where(view.t == start, size * gain, 0)
    return honest.at[0].add(shift)
