"""Everything that touches a matrix of models, [n, d] or [m, d].

Products run at the highest precision: a GPU's default (TF32) ruins distances and rounds models.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ubar_jax.types import Inbox

HIGHEST = lax.Precision.HIGHEST


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


# Order statistics per coordinate, over slots that are chosen by receiver, by Batcher's network. Up to
# FUSED_SLOTS the slots are sorted as K arrays, never stacked: XLA fuses gathers, network and statistic
# into one loop over coordinates that keeps everything in registers and materialises nothing. On the CPU it
# does so only if receivers come one at a time: a loop's body is compiled apart from what uses the result.
# That body grows with K log^2 K, and where all sorted values are used XLA soon repeats parts of the network,
# so denser graphs run the same network stage by stage on [K, d].

FUSED_SLOTS = 64  # for a median
FUSED_ALL = 40  # for what uses every sorted value
BIG = jnp.finfo(jnp.float32).max  # padding; infinity would give 0 * inf


def coordinate_median(inbox: Inbox, chosen: Array) -> Array:
    """[r, d] median of the chosen slots' messages ([r, K] bool), mean of the middle two if even."""
    return _per_receiver(_median, inbox, chosen)


def trimmed_mean(inbox: Inbox, chosen: Array, cut: Array) -> Array:
    """[r, d] mean of the chosen slots without the `cut` [r] largest and smallest per coordinate."""

    def one(sort, values, chosen, cut):
        values = [jnp.where(c, v, BIG) for v, c in zip(values, chosen, strict=True)]
        ordered = sort(values, FUSED_ALL)
        kept = jnp.sum(chosen) - 2 * cut
        total = sum(jnp.where((k >= cut) & (k < cut + kept), v, 0) for k, v in enumerate(ordered))
        return total / jnp.maximum(kept, 1)

    return _per_receiver(one, inbox, chosen, cut, fused=FUSED_ALL)


def mean_around_median(inbox: Inbox, chosen: Array, keep: Array) -> Array:
    """[r, d] mean of the `keep` [r] chosen values nearest to the chosen ones' median.

    Of two that are equally near, up to rounding, the smaller counts. In three passes, the median, how far
    the farthest of them is, and the mean: XLA repeats the network where sorted values are used again.
    """
    middle = coordinate_median(inbox, chosen)

    def farthest(sort, values, chosen, keep, middle):
        away = [jnp.where(c, jnp.abs(v - middle), BIG) for v, c in zip(values, chosen, strict=True)]
        return sum(jnp.where(k == keep - 1, v, 0) for k, v in enumerate(sort(away, FUSED_ALL)))

    reach = _per_receiver(farthest, inbox, chosen, keep, middle, fused=FUSED_ALL)

    def one(_, values, chosen, keep, middle, reach):
        total, nearer, below, low, high = (jnp.zeros_like(middle) for _ in range(5))
        rounding = 2 * jnp.finfo(jnp.float32).eps * (jnp.abs(middle) + reach)
        for v, c in zip(values, chosen, strict=True):
            away = jnp.where(c, jnp.abs(v - middle), BIG)
            inside = away < reach - rounding
            tie = ~inside & (away <= reach + rounding)
            total += jnp.where(inside, v, 0)
            nearer += inside
            below += tie & (v <= middle)
            low = jnp.where(tie & (v <= middle), v, low)
            high = jnp.where(tie & (v > middle), v, high)
        below = jnp.minimum(below, keep - nearer)
        return (total + below * low + (keep - nearer - below) * high) / jnp.maximum(keep, 1)

    return _per_receiver(one, inbox, chosen, keep, middle, reach)


def sum_of_smallest(values: list[Array], count: Array) -> Array:
    """The sum of the `count` smallest of the float32 arrays, elementwise."""

    def total(sort, count, *values):
        return sum(jnp.where(k < count, value, 0) for k, value in enumerate(sort(values)))

    on_cpu = jax.custom_batching.sequential_vmap(functools.partial(total, _sort_as_integers))
    default = functools.partial(total, sort_arrays)
    return lax.platform_dependent(count, *values, cpu=on_cpu, default=default)


