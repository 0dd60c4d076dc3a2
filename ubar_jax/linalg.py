"""Everything that touches a matrix of models, [n, d] or [m, d].

Products run at the highest precision: a GPU's default (TF32) ruins distances and rounds models.
"""

import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.types import Inbox

HIGHEST = lax.Precision.HIGHEST


def drop_bad(inbox: Inbox) -> Inbox:
    """Without the messages that are non-finite or whose squared norm overflows float32.

    Their slots are masked off and their rows zeroed: 0 * NaN would poison a weighted sum.
    """
    good = jnp.isfinite(jnp.sum(jnp.square(inbox.sent), axis=1))
    sent = jnp.where(good[:, None], inbox.sent, 0)
    mask = inbox.graph.mask & good[inbox.rows]
    return inbox._replace(sent=sent, graph=inbox.graph._replace(mask=mask))


def own_distances(inbox: Inbox) -> Array:
    """[r, K] squared distances from own model to the message in every slot, +inf in empty ones.

    One matrix product, on rows centred at the receivers' mean: near consensus the norms are then as
    small as the distances, and no digits are lost.
    """
    centre = _centre(inbox)
    own, sent = inbox.own - centre, inbox.sent - centre
    gram = jnp.matmul(own, sent.T, precision=HIGHEST)
    squares = _squares(own)[:, None] + _squares(sent)[None, :] - 2 * gram
    return _in_slots(inbox, squares)


def mean(inbox: Inbox, selected: Array) -> Array:
    """[r, d] mean of the selected slots' messages ([r, K] bool), own model where there is none."""
    counts = jnp.sum(selected, axis=1)
    weights = slot_weights(inbox, selected / jnp.maximum(counts, 1)[:, None])
    mixed = jnp.matmul(weights, inbox.sent, precision=HIGHEST)
    return jnp.where((counts > 0)[:, None], mixed, inbox.own)


def slot_weights(inbox: Inbox, weights: Array) -> Array:
    """[r, K] weights of slots -> [r, m] weights of messages."""
    receivers = jnp.arange(len(weights))[:, None]
    return (
        jnp.zeros((len(weights), len(inbox.sent)))
        .at[receivers, inbox.rows]
        .add(jnp.where(inbox.graph.mask, weights, 0))
    )


def undefended_mean(inbox: Inbox) -> Array:
    """[r, d] mean of all slots' messages, whatever they hold; only those who hear a NaN get it."""

    def slot_by_slot():
        def add(k, total):
            heard = inbox.graph.mask[:, k, None]
            return total + jnp.where(heard, inbox.sent[inbox.rows[:, k]], 0)

        total = lax.fori_loop(0, inbox.rows.shape[1], add, jnp.zeros_like(inbox.own))
        return total / jnp.sum(inbox.graph.mask, axis=1)[:, None]

    finite = jnp.all(jnp.isfinite(inbox.sent))
    return lax.cond(finite, lambda: mean(inbox, inbox.graph.mask), slot_by_slot)


def ranks(values: Array) -> Array:
    """[r, K] rank of each value in its row, 0 the smallest; the first of equal values is smaller."""
    return jnp.argsort(jnp.argsort(values, axis=1, stable=True), axis=1)


def _centre(inbox: Inbox) -> Array:
    """[1, d] mean of the receivers' finite models (outliers among the messages must not move it)."""
    finite = jnp.isfinite(jnp.sum(jnp.square(inbox.own), axis=1))
    total = jnp.sum(jnp.where(finite[:, None], inbox.own, 0), axis=0, keepdims=True)
    return total / jnp.maximum(jnp.sum(finite), 1)


def _squares(x: Array) -> Array:
    return jnp.sum(jnp.square(x), axis=1)


def _in_slots(inbox: Inbox, matrix: Array) -> Array:
    """[r, m] -> [r, K]: the entry of every slot's message; NaN and empty slots become +inf."""
    slots = jnp.take_along_axis(matrix, inbox.rows, axis=1)
    return jnp.where(inbox.graph.mask & ~jnp.isnan(slots), jnp.maximum(slots, 0), jnp.inf)
