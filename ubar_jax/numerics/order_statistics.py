"""Order statistics per coordinate over each receiver's chosen slots.

Up to FUSED_SLOTS slots are sorted by Batcher's network as K separate arrays, never stacked. XLA then fuses
gathers, network and statistic into one loop over coordinates that works in registers and materialises
nothing. On the CPU this requires a loop over receivers: XLA compiles a loop's body apart from the code that
uses its result. The body grows with K log^2 K, and LLVM no longer vectorises a larger one. Denser graphs
therefore count instead of sorting (`selection`), by blocks of coordinates.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from ubar_jax.numerics import nn, selection
from ubar_jax.numerics.linalg import BIG
from ubar_jax.types import Inbox

FUSED_SLOTS = 96  # for medians
FUSED_ALL = 80  # for statistics that use every sorted value
BLOCK = 128  # coordinates that are counted together on the CPU: the digits of 256 slots fit the fastest cache


def coordinate_median(inbox: Inbox, chosen: Array) -> Array:
    """[r, d] median of the messages in the chosen slots ([r, K] bool); mean of the middle two if even."""
    if inbox.rows.shape[1] > FUSED_SLOTS:
        return _by_blocks(selection.median, inbox, chosen)
    return _per_receiver(_median, inbox, chosen)


def trimmed_mean(inbox: Inbox, chosen: Array, cut: Array) -> Array:
    """[r, d] mean of the chosen slots after dropping the `cut` [r] largest and smallest per coordinate."""

    def one(sort, values, chosen, cut):
        values = [jnp.where(c, v, BIG) for v, c in zip(values, chosen, strict=True)]
        ordered = sort(values)
        kept = jnp.sum(chosen) - 2 * cut
        total = sum(jnp.where((k >= cut) & (k < cut + kept), v, 0) for k, v in enumerate(ordered))
        return total / jnp.maximum(kept, 1)

    if inbox.rows.shape[1] > FUSED_ALL:
        return _by_blocks(selection.trimmed_mean, inbox, chosen, cut)
    return _per_receiver(one, inbox, chosen, cut)


def mean_around_median(inbox: Inbox, chosen: Array, keep: Array) -> Array:
    """[r, d] mean of the `keep` [r] chosen values nearest to the median of the chosen values.

    Of two equally near values (up to rounding) the smaller is taken. Runs in three passes (median, distance
    of the farthest kept value, mean), because XLA duplicates the network if sorted values are reused.
    """
    middle = coordinate_median(inbox, chosen)
    if inbox.rows.shape[1] > FUSED_ALL:
        return _by_blocks(selection.mean_around, inbox, chosen, keep, middle)

    def farthest(sort, values, chosen, keep, middle):
        away = [jnp.where(c, jnp.abs(v - middle), BIG) for v, c in zip(values, chosen, strict=True)]
        return sum(jnp.where(k == keep - 1, v, 0) for k, v in enumerate(sort(away)))

    reach = _per_receiver(farthest, inbox, chosen, keep, middle)

    def one(_, values, chosen, keep, middle, reach):
        total, nearer, below, low, high = (jnp.zeros_like(middle) for _ in range(5))
        for v, c in zip(values, chosen, strict=True):
            inside, tie = selection.near(jnp.where(c, jnp.abs(v - middle), BIG), reach, middle)
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

    if len(values) > FUSED_SLOTS:
        return total(lambda values: jnp.sort(jnp.stack(values), axis=0), count, *values)
    on_cpu = jax.custom_batching.sequential_vmap(functools.partial(total, _sort_as_integers))
    default = functools.partial(total, sort_arrays)
    return lax.platform_dependent(count, *values, cpu=on_cpu, default=default)


def sum_of_smallest_per_row(values: Array, count: Array) -> Array:
    """[r, K] sum of the `count` [r] smallest of the float32 values [r, K, K] of a slot."""
    slots = values.shape[2]
    if slots <= FUSED_SLOTS:
        return sum_of_smallest([values[:, :, k] for k in range(slots)], count[:, None])
    return lax.map(lambda each: selection.sum_of_smallest(each[0].T, each[1]), (values, count))


def _median(sort: Callable, values: list[Array], chosen: Array) -> Array:
    """Fill half of the empty slots with -BIG and half with BIG, so that the median has a fixed rank."""
    if len(values) % 2:
        values, chosen = [*values, values[0]], jnp.append(chosen, False)
    empty = jnp.cumsum(~chosen)
    fill = jnp.where(empty <= empty[-1] // 2, -BIG, BIG)
    ordered = sort([jnp.where(c, v, f) for v, c, f in zip(values, chosen, fill, strict=True)])
    low, high = ordered[len(values) // 2 - 1], ordered[len(values) // 2]
    return jnp.where(jnp.sum(chosen) % 2 == 1, low, (low + high) / 2)


def _per_receiver(statistic: Callable, inbox: Inbox, chosen: Array, *numbers: Array) -> Array:
    """[r, d] statistic(sort, values: K arrays [d], chosen [K], numbers [] or [d]) per receiver.

    On the CPU vmapped runs are looped over, too: LLVM takes minutes to compile a vmapped integer network.
    """

    def one(sort, sent, rows, chosen, *numbers):
        return statistic(sort, [sent[row] for row in rows], chosen, *numbers)

    def one_by_one(sent, *arguments):
        return lax.map(lambda each: one(_sort_as_integers, sent, *each), arguments)

    def together(sent, *arguments):
        return jax.vmap(functools.partial(one, sort_arrays, sent))(*arguments)

    on_cpu = jax.custom_batching.sequential_vmap(one_by_one)

    def some(*arguments):
        return lax.platform_dependent(inbox.sent, *arguments, cpu=on_cpu, default=together)

    return nn.split(some, inbox.rows, chosen, *numbers)


def _by_blocks(statistic: Callable, inbox: Inbox, chosen: Array, *numbers: Array) -> Array:
    """[r, d] statistic(values [K, B], chosen [K], numbers [] or [B]) per receiver and block of B coordinates.

    Elsewhere than on the CPU a block has all coordinates. The last block overlaps the one before it.
    """
    d = inbox.sent.shape[1]

    def one(size, rows, chosen, *numbers):
        def cut(array, start):
            return lax.dynamic_slice_in_dim(array, start, size, axis=array.ndim - 1)

        def block(k, found):
            start = jnp.minimum(k * size, d - size)
            here = [cut(number, start) if number.ndim else number for number in numbers]
            part = statistic(cut(inbox.sent, start)[rows], chosen, *here)
            return lax.dynamic_update_slice_in_dim(found, part, start, axis=0)

        return lax.fori_loop(0, -(-d // size), block, jnp.zeros(d))

    def some(*arguments):
        def by(size):
            return lambda *arguments: lax.map(lambda each: one(size, *each), arguments)

        return lax.platform_dependent(*arguments, cpu=by(min(d, BLOCK)), default=by(d))

    return nn.split(some, inbox.rows, chosen, *numbers)


def sort_arrays(values: list[Array]) -> list[Array]:
    """Sort the arrays elementwise, ascending."""
    values = list(values)
    for i, j in _batcher(len(values)):
        values[i], values[j] = jnp.minimum(values[i], values[j]), jnp.maximum(values[i], values[j])
    return values


def _sort_as_integers(values: list[Array]) -> list[Array]:
    """`sort_arrays` on integers: float min and max propagate NaN, which takes several instructions."""
    return [selection.back(v) for v in sort_arrays([selection.in_order(v) for v in values])]


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
