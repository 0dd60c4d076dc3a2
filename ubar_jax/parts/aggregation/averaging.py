"""Means without a defence, and the baselines that bound every defence: no exchange, and perfect knowledge."""

import jax.numpy as jnp

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.types import Inbox


@rules.register(alpha=lambda degree: 1 / (degree + 1), defends=False)
def average(inbox: Inbox):
    """Undefended mean of the neighbours; alpha 1 / (|N_i| + 1) makes the update the mean of N_i and i."""
    mask = inbox.graph.mask
    heard = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return linalg.undefended(inbox, mask.astype(jnp.float32), heard), {"selected": mask}


@rules.register(alpha=lambda degree: 0.0, defends=False)
def gossip(inbox: Inbox):
    """Undefended mean of N_i and i with Metropolis weights (decentralised SGD, Lian et al. 2017).

    Knows the degrees of its neighbours. Cost |N_i| d.
    """
    heard = linalg.undefended(inbox, inbox.weights, jnp.ones((1, 1)))
    return heard + linalg.own_weight(inbox) * inbox.own, {"selected": inbox.graph.mask}


@rules.register(alpha=lambda degree: 1.0)
def local(inbox: Inbox):
    """No exchange: every node trains alone. The floor: a rule below it does harm. Cost 0."""
    return inbox.own, {"selected": jnp.zeros_like(inbox.graph.mask)}


@rules.register(alpha=lambda degree: 0.0)
def oracle(inbox: Inbox):
    """Mean of own model and the truly benign neighbours: the ceiling. Knows who is benign. Cost |N_i| d."""
    chosen = inbox.graph.mask & inbox.benign
    return linalg.mean_with_own(inbox, chosen), {"selected": chosen}
