"""Models: flax modules, and their conversion to pure functions of one node's parameters.

flax and optax are imported when a model is made, so that commands that need no model start quickly.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp

from ubar_jax.registry import ConfigError, Number, Registry, split_spec
from ubar_jax.types import Task

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True)
class ModelTraits:
    """What the simulator must know about a model."""

    least: int = 1  # smallest image side that the model accepts


models = Registry("model", given=1, traits=ModelTraits)


@models.register
def mlp(classes: int, hidden: Annotated[int, Number(1, integer=True)] = 100) -> "nn.Module":
    """One hidden layer with ReLU: 79,510 parameters on 28x28x1."""
    from ubar_jax.parts.flax_modules import Head

    return Head((hidden, classes))


@models.register(least=12)
def lenet(classes: int) -> "nn.Module":
    """LeNet-5 with max-pooling: 61,706 parameters on 28x28x1; the cheaper CNN."""
    from ubar_jax.parts.flax_modules import LeNet

    return LeNet(classes)


@models.register(least=11)
def cnn(classes: int) -> "nn.Module":
    """The paper's CNN: two convolutions with overlapping pools; 977,866 parameters on 32x32x3."""
    from ubar_jax.parts.flax_modules import CNN

    return CNN(classes)


def make_task(spec: str, shape: tuple[int, ...], classes: int) -> Task:
    """The task of a registered model or of a user's flax module, written `package.module:Class(args)`."""
    import optax

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
            "parameters; nodes exchange only parameters, so use a model without such state (no batch norm)"
        )
    if logits.shape != (2, classes):
        raise ConfigError(
            f"model {spec!r} returns {logits.shape} for a batch of 2; it must return logits [b, {classes}]"
        )
    return Task(init, loss, predict)


def check(spec: str) -> str:
    """The canonical form of a model's spec; a user's module is left as it is."""
    return spec if ":" in spec else str(models.parse(spec))


def _module(spec: str, shape: tuple[int, ...], classes: int) -> "nn.Module":
    if ":" in spec:
        return _users_module(spec, classes)
    parsed = models.parse(spec)
    least = parsed.traits.least
    if min(shape[:2]) < least:
        raise ConfigError(
            f"model {spec!r} needs images of at least {least}x{least} pixels, not "
            f"{shape[0]}x{shape[1]}; use a larger data set or the model 'mlp'"
        )
    return parsed(classes)


def _users_module(spec: str, classes: int) -> "nn.Module":
    made = users_class(spec)
    _, positional, keywords = split_spec(spec.partition(":")[2], "model")
    if "classes" in inspect.signature(made).parameters:
        keywords = {"classes": classes} | keywords
    try:
        return made(*positional, **keywords)
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(f"model {spec!r} cannot be made ({type(error).__name__}: {error})") from error


def users_class(spec: str) -> "type[nn.Module]":
    """The flax module class that `package.module:Class(args)` names; any other object is refused."""
    import flax.linen as nn

    path, _, call = spec.partition(":")
    name, _, _ = split_spec(call, "model")
    hint = "write package.module:Class, the path of an importable flax module"
    try:
        made = getattr(importlib.import_module(path), name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(
            f"model {spec!r} cannot be imported ({type(error).__name__}: {error}); {hint}"
        ) from error
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise ConfigError(f"model {spec!r}: {name} is not a class of flax.linen.Module; {hint}")
    return made
