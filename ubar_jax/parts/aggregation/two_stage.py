"""UBAR (distance stage, then loss stage) and each stage alone."""

import jax.numpy as jnp
from jax import Array

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.parts.aggregation.counts import benign_neighbours
from ubar_jax.types import Inbox


@rules.register(count=benign_neighbours, pairs=lambda degree, count: count)
def ubar(inbox: Inbox):
    """UBAR: mean of those of the rho |N_i| closest neighbours whose loss is at most own loss."""
    near = closest(inbox)
    good = no_worse(inbox, near)
    return linalg.mean(inbox, good), {"candidates": near, "selected": good}


@rules.register(count=benign_neighbours)
def ubar_distance(inbox: Inbox):
    """Ablation of UBAR: only its distance stage."""
    near = closest(inbox)
    return linalg.mean(inbox, near), {"candidates": near, "selected": near}


@rules.register(pairs=lambda degree, count: degree)
def ubar_loss(inbox: Inbox):
    """Ablation of UBAR: only its loss stage, over all neighbours."""
    good = no_worse(inbox, inbox.graph.mask)
    return linalg.mean(inbox, good), {"selected": good}


@rules.register(pairs=lambda degree, count: degree)
def ubar_swapped(inbox: Inbox):
    """Ablation of UBAR, its stages swapped: of the neighbours that pass the loss stage, the closer half."""
    good = no_worse(inbox, inbox.graph.mask)
    order = linalg.ranks(jnp.where(good, linalg.own_distances(inbox), jnp.inf))
    near = good & (order < (jnp.sum(good, axis=1, keepdims=True) + 1) // 2)
    return linalg.mean(inbox, near), {"candidates": good, "selected": near}


def closest(inbox: Inbox) -> Array:
    """[r, K] the `count` neighbours closest to own model (UBAR, stage 1)."""
    near = linalg.ranks(linalg.own_distances(inbox)) < inbox.count[:, None]
    return near & inbox.graph.mask


def no_worse(inbox: Inbox, candidates: Array) -> Array:
    """[r, K] candidates whose loss is at most own loss; if there are none, the best one (UBAR, stage 2)."""
    losses = losses_of(inbox, candidates)
    good = candidates & (losses <= inbox.own_loss[:, None]) & jnp.isfinite(losses)
    best = (linalg.ranks(losses) == 0) & jnp.isfinite(losses)
    return jnp.where(jnp.any(good, axis=1)[:, None], good, best)


def losses_of(inbox: Inbox, candidates: Array) -> Array:
    """[r, K] loss of the candidates' messages on the receiver's batch, +inf in other slots.

    Only candidates are evaluated, as one flat list of `inbox.pairs` (receiver, slot) pairs with padding.
    """
    outside = candidates.shape  # padding index: out of bounds, so reads are clamped and writes dropped
    receiver, slot = jnp.nonzero(candidates, size=inbox.pairs, fill_value=outside)
    losses = inbox.loss_of(receiver, inbox.rows[receiver, slot])
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    return jnp.full(outside, jnp.inf).at[receiver, slot].set(losses)