def _median(sort: Callable, values: list[Array], chosen: Array) -> Array:
    """Half of the empty slots sort below all, half above, so that the middle has a fixed rank."""
    if len(values) % 2:
        values, chosen = [*values, values[0]], jnp.append(chosen, False)
    empty = jnp.cumsum(~chosen)
    fill = jnp.where(empty <= empty[-1] // 2, -BIG, BIG)
    ordered = sort([jnp.where(c, v, f) for v, c, f in zip(values, chosen, fill, strict=True)])
    low, high = ordered[len(values) // 2 - 1], ordered[len(values) // 2]
    return jnp.where(jnp.sum(chosen) % 2 == 1, low, (low + high) / 2)


def _per_receiver(statistic, inbox: Inbox, chosen: Array, *numbers: Array, fused: int = FUSED_SLOTS) -> Array:
    """statistic(sort, values: K arrays [d], chosen [K], numbers [] or [d]) of every receiver -> [r, d].

    On the CPU runs side by side come one at a time, too: LLVM takes minutes over a vmapped integer network.
    """

    def one(sort, sent, rows, chosen, *numbers):
        return statistic(sort, [sent[row] for row in rows], chosen, *numbers)

    def one_by_one(sort, sent, *arguments):
        return lax.map(lambda each: one(sort, sent, *each), arguments)

    def together(sent, *arguments):
        if inbox.rows.shape[1] > fused:
            return one_by_one(sort_arrays, sent, *arguments)
        return jax.vmap(functools.partial(one, sort_arrays, sent))(*arguments)

    on_cpu = jax.custom_batching.sequential_vmap(functools.partial(one_by_one, _sort_as_integers))
    arguments = (inbox.sent, inbox.rows, chosen, *numbers)
    return lax.platform_dependent(*arguments, cpu=on_cpu, default=together)


def sort_arrays(values: list[Array], fused: int = FUSED_SLOTS) -> list[Array] | Array:
    """The arrays sorted elementwise, ascending; stacked if there are more than `fused`."""
    if len(values) > fused:
        return _sorted_by_stages(jnp.stack(values))
    values = list(values)
    for i, j in _batcher(len(values)):
        values[i], values[j] = jnp.minimum(values[i], values[j]), jnp.maximum(values[i], values[j])
    return values


def _sort_as_integers(values: list[Array], fused: int = FUSED_SLOTS) -> list[Array] | Array:
    """The same: a CPU has the smaller of two integers in one instruction, of two floats (NaN?) in several."""

    def turned(bits):  # of negative numbers all bits but the sign: then integers are ordered as the floats
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    ordered = sort_arrays([turned(lax.bitcast_convert_type(v, jnp.int32)) for v in values], fused)
    return jax.tree.map(lambda v: lax.bitcast_convert_type(turned(v), jnp.float32), ordered)


def _sorted_by_stages(values: Array) -> Array:
    """[K, ...] sorted along K: comparators that do not touch each other are one stage, one pass."""
    size = len(values)
    depth, stages = [0] * size, []
    for i, j in _batcher(size):
        level = max(depth[i], depth[j])
        depth[i] = depth[j] = level + 1
        if level == len(stages):
            stages.append((np.arange(size), np.zeros(size, np.int32)))
        partner, side = stages[level]
        partner[[i, j]], side[[i, j]] = (j, i), (-1, 1)

    def run(values, stage):
        partner, side = stage[0], stage[1].reshape(-1, *[1] * (values.ndim - 1))
        other = values[partner]
        ends = jnp.where(side < 0, jnp.minimum(values, other), jnp.maximum(values, other))
        return jnp.where(side == 0, values, ends), None

    stages = tuple(jnp.asarray(np.stack(part)) for part in zip(*stages, strict=True))
    return lax.scan(run, values, stages)[0]


@functools.cache
def _batcher(size: int) -> tuple[tuple[int, int], ...]:
    """The comparators of Batcher's odd-even merge sort for any number of wires."""
    pairs = []
    run = 1
    while run < size:
        gap = run
        while gap:
            for start in range(gap % run, size - gap, 2 * gap):
                for i in range(start, min(start + gap, size - gap)):
                    if i // (2 * run) == (i + gap) // (2 * run):
                        pairs.append((i, i + gap))
            gap //= 2
        run *= 2
    return tuple(pairs)
