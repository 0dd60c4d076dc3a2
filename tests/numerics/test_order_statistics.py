import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import not_quickly, slowly
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_linalg import make_inbox

from ubar_jax import linalg, order_statistics
from ubar_jax.numerics import selection
from ubar_jax.types import Graph


@pytest.mark.parametrize("size", range(1, 13))
def test_the_network_sorts_all_zeros_and_ones(size):
    """The zero-one principle: a network that sorts these sorts everything."""
    inputs = np.array(list(itertools.product([0, 1], repeat=size)), np.float32).T
    got = np.stack(order_statistics.sort_arrays([jnp.asarray(row) for row in inputs]))
    np.testing.assert_array_equal(got, np.sort(inputs, axis=0))


@settings(max_examples=60, deadline=None)
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 40), st.just(3)),
        elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False),
    )
)
def test_the_network_sorts_anything(values):
    for sort in (order_statistics.sort_arrays, order_statistics._sort_as_integers):
        np.testing.assert_array_equal(np.stack(sort(list(values))), np.sort(values, axis=0))


@pytest.mark.parametrize("count", [1, 2, 100, 255, 256, 600])
def test_counting_finds_every_rank(count):
    """255 is the largest number that one count of eight bits can hold. Some values are equal."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal((count, 5)).astype(np.float32) * np.float32([1, 1e-30, 1e30, 0, 1])
    values[:, 4] = np.round(values[:, 4])
    chosen = rng.random(count) < 0.8
    chosen[0] = True
    ordered = np.sort(values[chosen], axis=0)
    of_rank = jax.jit(selection.of_rank)
    nobody = np.zeros(count, bool)
    assert not jnp.any(selection.median(values, nobody))
    assert not jnp.any(selection.trimmed_mean(values, nobody, 0))
    for rank in {0, len(ordered) // 3, len(ordered) // 2, len(ordered) - 1}:
        np.testing.assert_array_equal(of_rank(values, chosen, rank), ordered[rank])


def test_sorted_as_integers_the_ends_of_the_range_stay_in_order():
    most, least = linalg.BIG, np.float32(1e-45)
    values = np.float32(
        [1, -1, np.inf, -np.inf, most, -most, least, -least, 0, -0.0, 2.0**-126, -(2.0**-126)]
    )
    got = np.stack(order_statistics._sort_as_integers(list(values[:, None])))
    np.testing.assert_array_equal(got[:, 0], np.sort(values))
    everyone = np.ones(len(values), bool)
    got = [selection.of_rank(values[:, None], everyone, rank) for rank in range(len(values))]
    np.testing.assert_array_equal(np.stack(got)[:, 0], np.sort(values))


@pytest.mark.parametrize("size", [1, 7, *slowly(100)])
def test_the_sum_of_the_smallest(size):
    values = np.random.default_rng(size).standard_normal((2, size, 3, 5), np.float32)  # two vmapped runs
    count = np.array([[0], [size // 2], [size]])
    expected = [np.sort(v, axis=0)[: count[k, 0], k].sum(0) for v in values for k in range(3)]
    got = jax.vmap(lambda v: order_statistics.sum_of_smallest(list(v), count))(values)
    np.testing.assert_allclose(got, np.reshape(expected, got.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 5, *slowly(40, 97, 130)])
def test_the_sum_of_the_smallest_per_row(slots):
    rng = np.random.default_rng(slots)
    values = rng.standard_normal((3, slots, slots), np.float32)
    values[rng.random(values.shape) < 0.2] = np.inf
    values[1, :, :2] = 0.5  # ties
    count = np.array([1, (slots + 1) // 2, slots])
    expected = [np.sort(v, axis=1)[:, :k].sum(1) for v, k in zip(values, count, strict=True)]
    got = jax.jit(order_statistics.sum_of_smallest_per_row)(values, count)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 3, *not_quickly(18), *slowly(33, 80, 81, 96, 97, 150, 300)])
def test_order_statistics_with_irregular_degrees_at_every_density(slots):
    """One fused network up to 80 slots (96 for a median); by counting above."""
    rng = np.random.default_rng(slots)
    r, d = 7, 150  # more than a block
    sent = rng.normal(size=(slots + 3, d)).astype(np.float32)
    rows = np.stack([np.sort(rng.permutation(slots + 3)[:slots]) for _ in range(r)])
    chosen = np.zeros((r, slots), bool)
    for i in range(r):
        chosen[i, rng.permutation(slots)[: rng.integers(1, slots + 1)]] = True
    chosen[0] = True
    inbox = make_inbox(sent[:1].repeat(r, 0), sent, rows, chosen)
    counts = chosen.sum(1)
    cut = (counts - 1) // 3
    values = [sent[rows[i][chosen[i]]].astype(float) for i in range(r)]

    @jax.jit
    def statistics(own, sent, rows, mask):
        box = inbox._replace(own=own, sent=sent, rows=rows, graph=Graph(rows, mask))
        return (
            order_statistics.coordinate_median(box, mask),
            order_statistics.trimmed_mean(box, mask, jnp.asarray(cut)),
            order_statistics.mean_around_median(box, mask, jnp.asarray(counts - 2 * cut)),
        )

    medians, trimmed, around = statistics(inbox.own, inbox.sent, inbox.rows, inbox.graph.mask)
    for i, v in enumerate(values):
        np.testing.assert_allclose(medians[i], np.median(v, axis=0), rtol=1e-6, atol=1e-6)
        kept = np.sort(v, axis=0)[cut[i] : len(v) - cut[i]]
        np.testing.assert_allclose(trimmed[i], kept.mean(0), rtol=1e-5, atol=1e-5)
        near = np.argsort(np.abs(v - np.median(v, axis=0)), axis=0)[: counts[i] - 2 * cut[i]]
        nearest = np.take_along_axis(v, near, axis=0).mean(0)
        np.testing.assert_allclose(around[i], nearest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [1e-3, 1e-5, 1e-6])
def test_no_value_around_the_median_is_lost_to_rounding(spread):
    """Floats are unevenly spaced around a power of two, and many values are equally near."""
    rng = np.random.default_rng(0)
    sent = (1 + spread * rng.normal(size=(9, 20_000))).astype(np.float32)
    inbox = make_inbox(sent[:1], sent)
    around = order_statistics.mean_around_median(inbox, jnp.ones((1, 9), bool), jnp.array([5]))[0]
    near = np.argsort(np.abs(sent - np.median(sent, axis=0)), axis=0)[:5]
    nearest = np.take_along_axis(sent.astype(float), near, axis=0).mean(0)
    np.testing.assert_allclose(around, nearest, atol=0.01)  # ties may go either way; a lost value costs 0.2
