"""Order statistics of many values per coordinate, [K, B], by counting instead of sorting.

The value of a given rank is found digit by digit, from the highest of four digits of eight bits: at each of
eight steps per digit all K values are compared with a threshold per coordinate, and the smaller ones are
counted. The program does not grow with K, and its time per value does not either. Floats are compared as
integers in the same order; digits of eight bits make short rows, of which many fit a vector register.

All functions take the values as K rows and return one row. `chosen` [K] says which rows count.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

BITS = 8  # of a digit
LOWEST = -(2 ** (BITS - 1))
LIMIT = 2**BITS - 1  # values per count: it is a number of eight bits


def in_order(values: Array) -> Array:
    """float32 -> int32 in the same order."""
    return _turned(lax.bitcast_convert_type(values, jnp.int32))


def back(ordered: Array) -> Array:
    """The inverse of `in_order`."""
    return lax.bitcast_convert_type(_turned(ordered), jnp.float32)


def _turned(bits: Array) -> Array:
    """Flips all bits but the sign of negative numbers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def of_rank(values: Array, chosen: Array, rank: Array) -> Array:
    """[B] the chosen value [K, B] of this rank (0: the smallest)."""
    ordered = jnp.where(chosen[:, None], in_order(values), jnp.iinfo(jnp.int32).max)
    found = _digit(ordered >> 3 * BITS, rank)
    for place in (2, 1, 0):
        above, digit = ordered >> (place + 1) * BITS, (ordered >> place * BITS) & LIMIT
        beside = jnp.where(above < found[None], LOWEST, -LOWEST - 1)  # below or above all digits
        found = found << BITS | _digit(jnp.where(above == found[None], digit + LOWEST, beside), rank) - LOWEST
    return back(found)


def _digit(digits: Array, rank: Array) -> Array:
    """[B] the largest t of which at most `rank` of the digits [K, B] are smaller; digits fit eight bits."""
    digits = digits.astype(jnp.int8)

    def step(i, carry):
        least, candidate = carry
        least = jnp.where(_smaller(digits, candidate) <= rank, candidate, least)
        return least, least + (-LOWEST >> i + 1).astype(jnp.int8)

    least = jnp.full(digits.shape[1:], LOWEST, jnp.int8)
    return lax.fori_loop(0, BITS, step, (least, jnp.zeros_like(least)))[0].astype(jnp.int32)


def _smaller(digits: Array, limit: Array) -> Array:
    """[B] how many of the digits [K, B] are smaller than the limit [B]."""
    counts = (
        jnp.sum((digits[at : at + LIMIT] < limit[None]).astype(jnp.uint8), axis=0, dtype=jnp.uint8)
        for at in range(0, len(digits), LIMIT)
    )
    return functools.reduce(jnp.add, (count.astype(jnp.int32) for count in counts))


def median(values: Array, chosen: Array) -> Array:
    """[B] median of the chosen values [K, B]; mean of the middle two if their number is even, 0 if none."""
    count = jnp.sum(chosen)
    low = of_rank(values, chosen, (count - 1) // 2)
    there = chosen[:, None]
    next_up = jnp.min(jnp.where(there & (values > low[None]), values, jnp.inf), axis=0)
    high = jnp.where(jnp.sum(there & (values <= low[None]), axis=0) > count // 2, low, next_up)
    return jnp.where(count > 0, jnp.where(count % 2 == 1, low, (low + high) / 2), 0)


def trimmed_mean(values: Array, chosen: Array, cut: Array) -> Array:
    """[B] mean of the chosen values [K, B] without the `cut` largest and smallest; 0 if none is left."""
    there, end = chosen[:, None], jnp.sum(chosen) - cut
    low, high = (of_rank(values, chosen, rank) for rank in (cut, end - 1))
    between = jnp.sum(jnp.where(there & (values > low[None]) & (values < high[None]), values, 0), axis=0)
    lows = jnp.minimum(jnp.sum(there & (values <= low[None]), axis=0), end) - cut  # copies that are kept
    highs = end - jnp.sum(there & (values < high[None]), axis=0)
    total = jnp.where(low == high, (end - cut) * low, between + lows * low + highs * high)
    return jnp.where(end > cut, total / jnp.maximum(end - cut, 1), 0)


def mean_around(values: Array, chosen: Array, keep: Array, middle: Array) -> Array:
    """[B] mean of the `keep` chosen values [K, B] nearest to `middle` [B]; in a tie the smaller is taken."""
    away = jnp.abs(values - middle[None])
    reach = of_rank(away, chosen, keep - 1)
    inside, tie = near(away, reach[None], middle[None])
    inside, low = inside & chosen[:, None], values <= middle[None]
    below, above = (tie & chosen[:, None] & side for side in (low, ~low))
    nearer, smaller = jnp.sum(inside, axis=0), jnp.sum(below, axis=0)
    smaller = jnp.minimum(smaller, keep - nearer)
    # Ties are equal up to rounding, so any of them stands for all.
    lowest, highest = (jnp.max(jnp.where(side, values, -jnp.inf), axis=0) for side in (below, above))
    rest = keep - nearer - smaller
    total = jnp.sum(jnp.where(inside, values, 0), axis=0)
    total += jnp.where(smaller > 0, smaller * lowest, 0) + jnp.where(rest > 0, rest * highest, 0)
    return total / jnp.maximum(keep, 1)


def sum_of_smallest(values: Array, count: Array) -> Array:
    """[B] sum of the `count` smallest, at least one, of the values [K, B]."""
    largest = of_rank(values, jnp.ones(len(values), bool), count - 1)
    less = values < largest[None]
    return jnp.sum(jnp.where(less, values, 0), axis=0) + (count - jnp.sum(less, axis=0)) * largest


def near(away: Array, reach: Array, middle: Array) -> tuple[Array, Array]:
    """Whether the distance from `middle` is less than `reach`, and whether it equals it up to rounding."""
    rounding = 2 * jnp.finfo(jnp.float32).eps * (jnp.abs(middle) + reach)
    inside = away < reach - rounding
    return inside, ~inside & (away <= reach + rounding)
