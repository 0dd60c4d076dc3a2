"""Order statistics per coordinate over each receiver's chosen slots, by Batcher's sorting network.

Up to FUSED_SLOTS slots are sorted as K separate arrays, never stacked. XLA then fuses gathers, network and
statistic into one loop over coordinates that works in registers and materialises nothing. On the CPU this
requires a loop over receivers: XLA compiles a loop's body apart from the code that uses its result. The body
grows with K log^2 K, and if all sorted values are used, XLA duplicates parts of the network. Denser graphs
therefore run the same network stage by stage on [K, d].
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ubar_jax.numerics import nn
from ubar_jax.numerics.linalg import BIG
from ubar_jax.types import Inbox

FUSED_SLOTS = 64  # for medians


FUSED_ALL = 40  # for statistics that use every sorted value


def coordinate_median(inbox: Inbox, chosen: Array) -> Array:
    """[r, d] median of the messages in the chosen slots ([r, K] bool); mean of the middle two if even."""
    return _per_receiver(_median, inbox, chosen)


def trimmed_mean(inbox: Inbox, chosen: Array, cut: Array) -> Array:
    """[r, d] mean of the chosen slots after dropping the `cut` [r] largest and smallest per coordinate."""

    def one(sort, values, chosen, cut):
        values = [jnp.where(c, v, BIG) for v, c in zip(values, chosen, strict=True)]
        ordered = sort(values, FUSED_ALL)
        kept = jnp.sum(chosen) - 2 * cut
        total = sum(jnp.where((k >= cut) & (k < cut + kept), v, 0) for k, v in enumerate(ordered))
        return total / jnp.maximum(kept, 1)

    return _per_receiver(one, inbox, chosen, cut, fused=FUSED_ALL)


def mean_around_median(inbox: Inbox, chosen: Array, keep: Array) -> Array:
    """[r, d] mean of the `keep` [r] chosen values nearest to the median of the chosen values.

    Of two equally near values (up to rounding) the smaller is taken. Runs in three passes (median, distance
    of the farthest kept value, mean), because XLA duplicates the network if sorted values are reused.
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
    """Elementwise sum of the `count` smallest of the float32 arrays."""

    def total(sort, count, *values):
        return sum(jnp.where(k < count, value, 0) for k, value in enumerate(sort(values)))

    on_cpu = jax.custom_batching.sequential_vmap(functools.partial(total, _sort_as_integers))
    default = functools.partial(total, sort_arrays)
    return lax.platform_dependent(count, *values, cpu=on_cpu, default=default)


def _median(sort: Callable, values: list[Array], chosen: Array) -> Array:
    """Fill half of the empty slots with -BIG and half with BIG, so that the median has a fixed rank."""
    if len(values) % 2:
        values, chosen = [*values, values[0]], jnp.append(chosen, False)
    empty = jnp.cumsum(~chosen)
    fill = jnp.where(empty <= empty[-1] // 2, -BIG, BIG)
    ordered = sort([jnp.where(c, v, f) for v, c, f in zip(values, chosen, fill, strict=True)])
    low, high = ordered[len(values) // 2 - 1], ordered[len(values) // 2]
    return jnp.where(jnp.sum(chosen) % 2 == 1, low, (low + high) / 2)


def _per_receiver(statistic, inbox: Inbox, chosen: Array, *numbers: Array, fused: int = FUSED_SLOTS) -> Array:
    """[r, d] statistic(sort, values: K arrays [d], chosen [K], numbers [] or [d]) per receiver.

    On the CPU vmapped runs are looped over, too: LLVM takes minutes to compile a vmapped integer network.
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

    def some(*arguments):
        return lax.platform_dependent(inbox.sent, *arguments, cpu=on_cpu, default=together)

    return nn.split(some, inbox.rows, chosen, *numbers)


def sort_arrays(values: list[Array], fused: int = FUSED_SLOTS) -> list[Array] | Array:
    """Sort the arrays elementwise, ascending; the result is stacked if there are more than `fused`."""
    if len(values) > fused:
        return _sorted_by_stages(jnp.stack(values))
    values = list(values)
    for i, j in _batcher(len(values)):
        values[i], values[j] = jnp.minimum(values[i], values[j]), jnp.maximum(values[i], values[j])
    return values


def _sort_as_integers(values: list[Array], fused: int = FUSED_SLOTS) -> list[Array] | Array:
    """`sort_arrays` on integers: float min and max propagate NaN, which takes several instructions."""

    def turned(bits):  # flips all bits but the sign of negatives: ints then sort like the floats
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    ordered = sort_arrays([turned(lax.bitcast_convert_type(v, jnp.int32)) for v in values], fused)
    return jax.tree.map(lambda v: lax.bitcast_convert_type(turned(v), jnp.float32), ordered)


def _sorted_by_stages(values: Array) -> Array:
    """[K, ...] sorted along K, one pass per stage; a stage is a set of comparators on disjoint rows."""
    size = len(values)
    depth = [0] * size
    stages: list[tuple[np.ndarray, np.ndarray]] = []
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

    stacked = tuple(jnp.asarray(np.stack(part)) for part in zip(*stages, strict=True))
    return lax.scan(run, values, stacked)[0]


@functools.cache
def _batcher(size: int) -> tuple[tuple[int, int], ...]:
    """The comparators (i, j) of Batcher's odd-even merge sort of `size` values."""
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
