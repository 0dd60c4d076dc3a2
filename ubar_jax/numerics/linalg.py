"""Distances, means and ranks of models, [n, d] or [m, d].

Where the network has few edges, means and distances are computed edge by edge, one receiver at a time, and
otherwise as products of matrices over all pairs of nodes.

Products run at the highest precision: the default on GPUs (TF32) is too coarse for distances and models.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.numerics import nn
from ubar_jax.types import Graph, Inbox

HIGHEST = lax.Precision.HIGHEST
BIG = jnp.finfo(jnp.float32).max  # padding; infinity would give 0 * inf = NaN
LANES = 64  # sums that run side by side
FUSED = 32  # messages that are added in one pass, at most

# Messages per slot from which going over the edges is faster, measured on a CPU.
MEANS, DISTANCES, GRAMS = 5, 12, 3  # the last per pair of slots


def few_edges(inbox: Inbox, least: int) -> bool:
    """Whether there are at least `least` messages per slot."""
    return len(inbox.sent) >= least * inbox.rows.shape[1]


def drop_bad(inbox: Inbox) -> Inbox:
    """Drop messages that are non-finite or whose squared norm overflows float32.

    Their slots are masked out and their rows set to zero: 0 * NaN would spoil a weighted sum.
    """
    good = usable(inbox.sent)
    sent = jnp.where(good[:, None], inbox.sent, 0)
    mask = inbox.graph.mask & good[inbox.rows]
    weights = jnp.where(mask, inbox.weights, 0)
    return inbox._replace(sent=sent, graph=inbox.graph._replace(mask=mask), weights=weights)


def usable(x: Array) -> Array:
    """[n] whether the row is finite and its squared norm fits float32.

    All are if the squares of no column sum to more than BIG / d, which is faster to find out.
    """
    small = jnp.all(jnp.sum(jnp.square(x), axis=0) <= BIG / x.shape[1])
    every = functools.partial(jnp.ones, len(x), bool)
    return lax.cond(small, every, lambda: jnp.isfinite(_squares(x)))


def own_distances(inbox: Inbox) -> Array:
    """[r, K] squared distance from own model to the message in each slot, +inf for empty slots."""

    def over_edges():
        return nn.each(lambda own, rows: _squares(inbox.sent[rows] - own[None]), inbox.own, inbox.rows)

    def over_pairs():
        def products(own, sent):
            return _squares(own), _squares(sent), jnp.matmul(own, sent.T, precision=HIGHEST)

        of_own, of_sent, gram = _centred(products, inbox)
        squares = of_own[:, None] + of_sent[None, :] - 2 * gram
        return jnp.take_along_axis(squares, inbox.rows, axis=1)

    distances = over_edges() if few_edges(inbox, DISTANCES) else over_pairs()
    return jnp.where(inbox.graph.mask & ~jnp.isnan(distances), jnp.maximum(distances, 0), jnp.inf)


def slot_grams(inbox: Inbox) -> Array:
    """[r, K, K] inner products of the messages in each pair of slots, centred at the receivers' mean.

    Exactly symmetric. Unless there are few edges, read from one [m, m] matrix that all receivers share.
    """

    def symmetric(gram):
        return (gram + gram.T) / 2

    if few_edges(inbox, GRAMS * inbox.rows.shape[1]):
        centre = centre_of(inbox.own)

        def one(rows):
            messages = inbox.sent[rows] - centre
            return symmetric(jnp.matmul(messages, messages.T, precision=HIGHEST))

        return nn.each(one, inbox.rows)
    gram = symmetric(_centred(lambda own, sent: jnp.matmul(sent, sent.T, precision=HIGHEST), inbox))
    return gram[inbox.rows[:, :, None], inbox.rows[:, None, :]]


def slot_distances(inbox: Inbox) -> Array:
    """[r, K, K] squared distances between the messages in each pair of slots, exactly symmetric.

    +inf on the diagonal and for empty slots.
    """
    grams = slot_grams(inbox)
    norms = jnp.diagonal(grams, axis1=1, axis2=2)
    squares = norms[:, :, None] + norms[:, None, :] - 2 * grams
    real = inbox.graph.mask[:, :, None] & inbox.graph.mask[:, None, :] & ~jnp.isnan(squares)
    real &= ~jnp.eye(real.shape[1], dtype=bool)[None]
    return jnp.where(real, jnp.maximum(squares, 0), jnp.inf)


def all_distances(inbox: Inbox) -> Array:
    """[r, K + 1, K + 1] squared distances between the messages in each pair of slots; the last is own model.

    0 on the diagonal and for empty slots, at most BIG / 4.
    """

    def over_edges():
        return slot_distances(inbox), own_distances(inbox)

    def over_pairs():
        def products(own, sent):
            between = jnp.matmul(sent, sent.T, precision=HIGHEST)
            return _squares(own), between, jnp.matmul(own, sent.T, precision=HIGHEST)

        of_own, gram, to_own = _centred(products, inbox)
        gram, norms = (gram + gram.T) / 2, jnp.diagonal(gram)
        between = norms[:, None] + norms[None, :] - 2 * gram
        to_own = jnp.take_along_axis(of_own[:, None] + norms[None, :] - 2 * to_own, inbox.rows, axis=1)
        return between[inbox.rows[:, :, None], inbox.rows[:, None, :]], to_own

    between, to_own = over_edges() if few_edges(inbox, GRAMS * inbox.rows.shape[1]) else over_pairs()
    own = jnp.concatenate([to_own, jnp.zeros_like(to_own[:, :1])], axis=1)
    squares = jnp.concatenate([between, to_own[:, None, :]], axis=1)
    squares = jnp.concatenate([squares, own[:, :, None]], axis=2)
    there = jnp.pad(inbox.graph.mask, ((0, 0), (0, 1)), constant_values=True)
    real = there[:, :, None] & there[:, None, :] & ~jnp.eye(there.shape[1], dtype=bool)[None]
    return jnp.where(real, jnp.clip(jnp.nan_to_num(squares, nan=BIG), 0, BIG / 4), 0)


def mean(inbox: Inbox, selected: Array) -> Array:
    """[r, d] mean of the messages in the selected slots ([r, K] bool); own model if none is selected."""
    counts = jnp.sum(selected, axis=1)
    mixed = weighted_mean(inbox, selected / jnp.maximum(counts, 1)[:, None])
    return jnp.where((counts > 0)[:, None], mixed, inbox.own)


def only(inbox: Inbox, selected: Array) -> Array:
    """[r, d] the message in the one selected slot ([r, K] bool)."""
    return inbox.sent[jnp.sum(jnp.where(selected, inbox.rows, 0), axis=1)]


def weighted_mean(inbox: Inbox, weights: Array) -> Array:
    """[r, d] sum of messages times weights [r, K], computed as weights [r, m] @ messages [m, d].

    With few edges: one receiver at a time, in groups of slots that XLA fuses into one pass each.
    """
    if few_edges(inbox, MEANS):
        slots = inbox.rows.shape[1]
        size = max(k for k in range(1, FUSED + 1) if slots % k == 0)

        def add(total, group):
            for weight, row in zip(*group, strict=True):
                total += weight * inbox.sent[row]
            return total, None

        def one(weights, rows):
            groups = (weights.reshape(-1, size), rows.reshape(-1, size))
            return lax.scan(add, jnp.zeros_like(inbox.sent[0]), groups)[0]

        return nn.each(one, jnp.where(inbox.graph.mask, weights, 0), inbox.rows)
    receivers = jnp.arange(len(weights))[:, None]
    of_messages = jnp.zeros((len(weights), len(inbox.sent))).at[receivers, inbox.rows]
    weights = of_messages.add(jnp.where(inbox.graph.mask, weights, 0))
    return jnp.matmul(weights, inbox.sent, precision=HIGHEST)  # on every device: to gather it costs more


def towards(inbox: Inbox, weights: Array) -> Array:
    """[r, d] own model + sum of weights [r, K] times (message - own model)."""
    rest = 1 - jnp.sum(jnp.where(inbox.graph.mask, weights, 0), axis=1, keepdims=True)
    return weighted_mean(inbox, weights) + rest * inbox.own


def mean_with_own(inbox: Inbox, selected: Array) -> Array:
    """[r, d] mean of own model and the messages in the selected slots ([r, K] bool)."""
    return towards(inbox, selected / (jnp.sum(selected, axis=1, keepdims=True) + 1))


def with_own(inbox: Inbox) -> Inbox:
    """The inbox with one more slot at the end, which holds the receiver's own model."""
    rows = len(inbox.sent) + jnp.arange(len(inbox.own), dtype=inbox.rows.dtype)
    ones = jnp.ones((len(inbox.own), 1), bool)
    return inbox._replace(
        sent=jnp.concatenate([inbox.sent, inbox.own]),
        rows=jnp.concatenate([inbox.rows, rows[:, None]], axis=1),
        graph=inbox.graph._replace(mask=jnp.concatenate([inbox.graph.mask, ones], axis=1)),
        weights=jnp.concatenate([inbox.weights, own_weight(inbox)], axis=1),
        benign=jnp.concatenate([inbox.benign, ones], axis=1),
    )


