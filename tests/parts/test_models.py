import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from ubar_jax.parts.tasks import make_task, models
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
    least = models.parts[model].traits.least
    for side in (least, least + 1, 28):  # make_task refuses a model that does not run
        task = make_task(model, (side, side, 3), 7)
        params = jax.eval_shape(task.init, jax.random.key(0))
        shape = jax.eval_shape(task.predict, params, jnp.ones((2, side, side, 3))).shape
        assert shape == (2, 7)
    if least > 1:
        with pytest.raises(ConfigError, match=f"at least {least}x{least} pixels"):
            make_task(model, (least - 1, 40, 1), 10)


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
