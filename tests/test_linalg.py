import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ubar_jax import linalg
from ubar_jax.testing import inbox_of
from ubar_jax.types import Graph, Inbox


def make_inbox(own, sent, slots=None, mask=None):
    r, m = len(own), len(sent)
    slots = np.tile(np.arange(m), (r, 1)) if slots is None else slots
    mask = np.ones_like(slots, bool) if mask is None else mask
    return inbox_of(own, sent, Graph(slots.astype(np.int32), mask), own, np.zeros(r, np.int32))


@pytest.mark.parametrize(("d", "rtol"), [(5000, 1e-5), (60_000, 1e-4)])  # one block, several and a rest
def test_distances_are_exact_near_consensus_with_a_far_outlier(d, rtol):
    """Models of norm 100 that differ by 1e-3, and one message of norm 1e6."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=d)
    base *= 100 / np.linalg.norm(base)
    offsets = rng.normal(size=(12, d))
    offsets *= 1e-3 / np.linalg.norm(offsets, axis=1, keepdims=True)
    sent = (base + offsets).astype(np.float32)
    sent[11] = 1e6 / np.sqrt(d)
    inbox = make_inbox(sent[:8], sent)
    exact = ((sent[:, None].astype(float) - sent[None].astype(float)) ** 2).sum(-1)
    np.testing.assert_allclose(linalg.own_distances(inbox)[:, 8:], exact[:8, 8:], rtol=rtol)
    between = np.asarray(linalg.slot_distances(inbox))[0]
    others = ~np.eye(12, dtype=bool)
    np.testing.assert_allclose(between[others], exact[others], rtol=rtol)
    np.testing.assert_array_equal(between, between.T)


def test_equal_messages_have_distance_zero_and_equal_distances():
    rng = np.random.default_rng(1)
    sent = rng.normal(size=(9, 1001)).astype(np.float32)
    sent[6:] = sent[5]
    between = np.asarray(linalg.slot_distances(make_inbox(sent[:5], sent)))[0]
    assert between[5, 6] == between[7, 8] == 0
    np.testing.assert_array_equal(between[:5, 5], between[:5, 8])


@pytest.mark.parametrize("size", range(1, 13))
def test_the_network_sorts_all_zeros_and_ones(size):
    """The zero-one principle: a network that sorts these sorts everything."""
    inputs = np.array(list(itertools.product([0, 1], repeat=size)), np.float32).T
    got = np.stack(linalg.sort_arrays([jnp.asarray(row) for row in inputs]))
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
    for sort in (linalg.sort_arrays, linalg._sort_as_integers):
        np.testing.assert_array_equal(np.stack(sort(list(values))), np.sort(values, axis=0))


def test_sorted_as_integers_the_ends_of_the_range_stay_in_order():
    most, least = linalg.BIG, np.float32(1e-45)
    values = np.float32(
        [1, -1, np.inf, -np.inf, most, -most, least, -least, 0, -0.0, 2.0**-126, -(2.0**-126)]
    )
    for fused in (64, 4):
        got = np.stack(linalg._sort_as_integers(list(values[:, None]), fused))
        np.testing.assert_array_equal(got[:, 0], np.sort(values))


@pytest.mark.parametrize("d", [1, 63, 64, 65, 1000, 1024])
def test_the_place_of_the_largest_value_is_the_first_one(d):
    rng = np.random.default_rng(d)
    values = rng.integers(-5, 3, (40, d)).astype(np.float32)  # many ties
    values[:20] += rng.random((20, d), np.float32)
    values[2, -1] = values[3, d // 64 * 64 % d] = 5  # in a last window that is not full
    values[4] = -1 - rng.random(d, np.float32)
    values[5] = -np.inf
    for got in (jax.jit(linalg.argmax)(values), jax.vmap(linalg.argmax)(values[:, None])[:, 0]):
        np.testing.assert_array_equal(got, np.argmax(values, axis=1))


@pytest.mark.parametrize("size", [1, 7, 70])
def test_the_sum_of_the_smallest(size):
    values = np.random.default_rng(size).standard_normal((2, size, 3, 5), np.float32)  # two runs side by side
    count = np.array([[0], [size // 2], [size]])
    expected = [np.sort(v, axis=0)[: count[k, 0], k].sum(0) for v in values for k in range(3)]
    got = jax.vmap(lambda v: linalg.sum_of_smallest(list(v), count))(values)
    np.testing.assert_allclose(got, np.reshape(expected, got.shape), rtol=1e-5, atol=1e-5)


MEDIUM = [pytest.param(slots, marks=pytest.mark.medium) for slots in (33, 40, 41, 64)]
SLOW = [pytest.param(slots, marks=pytest.mark.slow) for slots in (65, 128, 150)]


@pytest.mark.parametrize("slots", [1, 2, 3, 18, *MEDIUM, *SLOW])
def test_order_statistics_with_irregular_degrees_at_every_density(slots):
    """Up to 40 slots, a median up to 64, by one fused network, above stage by stage."""
    rng = np.random.default_rng(slots)
    r, d = 7, 6
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
            linalg.coordinate_median(box, mask),
            linalg.trimmed_mean(box, mask, jnp.asarray(cut)),
            linalg.mean_around_median(box, mask, jnp.asarray(counts - 2 * cut)),
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
    """Around a power of two neighbouring floats are unevenly spaced, and many values are equally near."""
    rng = np.random.default_rng(0)
    sent = (1 + spread * rng.normal(size=(9, 20_000))).astype(np.float32)
    inbox = make_inbox(sent[:1], sent)
    around = linalg.mean_around_median(inbox, jnp.ones((1, 9), bool), jnp.array([5]))[0]
    near = np.argsort(np.abs(sent - np.median(sent, axis=0)), axis=0)[:5]
    nearest = np.take_along_axis(sent.astype(float), near, axis=0).mean(0)
    np.testing.assert_allclose(around, nearest, atol=0.01)  # equally near: either; lost: 0.2


def test_messages_just_below_overflow_do_not_make_distances_nan():
    sent = np.zeros((5, 4), np.float32)
    sent[3], sent[4] = 9e18, -9e18  # squared norms just below float32's largest
    inbox = linalg.drop_bad(make_inbox(sent[:3], sent))
    assert inbox.graph.mask.all()
    assert not np.isnan(linalg.slot_distances(inbox)).any()
    assert not np.isnan(linalg.own_distances(inbox)).any()


def test_the_mean_over_a_poisoned_network_stays_with_those_who_heard_it():
    sent = np.ones((4, 3), np.float32)
    sent[3] = np.nan
    slots = np.array([[0, 1], [2, 3]])
    mixed = np.asarray(linalg.undefended_mean(make_inbox(sent[:2], sent, slots)))
    assert np.isfinite(mixed[0]).all() and np.isnan(mixed[1]).all()


@pytest.mark.parametrize("size", [1, 1e6, 1e12, 1e17])
def test_one_model_that_exploded_does_not_blur_the_distances_of_others(size):
    """Near consensus, but for receiver 0: a mean that it takes part in would be its own."""
    rng = np.random.default_rng(0)
    own = (rng.normal(size=(1, 500)) + 1e-2 * rng.normal(size=(8, 500))).astype(np.float32)
    own[0] *= np.float32(size)
    rows = np.stack([[j for j in range(8) if j != i] for i in range(8)]).astype(np.int32)
    graph = Graph(rows, np.ones_like(rows, bool))
    inbox = Inbox(own, own, rows, graph, None, None, 0, None, None, 0)
    exact = np.square(own[:, None].astype(float) - own[None].astype(float)).sum(2)
    got = np.asarray(linalg.own_distances(inbox))
    np.testing.assert_allclose(got, np.take_along_axis(exact, rows, axis=1), rtol=1e-3)
    between = np.asarray(linalg.slot_distances(inbox))[0]  # of receiver 0: all the others
    off = ~np.eye(7, dtype=bool)
    np.testing.assert_allclose(between[off], exact[1:, 1:][off], rtol=1e-3)
