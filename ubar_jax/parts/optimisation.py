"""Learning-rate schedules per epoch, and optimizers as optax transformations without a learning rate.

optax is slow to import, so it is imported with the first optimizer.
"""

from typing import TYPE_CHECKING, Annotated

import jax.numpy as jnp
from jax import Array

from ubar_jax.registry import LATER, NoTraits, Number, Registry

if TYPE_CHECKING:
    import optax

schedules = Registry("schedule", given=1, traits=NoTraits)
optimizers = Registry("optimizer", given=0, traits=NoTraits)


@schedules.register
def fading(epoch: Array, half: Annotated[float, Number(0, open_low=True)] = 20.0) -> Array:
    """The paper's schedule: half / (half + epoch), epoch = number of finished epochs."""
    return half / (half + epoch.astype(jnp.float32))


@schedules.register
def constant(epoch: Array) -> Array:
    """Constant learning rate."""
    return jnp.ones(())


@optimizers.register
def sgd() -> "optax.GradientTransformation":
    """Plain SGD (the paper)."""
    import optax

    return optax.identity()


@optimizers.register
def momentum(
    decay: Annotated[float, Number(0, 1, open_high=True)] = 0.9,
    dampening: Annotated[float, Number(0, 1, open_high=True), LATER] = 0.0,
) -> "optax.GradientTransformation":
    """Heavy-ball momentum: m becomes decay m + (1 - dampening) g; with dampening = decay a running mean."""
    import optax

    trace = optax.trace(decay)
    return optax.chain(trace, optax.scale(1 - dampening)) if dampening else trace


@optimizers.register
def adam(
    b1: Annotated[float, Number(0, 1, open_high=True)] = 0.9,
    b2: Annotated[float, Number(0, 1, open_high=True)] = 0.999,
) -> "optax.GradientTransformation":
    """Adam; choose a learning rate near 0.001."""
    import optax

    return optax.scale_by_adam(b1, b2)
