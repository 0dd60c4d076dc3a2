import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slowly
from jax import lax

from ubar_jax import Config
from ubar_jax.engine.compilation import trace_chunk
from ubar_jax.engine.preparation import prepare
from ubar_jax.numerics import nn
from ubar_jax.parts.tasks import models

pytestmark = pytest.mark.medium


@pytest.fixture(params=["cpu", "accelerator"])
def formulation(request, monkeypatch):
    """Each of the two formulations, run on this machine."""
    if request.param == "accelerator":
        monkeypatch.setattr(lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))


def same(ours, plain, tolerance):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("window", "pad", "c", "o", "side"),
    [(3, 1, 3, 4, 8), *slowly((5, 2, 1, 6, 9), (4, 1, 5, 6, 7), (5, 0, 2, 3, 9))],
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

    ours = value_and_gradients(lambda *arrays: nn.conv(*arrays, pad))
    same(ours, value_and_gradients(plain), 1e-4)


@pytest.mark.parametrize(
    ("window", "stride", "side"),
    [(3, 2, 32), *slowly((2, 2, 9), (4, 2, 15), (2, 2, 8), (3, 1, 7), (2, 3, 9))],
)
def test_max_pool_equals_lax_in_value_and_gradient_ties_too(formulation, window, stride, side):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 4, size=(2, side, side, 3)), jnp.float32)  # many ties

    def plain(x):
        shape = (1, window, window, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, shape, (1, stride, stride, 1), "VALID")

    weight = jnp.asarray(rng.normal(size=plain(x).shape), jnp.float32)
    np.testing.assert_array_equal(nn.max_pool(x, window, stride), plain(x))
    ours = jax.grad(lambda x: (nn.max_pool(x, window, stride) * weight).sum())(x)
    same(ours, jax.grad(lambda x: (plain(x) * weight).sum())(x), 1e-5)


def test_the_gradient_of_the_data_is_not_computed():
    """Value, weights' gradient and data's gradient are one loop over pixels each; the last is dropped."""
    x, w, bias = jnp.ones((5, 9, 9, 2)), jnp.ones((3, 3, 2, 4)), jnp.ones(4)

    def loops(argnums):
        gradient = jax.grad(lambda *arrays: jnp.sin(nn.conv(*arrays, 1)).sum(), argnums)
        return len(re.findall(r" while\(", jax.jit(gradient).lower(x, w, bias).compile().as_text()))

    assert loops((0, 1, 2)) == 3 and loops((1, 2)) == 2


@pytest.mark.parametrize("fits", [1, 3, 100])
def test_models_side_by_side_are_as_many_as_fit(fits, monkeypatch):
    def product(a, b):
        return a @ b

    one = jax.make_jaxpr(product)(jnp.ones((2, 3)), jnp.ones((3, 4)))
    assert nn.footprint(one) == 4 * (6 + 12 + 8)
    monkeypatch.setattr(nn, "MEMORY", fits * nn.footprint(one))
    program = jax.jit(lambda *stacked: nn.each(product, *stacked))
    traced = program.trace(jnp.ones((6, 2, 3)), jnp.ones((6, 3, 4)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (width,) = re.findall(r"dot_general.* -> tensor<(\d+)x2x4xf32>", text)
    assert int(width) == min(fits, 6)
    assert re.findall(r"dot_general.* -> tensor<(.*)xf32>", traced.lower().as_text()) == ["2x4"]


def test_the_round_of_70_cnns_for_cuda_is_one_program_of_batched_products():
    """Lowered without a GPU: no convolution, no host call, chunks that fit the memory."""
    config = Config(nodes=70, batch_size=256, dataset="synthetic(examples=17920, size=4)", rounds=4)
    program = prepare(config).program
    cnn = {"model": "cnn", "make_model": models.parse("cnn").part.function, "shape": (32, 32, 3)}
    program = dataclasses.replace(program, learner=dataclasses.replace(program.learner, **cnn))
    traced = trace_chunk(program)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("func.func public") == 1
    for word in ("convolution", "custom_call", "callback", "infeed", "outfeed", "send", "recv"):
        assert word not in text, word
    loops = text.count("stablehlo.while")
    assert loops == 3  # over rounds, chunks of nodes, chunks of candidates
    products = [line for line in text.splitlines() if "dot_general" in line and "DEFAULT" in line]
    assert len(products) >= 17  # training: five forward, eight gradients; stage 2: five forward
    assert all("batching_dims = [0] x [0]" in line for line in products)
    shapes = [dims.split("x") for dims in re.findall(r"tensor<([\dx]+)xf32>", text)]
    assert max(4 * math.prod(map(int, dims)) for dims in shapes) < nn.MEMORY
