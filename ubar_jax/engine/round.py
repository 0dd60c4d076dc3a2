"""The algorithm: one synchronous round of the whole network (Algorithm 1 of the paper)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from ubar_jax.config import Config
from ubar_jax.engine.program import Drawing, Program, task_of
from ubar_jax.numerics import linalg, nn
from ubar_jax.parts.aggregation import Rule, aggregate, make_inbox
from ubar_jax.parts.byzantine import messages_of, tailored_since
from ubar_jax.registry import ConfigError
from ubar_jax.types import Data, Drawn, Graph, Knobs, Metrics, RoundState, Task, View

if TYPE_CHECKING:
    import optax

# Names of numbers that every run has, which a rule's scalars may not have.
CURVES = {*Metrics._fields, "round", "epoch", "seconds", "accuracy", "consensus", "worst", "mean", "std"}
CURVES |= {"train_loss", "digest", "diverged"}

# Folded into the run's key, these differ from every round's number.
TRAINING, JUDGING, REMEMBERING = (jnp.iinfo(jnp.int32).max - i for i in range(3))


def make_round(program: Program) -> Callable:
    """Returns `step(state, drawn, data, graph, knobs, rounds) -> (state, Metrics)`; `rounds`: of the run.

    The r nodes that train are the benign ones, and also the Byzantine ones if the attack needs their
    models. Models and messages are matrices; the state is that of `to_rows`.
    """
    task, optimizer = task_of(program.learner), program.optimizer()
    unravel = unraveller(task)
    rule, attack, schedule = program.rule, program.attack, program.schedule
    benign, byzantine, pairs = program.benign, program.byzantine, program.pairs

    def step(state: RoundState, drawn: Drawn, data: Data, graph: Graph, knobs: Knobs, rounds: Array):
        key, trained = jax.random.fold_in(state.key, state.t), len(drawn.train)

        def loss_of_params(params: Any, index: Array, y: Array) -> Array:
            """Images are read node by node: those of all nodes would not fit the cache."""
            return task.loss(params, normalise(data, data.x[index]), y)

        def loss_at(model: Array, index: Array, y: Array) -> Array:
            return loss_of_params(unravel(model), index, y)

        def labelled(index: Array) -> tuple[Array, Array]:
            y = data.y[index]
            if poison := attack.traits.poison:
                told = poison(y[benign:], program.learner.classes, state.t, **attack.of(poison))
                y = y.at[benign:].set(told)
            return index, y

        # Every node draws a batch and takes the gradient at its own model, before mixing.
        train = make_training(loss_of_params, unravel, optimizer, program.local_steps)
        batch, models = labelled(drawn.train), state.params
        rate = knobs.learning_rate * schedule(state.t // knobs.rounds_per_epoch)
        losses, update, opt_state = train(models, state.opt_state, *nn.mine(batch), rate)
        if program.order == "then":
            models = models + update
        own, updates, (loss, first_loss) = nn.whole((models, update, losses), trained)

        # On which examples the rule takes losses, and the loss of own model on them.
        judge = tuple(leaf[:, : program.batch] for leaf in batch)
        if drawn.judge is not None:
            judge = labelled(drawn.judge)
        own_loss = first_loss
        if program.order == "then" or drawn.judge is not None:
            own_loss = nn.each(loss_at, own, *judge)

        def gradient():
            found = nn.each(lambda model, *b: jax.grad(loss_of_params)(unravel(model), *b), own, *judge)
            return ravel(found)

        # Every node broadcasts its model; the attack provides the Byzantine rows.
        heard = Graph(graph.neighbours[:trained], graph.mask[:trained])
        since = tailored_since(attack)

        def mix(sent: Array, known: Array | None = None) -> tuple[Array, dict, Any]:
            def loss_of(receiver, row):
                if not pairs:
                    raise ConfigError(f"{rule} asks for losses: register it with pairs=, how many it takes")
                return losses_on(loss_at, sent, judge, receiver, row, known)

            rows = heard.neighbours
            if since is not None:  # the last n_b rows: what the attackers send to each benign receiver
                theirs = (rows >= benign) & (jnp.arange(trained) < benign)[:, None] & (state.t >= since)
                rows = jnp.where(theirs, len(sent) - benign + jnp.arange(trained)[:, None], rows)
            inbox = make_inbox(
                own=own,
                sent=sent,
                rows=rows,
                graph=graph,
                benign=benign,
                count=knobs.count,
                t=state.t,
                own_loss=own_loss,
                loss_of=loss_of,
                pairs=pairs,
                gradient=gradient,
                update=updates,
                learning_rate=rate,
                rounds=rounds,
                classes=program.learner.classes,
                key=jax.random.fold_in(key, 1),  # the attack uses `key` itself
            )
            return aggregate(rule, inbox, state.rule_memory)

        sent, attack_memory = own[:benign], state.attack_memory
        if byzantine:
            # An attack may try many messages on the rule: evaluate the honest messages only once.
            slots = Graph(*(a[:, : program.benign_slots] for a in heard))
            known = honest_losses(loss_at, sent, judge, slots) if pairs else None
            view = View(
                own=own,
                update=updates,
                graph=without_lost(graph, own[:benign], rule),
                benign=benign,
                byzantine=byzantine,
                benign_slots=program.benign_slots,
                t=state.t,
                deployed=lambda sent: mix(sent, known)[:2],
            )
            lies, attack_memory = messages_of(attack, key, view, attack_memory, **knobs.attack)
            sent = jnp.concatenate([sent, lies])

        # General Update Function: alpha x_i + (1 - alpha) R - lambda grad l(x_i).
        mixed, info, rule_memory = mix(sent)
        alpha = nn.mine(knobs.alpha)[:, None]
        new = alpha * models + (1 - alpha) * nn.mine(mixed)
        if program.order == "while":
            new = new + update
        finite = nn.whole(jnp.all(jnp.isfinite(new), axis=1), trained)
        state = RoundState(new, opt_state, state.t + 1, state.key, rule_memory, attack_memory)
        return state, observe(info, loss, finite, heard, benign)

    return step


def make_chunk(program: Program) -> Callable:
    """Returns `chunk(state, drawn, data, graph, knobs, rounds) -> (state, Metrics)`: the rounds drawn.

    No more than `rounds` in all if the program is `ragged`. Metrics have the rounds in front; what was
    accepted is added up.
    """
    step = make_round(program)

    def chunk(state: RoundState, drawn: Drawn, data: Data, graph: Graph, knobs: Knobs, rounds: Array):
        def body(state, now):
            def go(state):
                return step(state, now, data, graph, knobs, rounds)

            if not program.ragged:
                return go(state)
            blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(go, state)[1])
            return lax.cond(state.t < rounds, go, lambda state: (state, blank), state)

        state, seen = lax.scan(body, to_rows(state), drawn)
        return from_rows(state, program), seen._replace(accepted=jnp.sum(seen.accepted, axis=0))

    return chunk


def to_rows(state: RoundState) -> RoundState:
    """The state during a chunk: models as a matrix, of which every device has the rows of its nodes."""
    models, opt_state = nn.mine((ravel(state.params), state.opt_state))
    return state._replace(params=models, opt_state=opt_state)


def from_rows(state: RoundState, program: Program) -> RoundState:
    """The state between chunks: models as a stacked pytree, all on every device."""
    models, opt_state = nn.whole((state.params, state.opt_state), program.trained)
    return state._replace(params=jax.vmap(unraveller(task_of(program.learner)))(models), opt_state=opt_state)


def make_training(
    loss: Callable, unravel: Callable, optimizer: "optax.GradientTransformation", steps: int
) -> Callable:
    """Returns `train(models, opt_state, index, y, rate) -> ((loss, first loss), update, opt_state)`.

    For any rows of models [r, d]. L = `steps` steps of SGD per node, on L batches of equal size, index
    [r, L b]. The update [r, d] is the sum of the steps; the loss [r] is their mean, each taken before the
    step; the first loss is that at `models`.
    """

    def one(models, opt_state, index, y, rate):
        def gradient(model, *batch):  # a pytree: to make it a row inside the loop is slow
            return jax.value_and_grad(loss)(unravel(model), *batch)

        found, gradients = nn.in_turn(gradient, models, index, y)
        direction, opt_state = jax.vmap(optimizer.update)(gradients, opt_state, jax.vmap(unravel)(models))
        return found, -rate * ravel(direction), opt_state

    def several(models, opt_state, index, y, rate):
        def body(carry, batch):
            (total, opt_state), (index, y) = carry, batch
            found, update, opt_state = one(models + total, opt_state, index, y, rate)
            return (total + update, opt_state), found

        batches = tuple(jnp.moveaxis(a.reshape(len(a), steps, -1), 1, 0) for a in (index, y))
        (total, opt_state), losses = lax.scan(body, (jnp.zeros_like(models), opt_state), batches)
        return (jnp.mean(losses, axis=0), losses[0]), total, opt_state

    def once(models, opt_state, index, y, rate):
        found, update, opt_state = one(models, opt_state, index, y, rate)
        return (found, found), update, opt_state

    return once if steps == 1 else several


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
    loss_at: Callable, sent: Array, batch: tuple, receiver: Array, row: Array, known: Array | None = None
) -> Array:
    """[P] loss of message `row` [P] on the batch of `receiver` [P], as `loss_at(model [d], *its batch)`.

    Receiver r is padding. `known` [r, k] are the losses of the first k messages, if computed before.
    """
    receivers, first = len(batch[0]), 0 if known is None else known.shape[1]

    def one(i, j):
        def loss():
            return loss_at(sent[j], *(leaf[i] for leaf in batch))

        return lax.cond((i < receivers) & (j >= first), loss, lambda: jnp.inf)  # padding is not computed

    losses = nn.deal(functools.partial(nn.in_turn, one), receiver, row)
    return losses if known is None else jnp.where(row < first, known[receiver, row], losses)


def honest_losses(loss_at: Callable, sent: Array, batch: tuple, graph: Graph) -> Array:
    """[r, n_b] loss of every honest neighbour's message on the receiver's batch; unspecified elsewhere."""
    receivers, honest = len(graph.mask), graph.mask & (graph.neighbours < len(sent))
    receiver = jnp.where(honest, jnp.arange(receivers)[:, None], receivers)
    row = jnp.where(honest, graph.neighbours, 0)
    losses = losses_on(loss_at, sent, batch, receiver.ravel(), row.ravel())
    known = jnp.zeros((receivers, len(sent))).at[receiver.ravel(), row.ravel()]
    return known.set(losses, mode="drop")


def ravel(params) -> Array:
    """Stacked pytree -> [r, d]."""
    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(params)], axis=1)


def unraveller(task: Task) -> Callable:
    """The function from one row [d] to one node's pytree."""
    one = jax.eval_shape(task.init, jax.random.key(0))
    return ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), one))[1]


