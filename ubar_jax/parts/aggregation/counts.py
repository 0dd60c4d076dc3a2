"""Assumed numbers of benign or Byzantine neighbours: integers per node, computed once on the host."""

from collections.abc import Callable
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ubar_jax.registry import Number, Spec
from ubar_jax.types import Graph, Inbox

Rho = Annotated[float | str, Number(0, 1, open_low=True, words=("conservative", "oracle"))]


Share = Annotated[float | str | None, Number(0, 1, open_high=True, words=("oracle", None))]


GUARD = 1e-9  # against rounding before floor and ceil: 0.29 * 100, 10 * (1 - 0.7)


def benign_share(degree: np.ndarray, byzantine: np.ndarray, rho: float | str) -> np.ndarray | float:
    """rho_i: a number, "oracle" (each node's true share) or "conservative" (one benign neighbour)."""
    words: dict[Any, Any] = {"conservative": 1 / degree, "oracle": 1 - byzantine / degree}
    return words.get(rho, rho)


def benign_neighbours(degree: np.ndarray, byzantine: np.ndarray, rho: Rho = 0.4) -> np.ndarray:
    """[r] number of neighbours that UBAR keeps: max(1, floor(rho_i |N_i|)).

    degree [r]; byzantine [r], the true number of Byzantine neighbours.
    """
    kept = np.floor(benign_share(degree, byzantine, rho) * degree + GUARD)
    return np.maximum(1, kept).astype(np.int32)


def tolerated(largest: float) -> Callable:
    """n_hat = ceil(|N_i| min(1 - rho_i, largest)), or from `byzantine`: a share or "oracle" (true count)."""

    def n_hat(degree, known, rho: Rho = 0.4, byzantine: Share = None):
        if byzantine == "oracle":
            return known.astype(np.int32)
        share = np.minimum(1 - benign_share(degree, known, rho), largest) if byzantine is None else byzantine
        return np.ceil(degree * share - GUARD).astype(np.int32)

    return n_hat


def krum_limit(values):
    """The largest n_hat for which Krum is defined: 2 n_hat + 3 <= values."""
    return (values - 3) // 2


def bulyan_limit(values):
    """The largest n_hat for which Bulyan is defined: 4 n_hat + 3 <= values."""
    return (values - 3) // 4


def trim_limit(values):
    """The largest n_hat that leaves a value after trimming both ends: 2 n_hat + 1 <= values."""
    return (values - 1) // 2


def no_limit(values):
    """All messages may be taken for Byzantine."""
    return values


def count_neighbours(
    rule: Spec, graph: Graph, receivers: int, benign: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([r] degree, [r] true number of Byzantine neighbours, [r] the rule's count), computed on the host."""
    ids, mask = (np.asarray(a)[:receivers] for a in graph)
    degree, byzantine = mask.sum(1), (mask & (ids >= benign)).sum(1)
    counting = rule.traits.count
    count = np.zeros_like(degree) if counting is None else counting(degree, byzantine, **rule.of(counting))
    return degree, byzantine, count.astype(np.int32)


def clipped(inbox: Inbox, limit: Callable) -> Array:
    """[r] the count, clipped to [0, limit] for the number of messages left."""
    left = jnp.sum(inbox.graph.mask, axis=1)
    return jnp.clip(inbox.count, 0, jnp.maximum(limit(left), 0))
