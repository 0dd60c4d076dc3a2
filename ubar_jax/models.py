"""Models: flax modules and the pure functions of one node's parameters that they give."""

import importlib
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

from ubar_jax.nn import Conv, max_pool
from ubar_jax.registry import ConfigError, Number, Registry, split_spec
from ubar_jax.types import Task

models = Registry("model", given=1, traits={"least": 1})  # least: smallest image side it fits


class Dense(nn.Module):
    """`flax.linen.Dense` whose bias is added by an explicit broadcast."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = nn.Dense(self.features, use_bias=False, name="linear")(x)
        return y + self.param("bias", nn.initializers.zeros, (self.features,))[None, :]


class Head(nn.Module):
    """Flatten, then dense layers with ReLU between them."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for width in self.widths[:-1]:
            x = nn.relu(Dense(width)(x))
        return Dense(self.widths[-1])(x)


class LeNet(nn.Module):
    """conv 5x5x6 pad 2, pool 2, conv 5x5x16, pool 2, dense 120, 84."""

    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(max_pool(Conv(6, 5, pad=2)(x), 2, 2))
        x = nn.relu(max_pool(Conv(16, 5)(x), 2, 2))
        return Head((120, 84, self.classes))(x)


class CNN(nn.Module):
    """conv 3x3x16 pad 1, pool 3/2, conv 4x4x64 pad 1, pool 4/2, dense 384, 192."""

    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(max_pool(Conv(16, 3, pad=1)(x), 3, 2))
        x = nn.relu(max_pool(Conv(64, 4, pad=1)(x), 4, 2))
        return Head((384, 192, self.classes))(x)


@models.register
def mlp(classes: int, hidden: Number(1, integer=True) = 100) -> nn.Module:
    """One hidden layer with ReLU: 79,510 parameters on 28x28x1."""
    return Head((hidden, classes))


@models.register(least=12)
def lenet(classes: int) -> nn.Module:
    """LeNet-5 with max-pooling: 61,706 parameters on 28x28x1, the cheap CNN."""
    return LeNet(classes)


@models.register(least=11)
def cnn(classes: int) -> nn.Module:
    """The paper's: two convolutions with overlapping pools, 977,866 parameters on 32x32x3."""
    return CNN(classes)


def make_task(spec: str, shape: tuple[int, ...], classes: int) -> Task:
    """The task of a registered model or of a user's flax module `package.module:Class(args)`."""
    module = _module(spec, shape, classes)

    def predict(params, x):
        return module.apply({"params": params}, x)

    def loss(params, x, y):
        return optax.losses.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()

    def init(key):
        return module.init(key, jnp.zeros((1, *shape)))["params"]

    try:
        variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *shape)))
        logits = jax.eval_shape(module.apply, variables, jnp.zeros((2, *shape)))
    except Exception as error:
        raise ConfigError(f"model {spec!r} does not run on images of {shape}: {error}") from error
    if set(variables) != {"params"}:
        raise ConfigError(
            f"model {spec!r} keeps {', '.join(sorted(set(variables) - {'params'}))} besides its "
            "parameters; nodes exchange parameters only, so use a model without (no batch norm)"
        )
    if logits.shape != (2, classes):
        raise ConfigError(
            f"model {spec!r} returns {logits.shape} for a batch of 2; it must return logits [b, {classes}]"
        )
    return Task(init, loss, predict)


def check(spec: str) -> str:
    """The canonical form of a model's spec."""
    return spec if ":" in spec else str(models.parse(spec))


def _module(spec: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    if ":" in spec:
        return _users_module(spec, classes)
    parsed = models.parse(spec)
    least = parsed.part.traits["least"]
    if min(shape[:2]) < least:
        raise ConfigError(
            f"model {spec!r} needs images of at least {least}x{least} pixels, not "
            f"{shape[0]}x{shape[1]}; use a larger data set or the model 'mlp'"
        )
    return parsed(classes)


def _users_module(spec: str, classes: int) -> nn.Module:
    path, _, call = spec.partition(":")
    name, positional, keywords = split_spec(call, "model")
    try:
        made = getattr(importlib.import_module(path), name)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f"model {spec!r}: {error}; write package.module:Class of an importable flax module"
        ) from error
    if "classes" in inspect.signature(made).parameters:
        keywords = {"classes": classes} | keywords
    try:
        return made(*positional, **keywords)
    except TypeError as error:
        raise ConfigError(f"model {spec!r} cannot be made: {error}") from error
