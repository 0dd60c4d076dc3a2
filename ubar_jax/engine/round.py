"""The algorithm: one synchronous round of the whole network (Algorithm 1 of the paper)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from ubar_jax.config import Config
from ubar_jax.engine.program import Program, task_of
from ubar_jax.numerics import linalg, nn
from ubar_jax.parts.aggregation import Rule, aggregate, make_inbox
from ubar_jax.parts.byzantine import tailored_since
from ubar_jax.registry import ConfigError
from ubar_jax.types import Data, Graph, Knobs, Metrics, RoundState, Task, View

# Names of numbers that every run has, which a rule's scalars may not have.
CURVES = {*Metrics._fields, "round", "epoch", "seconds", "accuracy", "consensus", "worst", "mean", "std"}
CURVES |= {"train_loss", "digest", "diverged"}


def make_round(program: Program) -> Callable:
    """Returns `step(state, index, data, graph, knobs) -> (state, Metrics)`; index [r, b] is the batch.

    The r nodes that train are the benign ones, and also the Byzantine ones if the attack needs their
    models. The state is a stacked pytree, messages are a matrix [n, d]; models are converted once per round.
    """
    task, optimizer = task_of(program.learner), program.optimizer()
    rule, attack, schedule = program.rule, program.attack, program.schedule
    benign, byzantine, pairs = program.benign, program.byzantine, program.pairs

    def step(state: RoundState, index: Array, data: Data, graph: Graph, knobs: Knobs):
        key, trained = jax.random.fold_in(state.key, state.t), len(index)
        own, unravel = ravel(state.params)

        # Every node draws a batch and takes the gradient at its own model, before mixing.
        x, y = normalise(data, data.x[index]), data.y[index]
        if poison := attack.traits.poison:
            y = y.at[benign:].set(poison(y[benign:], program.learner.classes, state.t, **attack.of(poison)))
        loss, gradient = nn.each(jax.value_and_grad(task.loss), state.params, x, y)
        direction, opt_state = jax.vmap(optimizer.update)(gradient, state.opt_state, state.params)
        rate = knobs.learning_rate * schedule(state.t // knobs.rounds_per_epoch)
        update = -rate * ravel(direction)[0]

        # Every node broadcasts its model; the attack provides the Byzantine rows.
        heard = Graph(graph.neighbours[:trained], graph.mask[:trained])
        since = tailored_since(attack)

        def mix(sent: Array, known: Array | None = None) -> tuple[Array, dict]:
            def loss_of(receiver, row):
                if not pairs:
                    raise ConfigError(f"{rule} asks for losses: register it with pairs=, how many it takes")
                return losses_on(task, unravel, sent, (x, y), receiver, row, known)

            rows = heard.neighbours
            if since is not None:  # the last n_b rows: what the attackers send to each benign receiver
                theirs = (rows >= benign) & (jnp.arange(trained) < benign)[:, None] & (state.t >= since)
                rows = jnp.where(theirs, len(sent) - benign + jnp.arange(trained)[:, None], rows)
            inbox = make_inbox(
                own=own,
                sent=sent,
                graph=heard,
                count=knobs.count,
                t=state.t,
                own_loss=loss,
                loss_of=loss_of,
                pairs=pairs,
                rows=rows,
            )
            return aggregate(rule, inbox)

        sent = own[:benign]
        if byzantine:
            # An attack may try many messages on the rule: evaluate the honest messages only once.
            slots = Graph(*(a[:, : program.benign_slots] for a in heard))
            known = honest_losses(task, unravel, sent, (x, y), slots) if pairs else None
            deployed = functools.partial(mix, known=known)
            view = View(
                own=own,
                update=update,
                graph=without_lost(graph, own[:benign], rule),
                benign=benign,
                byzantine=byzantine,
                benign_slots=program.benign_slots,
                t=state.t,
                deployed=deployed,
            )
            sent = jnp.concatenate([sent, attack(key, view, **knobs.attack)])

        # General Update Function: alpha x_i + (1 - alpha) R - lambda grad l(x_i).
        mixed, info = mix(sent)
        alpha = knobs.alpha[:, None]
        new = alpha * own + (1 - alpha) * mixed + update
        state = RoundState(jax.vmap(unravel)(new), opt_state, state.t + 1, state.key)
        return state, observe(info, loss, new, heard, benign)

    return step


def without_lost(graph: Graph, honest: Array, rule: Rule) -> Graph:
    """The graph without benign nodes whose model [n_b, d] is not finite or, if the rule defends, too large.

    Otherwise one such model would make all means NaN, and so all attacks on the other nodes.
    """
    ids, mask = graph
    defends = rule.traits.defends
    alive = linalg.usable(honest) if defends else jnp.all(jnp.isfinite(honest), axis=1)
    alive = jnp.concatenate([alive, jnp.ones(len(mask) - len(honest), bool)])
    return Graph(ids, mask & alive[ids] & alive[:, None])


def losses_on(
    task: Task,
    unravel: Callable,
    sent: Array,
    batch: tuple,
    receiver: Array,
    row: Array,
    known: Array | None = None,
) -> Array:
    """[P] loss of message `row` [P] on the batch of `receiver` [P]; receiver r is padding.

    `known` [r, k] are the losses of the first k messages, if computed before.
    """
    receivers, first = len(batch[0]), 0 if known is None else known.shape[1]

    def one(i, j):
        def loss():
            return task.loss(unravel(sent[j]), *(leaf[i] for leaf in batch))

        return lax.cond((i < receivers) & (j >= first), loss, lambda: jnp.inf)  # padding is not computed

    losses = nn.each(one, receiver, row)
    return losses if known is None else jnp.where(row < first, known[receiver, row], losses)


def honest_losses(task: Task, unravel: Callable, sent: Array, batch: tuple, graph: Graph) -> Array:
    """[r, n_b] loss of every honest neighbour's message on the receiver's batch; unspecified elsewhere."""
    receivers, honest = len(graph.mask), graph.mask & (graph.neighbours < len(sent))
    receiver = jnp.where(honest, jnp.arange(receivers)[:, None], receivers)
    row = jnp.where(honest, graph.neighbours, 0)
    losses = losses_on(task, unravel, sent, batch, receiver.ravel(), row.ravel())
    known = jnp.zeros((receivers, len(sent))).at[receiver.ravel(), row.ravel()]
    return known.set(losses, mode="drop")


def ravel(params) -> tuple[Array, Callable]:
    """Stacked pytree -> ([r, d], function from one row [d] back to one node's pytree)."""
    leaves = jax.tree.leaves(params)
    one = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), params)
    _, unravel = ravel_pytree(one)
    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1), unravel


