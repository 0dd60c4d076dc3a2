import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ubar_jax.models import make_task, models
from ubar_jax.nn import conv, each, max_pool
from ubar_jax.registry import ConfigError


@pytest.mark.parametrize(
    ("model", "shape", "parameters"),
    [("mlp", (28, 28, 1), 79510), ("lenet", (28, 28, 1), 61706), ("cnn", (32, 32, 3), 977866)],
)
def test_parameter_counts(model, shape, parameters):
    params = jax.eval_shape(make_task(model, shape, 10).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


@pytest.mark.parametrize("model", models.parts)
def test_models_fit_every_shape_from_their_least(model):
    least = models.parts[model].traits["least"]
    for side in (least, least + 1, 28):
        task = make_task(model, (side, side, 3), 7)
        params = task.init(jax.random.key(0))
        assert task.predict(params, jnp.ones((2, side, side, 3))).shape == (2, 7)
    if least > 1:
        with pytest.raises(ConfigError, match=f"at least {least}x{least} pixels"):
            make_task(model, (least - 1, 40, 1), 10)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("window", "pad", "c", "o", "side"), [(3, 1, 3, 4, 8), (4, 1, 5, 6, 7), (5, 2, 1, 6, 9), (5, 0, 2, 3, 9)]
)
def test_conv_equals_lax_in_value_and_gradient(backend, window, pad, c, o, side, monkeypatch):
    if backend == "gpu":
        monkeypatch.setattr(lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 5, side, side, c)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(3, window, window, c, o)), jnp.float32)

    def plain(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def value_and_gradients(f):
        def total(x, w):
            return (jnp.sin(f(x, w))).sum()

        return each(jax.value_and_grad(total, argnums=(0, 1)), x, w)

    ours = value_and_gradients(lambda x, w: conv(x, w, pad))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(value_and_gradients(plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("window", "stride", "side"), [(2, 2, 8), (2, 2, 9), (3, 2, 32), (4, 2, 15), (3, 1, 7)]
)
def test_max_pool_equals_lax_in_value_and_gradient_ties_too(window, stride, side):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 4, size=(2, side, side, 3)), jnp.float32)  # many ties

    def plain(x):
        shape = (1, window, window, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, shape, (1, stride, stride, 1), "VALID")

    weight = jnp.asarray(rng.normal(size=plain(x).shape), jnp.float32)
    np.testing.assert_array_equal(max_pool(x, window, stride), plain(x))
    ours = jax.grad(lambda x: (max_pool(x, window, stride) * weight).sum())(x)
    np.testing.assert_allclose(ours, jax.grad(lambda x: (plain(x) * weight).sum())(x), atol=1e-5)


class Users(nn.Module):
    classes: int
    width: int = 5

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x[0].size, self.classes))
        return x.reshape(len(x), -1) @ kernel


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(x.reshape(len(x), -1))


def test_a_users_module(monkeypatch):
    task = make_task(f"{__name__}:Users(width=3)", (4, 4, 1), 3)
    assert task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4, 4, 1))).shape == (2, 3)
    with jax.numpy_rank_promotion("allow"), pytest.raises(ConfigError, match="keeps batch_stats"):
        make_task(f"{__name__}:Normed", (2, 5, 1), 10)
    with pytest.raises(ConfigError, match=r"returns .* it must return logits"):
        make_task(f"{__name__}:Users(classes=4)", (4, 4, 1), 3)