def normalise(data: Data, x: Array) -> Array:
    """uint8 images -> float32, scaled so that the training set has mean 0 and deviation 1 per channel."""
    mean, std = (v.reshape((1,) * (x.ndim - 1) + (-1,)) for v in (data.mean, data.std))
    return (x.astype(jnp.float32) - mean) / std


def observe(info: dict, loss: Array, finite: Array, graph: Graph, benign: int) -> Metrics:
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
        finite=finite[:benign],
        byzantine_candidates=jnp.asarray(share("candidates"), jnp.float32),
        byzantine_selected=jnp.asarray(share("selected"), jnp.float32),
        accepted=info.get("selected", none)[:benign],
        scalars=scalars,
    )


def draw(how: Drawing, shards: Array, held_out: Array | None, key: Array, t: Array) -> Drawn:
    """The examples of the next chunk of rounds: train [rounds, r, L b] and judge [rounds, r, b] or None.

    From the indices of the r nodes: shards [r, s], held_out [r, v] or None.
    """
    size = how.local_steps * how.batch
    if how.judge == "next":  # what the next round trains on; not seen before only in the first epoch
        index = batches(shards, key, t, how.rounds + 1, size)
        return Drawn(index[:-1], index[1:, :, : how.batch])
    train = batches(shards, key, t, how.rounds, size)
    if how.judge == "batch":
        return Drawn(train)
    assert held_out is not None
    return Drawn(train, batches(held_out, key, t, how.rounds, how.batch, JUDGING))


def batches(shards: Array, key: Array, t: Array, rounds: int, batch: int, purpose: int = TRAINING) -> Array:
    """[rounds, r, b] indices of the next rounds' examples: per epoch, a new permutation of every share.

    The permutation of an epoch comes from `fold_in(data key, epoch)`; the end of a share that does not
    fill a batch is dropped.
    """
    n, share = shards.shape
    per_epoch = share // batch
    key = jax.random.fold_in(key, purpose)
    first = t // per_epoch
    epochs = first + jnp.arange((rounds - 1) // per_epoch + 2)

    def shuffle(epoch):
        order = jax.random.bits(jax.random.fold_in(key, epoch), (n, share))
        order = jnp.argsort(order, axis=1)[:, : per_epoch * batch]
        return jnp.take_along_axis(shards, order, axis=1).reshape(n, per_epoch, batch)

    shuffled = jax.lax.map(shuffle, epochs)  # [epochs, n, per_epoch, b]
    steps = t + jnp.arange(rounds)
    return shuffled[steps // per_epoch - first, :, steps % per_epoch]
