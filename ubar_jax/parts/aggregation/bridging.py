"""BRIDGE in its four variants and two conventions."""

from functools import partial
from typing import Annotated

import jax.numpy as jnp
import numpy as np

from ubar_jax.numerics import linalg, order_statistics
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.parts.aggregation.counts import (
    Rho,
    Share,
    bulyan_limit,
    clipped,
    krum_limit,
    tolerated,
    trim_limit,
)
from ubar_jax.parts.aggregation.krum import krum_order, recursive_krum
from ubar_jax.registry import Choice
from ubar_jax.types import Inbox

Variant = Annotated[str, Choice(("T", "M", "K", "B"))]


BRIDGE_LIMITS = {"T": trim_limit, "M": trim_limit, "K": krum_limit, "B": bulyan_limit}


def bridge_tolerated(degree, known, variant: Variant = "T", rho: Rho = 0.4, byzantine: Share = None):
    """n_hat of a BRIDGE variant; 0 for the median, which needs none."""
    if variant == "M":
        return np.zeros_like(degree)
    return tolerated(1 / 4 if variant == "B" else 1 / 2)(degree, known, rho, byzantine)


def bridge_limit(values, variant: str, original: bool):
    """The limit of a variant; the original M, K and B use one more value, x_i."""
    return BRIDGE_LIMITS[variant](values + (original and variant != "T"))


@rules.register(
    count=bridge_tolerated,
    limit=bridge_limit,
    alpha=lambda degree, original: 0.0 if original else 0.5,
    selects=lambda variant: variant in "KB",
)
def bridge(inbox: Inbox, variant: Variant = "T", original: Annotated[bool, Choice((False, True))] = False):
    """BRIDGE-T(rimmed mean), -M(edian), -K(rum), -B(ulyan-like): recursive Krum, then trimmed mean.

    Over N_i with alpha 0.5, as in this paper; with original=True over N_i and i with alpha 0. The original
    BRIDGE-T trims N_i and always keeps x_i, as its text says; its public code may also trim x_i. In a tie
    x_i comes after all neighbours.
    """
    n_hat = clipped(inbox, partial(bridge_limit, variant=variant, original=original))
    slots = inbox.graph.mask.shape[1]
    if original and variant != "T":
        inbox = linalg.with_own(inbox)
    if variant == "T":
        mixed = order_statistics.trimmed_mean(inbox, inbox.graph.mask, n_hat)
        kept = (jnp.sum(inbox.graph.mask, axis=1) - 2 * n_hat)[:, None]
        return (mixed * kept + inbox.own) / (kept + 1) if original else mixed, {}
    if variant == "M":
        return order_statistics.coordinate_median(inbox, inbox.graph.mask), {}
    if variant == "K":
        best = (krum_order(inbox, n_hat) == 0) & inbox.graph.mask
        return linalg.only(inbox, best), {"selected": best[:, :slots]}
    picked = recursive_krum(inbox, n_hat)
    return order_statistics.trimmed_mean(inbox, picked, n_hat), {"selected": picked[:, :slots]}
