import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from ubar_jax import Config
from ubar_jax.engine.compilation import trace_chunk
from ubar_jax.engine.preparation import prepare
from ubar_jax.numerics import nn
from ubar_jax.parts.tasks import models

pytestmark = pytest.mark.medium


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
