"""Evaluation of all benign nodes on the test set."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ubar_jax.engine.round import normalise, ravel
from ubar_jax.numerics import nn
from ubar_jax.types import Data, Task

CHUNK = 500  # test images per forward pass


def make_evaluate(task: Task, benign: int) -> Callable:
    """Returns `evaluate(params, data, x, y) -> {accuracy [n_b], loss [n_b], consensus []}`.

    x [N, H, W, C] uint8 and y [N] are test examples. A prediction that is not finite counts as wrong.
    Consensus is the root mean squared distance of the benign models to their mean.
    """

    def evaluate(params, data: Data, x: Array, y: Array) -> dict[str, Array]:
        size = len(x)
        chunk = min(CHUNK, size)
        padding = -size % chunk
        valid = jnp.ones(size, bool)

        def fold(a):
            """[N, ...] -> [chunks, CHUNK, ...]; padding is zero, so it is marked as not valid."""
            return jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))).reshape(-1, chunk, *a.shape[1:])

        def node(params):
            def step(total, part):
                x, y, valid = part
                logits = task.predict(params, normalise(data, x))
                right = (jnp.argmax(logits, axis=1) == y) & jnp.all(jnp.isfinite(logits), axis=1)
                chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)[:, 0]
                return total + jnp.stack([right * valid, jnp.where(valid, -chosen, 0)]).sum(axis=1), None

            total, _ = lax.scan(step, jnp.zeros(2), (fold(x), fold(y), fold(valid)))
            return total / size

        params = jax.tree.map(lambda leaf: leaf[:benign], params)
        accuracy, loss = nn.each(node, params).T
        models = ravel(params)
        spread = jnp.square(models - jnp.mean(models, axis=0, keepdims=True))
        consensus = jnp.sqrt(jnp.mean(jnp.sum(spread, axis=1)))
        return {"accuracy": accuracy, "loss": loss, "consensus": consensus}

    return evaluate


def summary(accuracy: np.ndarray) -> dict[str, np.ndarray]:
    """[..., n_b] -> [...]: worst, mean and standard deviation over the nodes."""
    return {"worst": accuracy.min(-1), "mean": accuracy.mean(-1), "std": accuracy.std(-1)}
