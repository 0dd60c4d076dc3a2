"""Rules that remember how their neighbours behaved."""

from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import betainc

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.registry import Choice, Number
from ubar_jax.types import Inbox, Start

ROUNDING = 1e-6  # of cosines in float32


class Record(NamedTuple):
    """What AFA remembers of each neighbour."""

    good: Array  # [r, K]: alpha, 3 + number of good messages
    bad: Array  # [r, K]: beta, 3 + number of bad messages
    blocked: Array  # [r, K] bool


def _clean_record(start: Start) -> Record:
    shape = (len(start.own), start.slots)
    return Record(jnp.full(shape, 3.0), jnp.full(shape, 3.0), jnp.zeros(shape, bool))


@rules.register(init=_clean_record)
def afa(
    inbox: Inbox,
    record: Record,
    of: Annotated[str, Choice(("model", "step"))] = "model",
    xi: Annotated[float, Number(0)] = 2.0,
    slower: Annotated[float, Number(0)] = 0.5,
):
    """AFA, the hidden-Markov-model defence (Munoz-Gonzalez, Co and Lupu 2019).

    Repeat: m is the mean of the messages left, weighted by p_j = alpha / (alpha + beta); s_j is the cosine
    of x_j and m; drop those more than xi standard deviations from the median, on the side where the mean of
    the s_j lies (below if mean < median), and add `slower` to xi; until none is dropped. Then count alpha_j
    for the kept, beta_j for the dropped, and block j for ever if P(Beta(alpha_j, beta_j) < 0.5) > 0.95. The
    result is the mean of the kept with the new weights. `of=step`: cosines of x_j - x_i, since whole models
    all point alike. Knows no number of attackers. Cost |N_i|^2 d; the products are shared by all receivers.
    """
    mask = inbox.graph.mask & ~record.blocked
    lengths, cosines = _directions(inbox, of)

    def trust(record):
        return record.good / (record.good + record.bad)

    def narrow(state):
        left, xi, _ = state
        pull = jnp.where(left, trust(record) * lengths, 0)
        along = jnp.sum(cosines * pull[:, None, :], axis=2)
        whole = jnp.sum(pull * along, axis=1, keepdims=True)
        similar = along / jnp.sqrt(jnp.maximum(whole, 1e-30))
        count = jnp.maximum(jnp.sum(left, axis=1, keepdims=True), 1)
        mean = jnp.sum(jnp.where(left, similar, 0), axis=1, keepdims=True) / count
        squares = jnp.where(left, jnp.square(similar - mean), 0)
        spread = jnp.sqrt(jnp.sum(squares, axis=1, keepdims=True) / count)
        ordered = jnp.sort(jnp.where(left, similar, jnp.inf), axis=1)
        middle = [jnp.take_along_axis(ordered, at, axis=1) for at in ((count - 1) // 2, count // 2)]
        median = (middle[0] + middle[1]) / 2
        beyond = jnp.where(mean < median, median - similar, similar - median) - xi * spread
        drop = left & (beyond > ROUNDING)
        return left & ~drop, xi + slower, jnp.any(drop)

    start = (mask, jnp.float32(xi), jnp.ones((), bool))
    kept, _, _ = lax.while_loop(lambda state: state[2], narrow, start)
    record = Record(record.good + (mask & kept), record.bad + (mask & ~kept), record.blocked)
    record = record._replace(blocked=record.blocked | (betainc(record.good, record.bad, 0.5) > 0.95))
    kept &= ~record.blocked
    weights = jnp.where(kept, trust(record), 0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-30)
    mixed = jnp.where(jnp.any(kept, axis=1)[:, None], linalg.weighted_mean(inbox, weights), inbox.own)
    return mixed, {"selected": kept}, record


def _directions(inbox: Inbox, of: str) -> tuple[Array, Array]:
    """([r, K] lengths, relative to the longest, [r, K, K] cosines) of the messages, or of x_j - x_i."""
    if of == "model":
        gram = jnp.matmul(inbox.sent, inbox.sent.T, precision=linalg.HIGHEST)
        gram = ((gram + gram.T) / 2)[inbox.rows[:, :, None], inbox.rows[:, None, :]]
    else:
        squares = linalg.all_distances(inbox)
        to_own = squares[:, :-1, -1]
        gram = (to_own[:, :, None] + to_own[:, None, :] - squares[:, :-1, :-1]) / 2
    squares = jnp.diagonal(gram, axis1=1, axis2=2)
    pointing = inbox.graph.mask & (squares > 0)  # dropped messages are zero, and 0 / 0 is NaN
    lengths = jnp.sqrt(jnp.where(pointing, squares, 1))
    cosines = gram / (lengths[:, :, None] * lengths[:, None, :])
    cosines = jnp.where(pointing[:, :, None] & pointing[:, None, :], cosines, 0)
    lengths = jnp.where(pointing, lengths, 0)
    return lengths / jnp.maximum(jnp.max(lengths, axis=1, keepdims=True), 1e-30), cosines
