"""Everything that touches a matrix of models, [n, d] or [m, d].

Products run at the highest precision: a GPU's default (TF32) ruins distances and rounds models.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.types import Inbox

HIGHEST = lax.Precision.HIGHEST


BIG = jnp.finfo(jnp.float32).max  # padding; infinity would give 0 * inf


def drop_bad(inbox: Inbox) -> Inbox:
    """Without the messages that are non-finite or whose squared norm overflows float32.

    Their slots are masked off and their rows zeroed: 0 * NaN would poison a weighted sum.
    """
    good = usable(inbox.sent)
    sent = jnp.where(good[:, None], inbox.sent, 0)
    mask = inbox.graph.mask & good[inbox.rows]
    return inbox._replace(sent=sent, graph=inbox.graph._replace(mask=mask))


def usable(x: Array) -> Array:
    """[n] which rows are finite and have a squared norm in the range of float32."""
    return jnp.isfinite(_squares(x))


def own_distances(inbox: Inbox) -> Array:
    """[r, K] squared distances from own model to the message in every slot, +inf in empty ones."""

    def products(own, sent):
        return _squares(own), _squares(sent), jnp.matmul(own, sent.T, precision=HIGHEST)

    of_own, of_sent, gram = _centred(products, inbox)
    squares = of_own[:, None] + of_sent[None, :] - 2 * gram
    distances = jnp.take_along_axis(squares, inbox.rows, axis=1)
    return jnp.where(inbox.graph.mask & ~jnp.isnan(distances), jnp.maximum(distances, 0), jnp.inf)


def slot_grams(inbox: Inbox) -> Array:
    """[r, K, K] inner products of the messages in every two slots, about the receivers' mean.

    One [m, m] matrix for the whole network, exactly symmetric, shared by all receivers.
    """
    gram = _centred(lambda own, sent: jnp.matmul(sent, sent.T, precision=HIGHEST), inbox)
    gram = (gram + gram.T) / 2
    return gram[inbox.rows[:, :, None], inbox.rows[:, None, :]]


def slot_distances(inbox: Inbox) -> Array:
    """[r, K, K] squared distances between the messages in every two slots, exactly symmetric.

    +inf from a slot to itself and to and from empty ones.
    """
    grams = slot_grams(inbox)
    norms = jnp.diagonal(grams, axis1=1, axis2=2)
    squares = norms[:, :, None] + norms[:, None, :] - 2 * grams
    real = inbox.graph.mask[:, :, None] & inbox.graph.mask[:, None, :] & ~jnp.isnan(squares)
    real &= ~jnp.eye(real.shape[1], dtype=bool)[None]
    return jnp.where(real, jnp.maximum(squares, 0), jnp.inf)


def mean(inbox: Inbox, selected: Array) -> Array:
    """[r, d] mean of the selected slots' messages ([r, K] bool), own model where there is none."""
    counts = jnp.sum(selected, axis=1)
    mixed = weighted_mean(inbox, selected / jnp.maximum(counts, 1)[:, None])
    return jnp.where((counts > 0)[:, None], mixed, inbox.own)


def only(inbox: Inbox, selected: Array) -> Array:
    """[r, d] the message in the one selected slot ([r, K] bool)."""
    return inbox.sent[jnp.sum(jnp.where(selected, inbox.rows, 0), axis=1)]


def weighted_mean(inbox: Inbox, weights: Array) -> Array:
    """[r, d] sum of weights [r, K] times messages, as weights [r, m] of all messages times messages."""
    receivers = jnp.arange(len(weights))[:, None]
    of_messages = jnp.zeros((len(weights), len(inbox.sent))).at[receivers, inbox.rows]
    weights = of_messages.add(jnp.where(inbox.graph.mask, weights, 0))
    return jnp.matmul(weights, inbox.sent, precision=HIGHEST)


def with_own(inbox: Inbox) -> Inbox:
    """The inbox with one more slot, the last, in which every receiver finds its own model."""
    rows = len(inbox.sent) + jnp.arange(len(inbox.own), dtype=inbox.rows.dtype)
    ones = jnp.ones((len(inbox.own), 1), bool)
    return inbox._replace(
        sent=jnp.concatenate([inbox.sent, inbox.own]),
        rows=jnp.concatenate([inbox.rows, rows[:, None]], axis=1),
        graph=inbox.graph._replace(mask=jnp.concatenate([inbox.graph.mask, ones], axis=1)),
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


def argmax(values: Array) -> Array:
    """[n] where each row of [n, d], without NaN, is largest; jnp.argmax is slow over long rows on the CPU.

    The first window that holds the largest value, then the place in it.
    """
    size = min(values.shape[1], 64)
    pad = -values.shape[1] % size
    tops = lax.reduce_window(values, -jnp.inf, lax.max, (1, size), (1, size), ((0, 0), (0, pad)))
    start = jnp.minimum(jnp.argmax(tops, axis=1) * size, values.shape[1] - size)
    window = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, size))(values, start)
    return start + jnp.argmax(window, axis=1)


def _centred(products: Callable, inbox: Inbox):
    """products(own, sent), sums over coordinates, of rows centred at the receivers' mean.

    Near consensus the norms are then as small as the distances, and no digits are lost. On the CPU by
    blocks of coordinates that stay in the cache: whole centred matrices would be written and read back.
    """
    usual = _usual(inbox.own)

    def block(own, sent):
        centre = _mean_of(usual, own)
        return products(own - centre, sent - centre)

    def by_blocks(own, sent):
        d = own.shape[1]
        size = min(d, max(1024, 2**18 // len(sent)))

        def add(k, total):
            part = block(*(lax.dynamic_slice_in_dim(a, k * size, size, axis=1) for a in (own, sent)))
            return jax.tree.map(jnp.add, total, part)

        rest = d // size * size
        return lax.fori_loop(0, d // size, add, block(own[:, rest:], sent[:, rest:]))

    return lax.platform_dependent(inbox.own, inbox.sent, cpu=by_blocks, default=block)


def centre_of(x: Array) -> Array:
    """[1, d] mean of the rows, without those that are far off."""
    return _mean_of(_usual(x), x)


def _usual(x: Array) -> Array:
    """[n] which rows are at most twice as long as the median one: a single one at 1e9 would be the mean."""
    squares = _squares(x)
    finite = jnp.isfinite(squares)
    median = jnp.sort(jnp.where(finite, squares, jnp.inf))[(len(x) - 1) // 2]
    return finite & (squares <= 4 * median)


def _mean_of(chosen: Array, x: Array) -> Array:
    """[1, d] mean of the chosen rows, 0 of none."""
    total = jnp.sum(jnp.where(chosen[:, None], x, 0), axis=0, keepdims=True)
    return total / jnp.maximum(jnp.sum(chosen), 1)


def _squares(x: Array) -> Array:
    """[n] squared norms: on the CPU faster, and with more digits, than products of rows with themselves."""
    return jnp.sum(jnp.square(x), axis=1)
