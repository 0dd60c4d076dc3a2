"""Attacks that look honest: copies of a benign node, and honest training on false labels."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from ubar_jax.parts.byzantine.base import attacks
from ubar_jax.registry import ConfigError, Number, Spec
from ubar_jax.types import View


def _check_node(network, benign: int, byzantine: int, rounds: int, rule: Spec, node: int):
    if node >= benign:
        raise ConfigError(f"mimic(node={node}): there are only the benign nodes 0 to {benign - 1}")
    return {}, []


@attacks.register(setup=_check_node)
def mimic(key: Array, view: View, node: Annotated[int, Number(0, integer=True)] = 0) -> Array:
    """All attackers copy one benign node, which thus gets too much weight. Knows that node's message."""
    return jnp.repeat(view.own[node][None], view.byzantine, axis=0)


@attacks.register(trains=True, poison=lambda labels, classes, t: classes - 1 - labels)
def label_flip(key: Array, view: View) -> Array:
    """Honest training on flipped labels: y becomes classes - 1 - y. Knows its own model."""
    return view.own[view.benign :]
