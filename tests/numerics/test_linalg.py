import jax
import numpy as np
import pytest
from conftest import slowly

from ubar_jax import linalg
from ubar_jax.testing import inbox_of
from ubar_jax.types import Graph


def make_inbox(own, sent, slots=None, mask=None):
    r, m = len(own), len(sent)
    slots = np.tile(np.arange(m), (r, 1)) if slots is None else slots
    mask = np.ones_like(slots, bool) if mask is None else mask
    return inbox_of(own, sent, Graph(slots.astype(np.int32), mask), own, np.zeros(r, np.int32))


@pytest.mark.medium
@pytest.mark.parametrize(("d", "rtol"), [(60_000, 1e-4), *slowly((5000, 1e-5))])  # many blocks; one
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
    # The products of jax 0.7 round the last columns of a matrix differently, by one unit in the last place.
    exact = jax.__version_info__ >= (0, 9)
    np.testing.assert_allclose(between[:5, 5], between[:5, 8], rtol=0 if exact else 2e-7)


@pytest.mark.parametrize("d", [1, 63, 64, 65, 1000, 1024])
def test_the_place_of_the_largest_value_is_the_first_one(d):
    rng = np.random.default_rng(d)
    values = rng.integers(-5, 3, (40, d)).astype(np.float32)  # many ties
    values[:20] += rng.random((20, d), np.float32)
    values[2, -1] = values[3, d // 64 * 64 % d] = 5  # in a last, partial window
    values[4] = -1 - rng.random(d, np.float32)
    values[5] = -np.inf
    for got in (jax.jit(linalg.argmax)(values), jax.vmap(linalg.argmax)(values[:, None])[:, 0]):
        np.testing.assert_array_equal(got, np.argmax(values, axis=1))


@pytest.mark.medium
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
    inbox, two = make_inbox(sent[:2], sent, slots), np.full((2, 1), 2)
    mixed = np.asarray(linalg.undefended(inbox, inbox.graph.mask, two))
    assert np.isfinite(mixed[0]).all() and np.isnan(mixed[1]).all()


@pytest.mark.parametrize("size", [1e6, 1e17, *slowly(1, 1e12)])
def test_one_model_that_exploded_does_not_blur_the_distances_of_others(size):
    """All but receiver 0 are near consensus; a mean that includes it would be dominated by it."""
    rng = np.random.default_rng(0)
    own = (rng.normal(size=(1, 500)) + 1e-2 * rng.normal(size=(8, 500))).astype(np.float32)
    own[0] *= np.float32(size)
    rows = np.stack([[j for j in range(8) if j != i] for i in range(8)]).astype(np.int32)
    graph = Graph(rows, np.ones_like(rows, bool))
    inbox = inbox_of(own, own, graph, own, np.zeros(8, np.int32))
    exact = np.square(own[:, None].astype(float) - own[None].astype(float)).sum(2)
    got = np.asarray(linalg.own_distances(inbox))
    np.testing.assert_allclose(got, np.take_along_axis(exact, rows, axis=1), rtol=1e-3)
    between = np.asarray(linalg.slot_distances(inbox))[0]  # receiver 0 hears all others
    off = ~np.eye(7, dtype=bool)
    np.testing.assert_allclose(between[off], exact[1:, 1:][off], rtol=1e-3)


def test_few_edges_are_counted_per_slot():
    """300 messages and six slots: 50 messages per slot."""
    inbox = make_inbox(np.zeros((2, 3), np.float32), np.zeros((300, 3), np.float32), np.zeros((2, 6)))
    assert linalg.few_edges(inbox, 50) and not linalg.few_edges(inbox, 51)


@pytest.mark.parametrize("largest", [1.0, 1e17, 1.8e19, 1.9e19, 1e30, np.inf, np.nan])
def test_usable_rows_are_those_whose_squared_norm_fits(largest):
    x = np.random.default_rng(0).normal(size=(4, 130)).astype(np.float32)
    x[1, 7], x[2] = largest, -1e17
    with np.errstate(over="ignore"):
        fits = np.isfinite(np.sum(np.square(x), axis=1))
    np.testing.assert_array_equal(jax.jit(linalg.usable)(x), fits)