def metropolis(graph: Graph, receivers: int) -> Array:
    """[r, K] Metropolis weights 1 / (1 + max(|N_i|, |N_j|)) of the first r nodes' slots, 0 in empty slots."""
    degree = jnp.sum(graph.mask, axis=1)
    ids, mask = (a[:receivers] for a in graph)
    return mask / (1 + jnp.maximum(degree[:receivers, None], degree[ids]))


def own_weight(inbox: Inbox) -> Array:
    """[r, 1] Metropolis weight of the receiver's own model: 1 minus the weights of its neighbours."""
    return 1 - jnp.sum(inbox.weights, axis=1, keepdims=True)


def undefended(inbox: Inbox, weights: Array, total: Array) -> Array:
    """[r, d] sum of weights [r, K] times messages over total [r, 1], unchecked.

    A NaN affects only the receivers of that message.
    """

    def slot_by_slot():
        def add(k, found):
            heard = inbox.graph.mask[:, k, None]
            return found + jnp.where(heard, weights[:, k, None] * inbox.sent[inbox.rows[:, k]], 0)

        return lax.fori_loop(0, inbox.rows.shape[1], add, jnp.zeros_like(inbox.own)) / total

    finite = jnp.all(jnp.isfinite(jnp.sum(inbox.sent, axis=0)))  # column by column, which is fast
    return lax.cond(finite, lambda: weighted_mean(inbox, weights / total), slot_by_slot)


