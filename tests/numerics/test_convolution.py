import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slowly
from jax import lax

from ubar_jax.numerics import convolution, nn
from ubar_jax.numerics.convolution import conv, max_pool

pytestmark = pytest.mark.medium


@pytest.fixture(params=["rows", "pixels", "accelerator"])
def formulation(request, monkeypatch):
    """Each of the three formulations, run on this machine."""
    if request.param == "pixels":
        monkeypatch.setattr(convolution, "SMALL", 0)
    if request.param == "accelerator":
        monkeypatch.setattr(lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))


def same(ours, plain, tolerance):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("window", "pad", "c", "o", "side"),
    [
        (3, 1, 3, 4, 8),
        *slowly(
            (5, 2, 1, 6, 9),
            (4, 1, 5, 6, 7),
            (5, 0, 2, 3, 9),
            (1, 0, 2, 3, 4),
            (5, 2, 2, 3, 2),
            (7, 3, 1, 2, 1),
        ),
    ],
)
def test_conv_equals_lax_in_value_and_gradient(formulation, window, pad, c, o, side):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 5, side, side + 1, c)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(3, window, window, c, o)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(3, o)), jnp.float32)

    def plain(x, w, bias):
        y = lax.conv_general_dilated(
            x, w, (1, 1), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + bias[None, None, None, :]

    def value_and_gradients(f):
        def total(*arrays):
            return (jnp.sin(f(*arrays))).sum()

        return nn.each(jax.value_and_grad(total, argnums=(0, 1, 2)), x, w, bias)

    ours = value_and_gradients(lambda *arrays: conv(*arrays, pad))
    same(ours, value_and_gradients(plain), 1e-4)


@pytest.mark.parametrize(
    ("window", "stride", "side"),
    [(3, 2, 32), *slowly((2, 2, 9), (4, 2, 15), (2, 2, 8), (3, 1, 7), (2, 3, 9))],
)
def test_max_pool_equals_lax_in_value_and_gradient_ties_too(formulation, window, stride, side):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 4, size=(2, side, side + 1, 3)), jnp.float32)  # many ties

    def plain(x):
        shape = (1, window, window, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, shape, (1, stride, stride, 1), "VALID")

    weight = jnp.asarray(rng.normal(size=plain(x).shape), jnp.float32)
    np.testing.assert_array_equal(max_pool(x, window, stride), plain(x))
    ours = jax.grad(lambda x: (max_pool(x, window, stride) * weight).sum())(x)
    same(ours, jax.grad(lambda x: (plain(x) * weight).sum())(x), 1e-5)


@pytest.mark.parametrize("small", [0, 64])
def test_the_gradient_of_the_data_is_not_computed(small, monkeypatch):
    """Value, weights' gradient and data's gradient are one loop each; the last is dropped."""
    monkeypatch.setattr(convolution, "SMALL", small)
    x, w, bias = jnp.ones((5, 9, 9, 2)), jnp.ones((3, 3, 2, 4)), jnp.ones(4)

    def loops(argnums):
        gradient = jax.grad(lambda *arrays: jnp.sin(conv(*arrays, 1)).sum(), argnums)
        return len(re.findall(r" while\(", jax.jit(gradient).lower(x, w, bias).compile().as_text()))

    assert loops((0, 1, 2)) == 3 and loops((1, 2)) == 2