def normalise(data: Data, x: Array) -> Array:
    """uint8 images -> float32, scaled so that the training set has mean 0 and deviation 1 per channel."""
    mean, std = (v.reshape((1,) * (x.ndim - 1) + (-1,)) for v in (data.mean, data.std))
    return (x.astype(jnp.float32) - mean) / std


def observe(info: dict, loss: Array, new: Array, graph: Graph, benign: int) -> Metrics:
    """The metrics of a round, over the benign receivers only."""
    byzantine = graph.neighbours[:benign] >= benign

    def share(name):
        if name not in info:
            return jnp.nan
        edges = info[name][:benign]
        return jnp.sum(edges & byzantine) / jnp.sum(edges)

    scalars = {name: value for name, value in info.items() if jnp.ndim(value) == 0}
    if taken := sorted(scalars.keys() & (CURVES | {f.name for f in dataclasses.fields(Config)})):
        raise ConfigError(
            f"the rule's info has a scalar {taken[0]!r}, which is the name of another number; rename it"
        )
    none = jnp.zeros_like(graph.mask)
    return Metrics(
        loss=jnp.mean(loss[:benign]),
        finite=jnp.all(jnp.isfinite(new[:benign]), axis=1),
        byzantine_candidates=jnp.asarray(share("candidates"), jnp.float32),
        byzantine_selected=jnp.asarray(share("selected"), jnp.float32),
        accepted=info.get("selected", none)[:benign],
        scalars=scalars,
    )


def batches(data: Data, key: Array, t: Array, rounds: int, batch: int, trained: int) -> Array:
    """[rounds, r, b] indices of the next rounds' examples: per epoch, a new permutation of every share.

    The permutation of an epoch comes from `fold_in(data key, epoch)`; the end of a share that does not
    fill a batch is dropped.
    """
    shards = data.shards[:trained]
    n, share = shards.shape
    per_epoch = share // batch
    key = jax.random.fold_in(key, jnp.iinfo(jnp.int32).max)  # different from every round's key
    first = t // per_epoch
    epochs = first + jnp.arange((rounds - 1) // per_epoch + 2)

    def shuffle(epoch):
        order = jax.random.bits(jax.random.fold_in(key, epoch), (n, share))
        order = jnp.argsort(order, axis=1)[:, : per_epoch * batch]
        return jnp.take_along_axis(shards, order, axis=1).reshape(n, per_epoch, batch)

    shuffled = jax.lax.map(shuffle, epochs)  # [epochs, n, per_epoch, b]
    steps = t + jnp.arange(rounds)
    return shuffled[steps // per_epoch - first, :, steps % per_epoch]