def ranks(values: Array) -> Array:
    """[r, K] rank of each value in its row, 0 for the smallest; of equal values the first ranks lower."""
    return jnp.argsort(jnp.argsort(values, axis=1, stable=True), axis=1)


def argmax(values: Array) -> Array:
    """[n] index of the maximum of each row [d] without NaN; jnp.argmax is slow for long rows on the CPU.

    Finds the first window that contains the maximum, then the position within it.
    """
    size = min(values.shape[1], 64)
    pad = -values.shape[1] % size
    tops = lax.reduce_window(values, -jnp.inf, lax.max, (1, size), (1, size), ((0, 0), (0, pad)))
    start = jnp.minimum(jnp.argmax(tops, axis=1) * size, values.shape[1] - size)
    window = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, size))(values, start)
    return start + jnp.argmax(window, axis=1)


def _centred(products: Callable, inbox: Inbox):
    """products(own, sent) of rows centred at the receivers' mean; products must be sums over coordinates.

    Near consensus the centred norms are as small as the distances, so no digits cancel. On the CPU it runs
    over blocks of coordinates that fit the cache, which avoids writing whole centred matrices to memory.
    """
    usual = _usual(inbox.own)

    def block(own, sent):
        centre = _mean_of(usual, own)
        return products(own - centre, sent - centre)

    def by_blocks(own, sent):
        d = own.shape[1]
        size = min(d, max(1024, 2**18 // len(sent)))
        rest = d // size * size

        def part(k):
            return block(*(lax.dynamic_slice_in_dim(a, k * size, size, axis=1) for a in (own, sent)))

        return nn.split_sum(part, d // size, block(own[:, rest:], sent[:, rest:]))

    return lax.platform_dependent(inbox.own, inbox.sent, cpu=by_blocks, default=block)


def centre_of(x: Array) -> Array:
    """[1, d] mean of the rows, excluding outliers (see `_usual`)."""
    return _mean_of(_usual(x), x)


def _usual(x: Array) -> Array:
    """[n] whether the norm is at most twice the median norm; one row of norm 1e9 would dominate the mean."""
    squares = _rough_squares(x)
    finite = jnp.isfinite(squares)
    median = jnp.sort(jnp.where(finite, squares, jnp.inf))[(len(x) - 1) // 2]
    return finite & (squares <= 4 * median)


def _mean_of(chosen: Array, x: Array) -> Array:
    """[1, d] mean of the chosen rows, 0 if there are none."""
    total = jnp.sum(jnp.where(chosen[:, None], x, 0), axis=0, keepdims=True)
    return total / jnp.maximum(jnp.sum(chosen), 1)


def _squares(x: Array) -> Array:
    """[n] squared norms; on the CPU faster and more accurate than inner products of the rows."""
    return jnp.sum(jnp.square(x), axis=1)


def _rough_squares(x: Array) -> Array:
    """`_squares` up to rounding, faster on the CPU: the sums of many coordinates run side by side."""

    def one(row):
        lanes = len(row) // LANES * LANES
        sums = jnp.sum(jnp.square(row[:lanes].reshape(-1, LANES)), axis=0)
        return jnp.sum(sums) + jnp.sum(jnp.square(row[lanes:]))

    return lax.platform_dependent(x, cpu=lambda x: lax.map(one, x), default=_squares)
