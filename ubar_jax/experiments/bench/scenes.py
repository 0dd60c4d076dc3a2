"""Networks in the middle of a round, and the work of a round on them: ours and that of the torch programs."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jax.flatten_util import ravel_pytree

from ubar_jax.engine.program import Learner, Program
from ubar_jax.engine.round import losses_on, make_chunk, make_training, normalise, ravel
from ubar_jax.numerics import nn
from ubar_jax.parts import topology
from ubar_jax.parts.aggregation import (
    aggregate,
    count_neighbours,
    first_memory,
    losses_per_round,
    make_inbox,
    rules,
)
from ubar_jax.parts.byzantine import attacks
from ubar_jax.parts.data import channel_statistics
from ubar_jax.parts.optimisation import optimizers, schedules
from ubar_jax.parts.tasks import make_task
from ubar_jax.types import Data, Drawn, Graph, Knobs, RoundState, Start, Task

MODELS = {"mlp": (28, 28, 1), "lenet": (28, 28, 1), "cnn": (32, 32, 3)}  # shapes of the images
POSITIONS = {"mlp": (), "lenet": (28 * 28, 10 * 10), "cnn": (32 * 32, 14 * 14)}  # outputs per convolution
NODES, CONNECTION, BATCH = 30, 0.4, 256
CLASSES = 10
NOISE = 1e-2  # standard deviation of the models from x_0, per parameter
RATE = 0.05  # learning rate
ROUNDS = 4  # rounds or steps per timed program: as in a run, memory is allocated once for several
PROGRAMS = {"serial_torch": "loop", "tuned_torch": "tuned"}  # torch files and the names of their columns
TRAINING, ROUND = "training", "round with "  # rows of a time table; every other row is a rule's name


class Scene(NamedTuple):
    """A network in the middle of a round: models, graph, batches and own losses."""

    own: jax.Array  # [n, d]
    graph: Graph  # [n, K]
    batch: tuple  # leaves [n, ...]: what the task's loss needs besides a model
    own_loss: jax.Array  # [n]
    task: Task
    unravel: Callable  # [d] -> one model's parameters
    model: str
    data: Data | None
    shards: jax.Array | None  # [n, b]: the batches


Work = tuple[Callable, tuple]  # a function to be jitted and its arguments


def make_scene(model: str, benign: int, batch: int, byzantine: int = 0) -> Scene:
    """The paper's graph, models x_0 plus noise, and one batch of random images per node."""
    nodes, shape = benign + byzantine, MODELS[model]
    task = make_task(model, shape, CLASSES)
    one, unravel = ravel_pytree(jax.jit(task.init)(jax.random.key(0)))
    rng = np.random.default_rng(0)
    own = np.asarray(one) + NOISE * rng.standard_normal((nodes, one.size), np.float32)
    x = rng.integers(0, 256, (nodes * batch, *shape), np.uint8)
    y = rng.integers(0, CLASSES, nodes * batch, np.int32)
    shards = np.arange(nodes * batch, dtype=np.int32).reshape(nodes, batch)
    data, shards = jax.device_put((Data(x, y, *channel_statistics(x)), shards))
    network = topology.erdos_renyi(0, (benign, byzantine), CONNECTION)
    mine = normalise(data, data.x[shards]), data.y[shards]
    return _scene(own, network, mine, task, unravel, model, data, shards)


def growth_scene(network: nx.Graph, d: int) -> Scene:
    """Random models. The loss reads the model once, so that stage 2 of UBAR does not dominate the cost."""
    nodes = len(network)
    own = np.random.default_rng(0).standard_normal((nodes, d), np.float32)
    unused: Any = None  # never called
    task = Task(init=unused, loss=lambda vector, *_: jnp.mean(jnp.square(vector)), predict=unused)
    nothing = (np.zeros((nodes, 0), np.float32),)  # an empty batch per node
    return _scene(own, network, nothing, task, lambda vector: vector, "quadratic", None, None)


def _scene(own, network, batch, task, unravel, model, data, shards) -> Scene:
    own, graph = jax.device_put((own, topology.to_arrays(network)))
    own_loss = jax.jit(lambda own, *batch: nn.each(lambda v, *b: task.loss(unravel(v), *b), own, *batch))
    return Scene(own, graph, batch, own_loss(own, *batch), task, unravel, model, data, shards)


def ours(scene: Scene, row: str) -> Work:
    """The work of one row of a time table."""
    if row == TRAINING:
        return training(scene)
    if row.startswith(ROUND):
        return several_rounds(scene, row.removeprefix(ROUND))
    return one_aggregation(scene, row)


def ours_in_a_run(scene: Scene, row: str) -> Work:
    """ROUNDS times the work of a row in one program; every time starts from the models of the last."""
    if row == TRAINING:
        return several_steps(scene)
    return (
        several_rounds(scene, row.removeprefix(ROUND)) if row.startswith(ROUND) else aggregations(scene, row)
    )


def training(scene: Scene) -> Work:
    """Loss and gradient of every node on its batch."""
    gradient = jax.value_and_grad(scene.task.loss)
    params = jax.vmap(scene.unravel)(scene.own)
    return lambda params, batch: nn.each(gradient, params, *batch), (params, scene.batch)


def several_steps(scene: Scene) -> Work:
    """ROUNDS steps of SGD in one program, as in a chunk."""
    train = make_training(scene.task.loss, scene.unravel, optimizers.parse("sgd")(), 1)

    def steps(own, batch):
        models, batch = nn.mine((own, batch))

        def step(_, models):
            return models + train(models, (), *batch, RATE)[1]

        return nn.whole(jax.lax.fori_loop(0, ROUNDS, step, models), len(own))

    return steps, (scene.own, scene.batch)


def one_aggregation(scene: Scene, name: str) -> Work:
    """[n, d] the rule's result at every node."""
    mix, count = aggregator(scene, name, len(scene.own))
    return lambda arrays, count: mix(arrays, count, arrays[0])[0], (scene[:4], count)


def aggregations(scene: Scene, name: str) -> Work:
    """[n, d] the models after ROUNDS aggregations, each of the results of the last."""
    once, (arrays, count) = one_aggregation(scene, name)

    def several(arrays, count):
        own, *others = arrays
        return jax.lax.fori_loop(0, ROUNDS, lambda _, own: once((own, *others), count), own)

    return several, (arrays, count)


def whole_round(scene: Scene, name: str) -> Work:
    """The simulator's round: batches, training, exchange, aggregation, update."""
    assert scene.data is not None and scene.shards is not None
    n, batch = scene.shards.shape
    count, alpha, pairs = knobs_of(scene, name, n)
    learner = Learner(scene.model, None, MODELS[scene.model], CLASSES)
    program = Program(
        learner=learner,
        examples=n * batch,
        share=batch,
        rule=rules.parse(name),
        attack=attacks.parse("none"),
        strengths=(),
        optimizer=optimizers.parse("sgd"),
        schedule=schedules.parse("constant"),
        benign=n,
        byzantine=0,
        benign_slots=0,
        trained=n,
        slots=scene.graph.mask.shape[1],
        pairs=pairs,
        batch=batch,
        chunk=1,
        ragged=False,
        order=rules.parse(name).traits.orders[0],
    )
    params = jax.vmap(scene.unravel)(scene.own)
    memory = first_memory(program.rule, start_of(scene.own, scene.graph))
    state = RoundState(params, (), jnp.zeros((), jnp.int32), jax.random.key(0), memory)
    knobs = Knobs(np.float32(RATE), alpha, count, np.int32(1), {})
    drawn = Drawn(scene.shards[None])
    return make_chunk(program), (state, drawn, scene.data, scene.graph, knobs, np.int32(ROUNDS))


def several_rounds(scene: Scene, name: str) -> Work:
    """ROUNDS whole rounds in one program."""
    chunk, (state, drawn, *rest) = whole_round(scene, name)
    return chunk, (state, Drawn(jnp.repeat(drawn.train, ROUNDS, axis=0)), *rest)


def knobs_of(scene: Scene, name: str, benign: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(count [r], alpha [r], number of pairs of receiver and message to evaluate) of a rule."""
    rule = rules.parse(name)
    traits = rule.traits
    degree, _, count = count_neighbours(rule, scene.graph, benign, benign)
    alpha = np.broadcast_to(traits.alpha(degree, **rule.of(traits.alpha)), degree.shape)
    pairs = topology.round_up(losses_per_round(rule, degree, count))
    return count, alpha.astype(np.float32), pairs


def start_of(own: jax.Array, graph: Graph) -> Start:
    """What a rule with memory starts from."""
    return Start(own, graph.mask.shape[1], 0, jax.random.key(0))


def aggregator(scene: Scene, name: str, benign: int) -> tuple[Callable, np.ndarray]:
    """`mix(arrays, count, sent) -> (mixed, info)` of the benign receivers, and the rule's count.

    `arrays` are (own, graph, batch, own_loss) of the scene, passed as arguments of the jitted function.
    """
    count, _, pairs = knobs_of(scene, name, benign)

    def mix(arrays, count, sent):
        own, graph, batch, own_loss = arrays
        rule, own = rules.parse(name), own[:benign]
        mine = tuple(leaf[:benign] for leaf in batch)

        def loss_at(model, *batch):
            return scene.task.loss(scene.unravel(model), *batch)

        def gradient():
            models = jax.vmap(scene.unravel)(own)
            return ravel(nn.each(jax.grad(scene.task.loss), models, *mine))

        inbox = make_inbox(
            own=own,
            sent=sent,
            graph=graph,
            benign=benign,
            count=count,
            t=jnp.zeros((), jnp.int32),
            rounds=jnp.asarray(ROUNDS),
            own_loss=own_loss[:benign],
            loss_of=functools.partial(losses_on, loss_at, sent, mine),
            pairs=pairs,
            gradient=gradient,
            update=-RATE * own,
            learning_rate=jnp.float32(RATE),
            classes=CLASSES,
            key=jax.random.key(0),
        )
        return aggregate(rule, inbox, first_memory(rule, start_of(own, graph)))[:2]

    return mix, count


def training_flops(scene: Scene) -> int:
    """Operations in the matrix products of one training step of all nodes; a multiply-add counts as two.

    The forward pass, the gradients of the weights and those of the inputs cost the same each; images need
    no gradient.
    """
    assert scene.data is not None and scene.shards is not None
    kernels = [leaf.size for leaf in jax.tree.leaves(scene.unravel(scene.own[0])) if leaf.ndim > 1]
    places = POSITIONS[scene.model]
    first, *others = np.multiply(kernels, places + (1,) * (len(kernels) - len(places))).tolist()
    return 2 * (2 * first + 3 * sum(others)) * scene.shards.size


def least_bytes(scene: Scene) -> int:
    """The least that an aggregation reads and writes: every message once, every result once."""
    return 2 * scene.own.nbytes


def load_torch(folder: Path) -> dict[str, ModuleType]:
    """The torch programs of a folder by the name of their column; none if it or torch is missing."""
    if importlib.util.find_spec("torch") is None or not all((folder / f"{f}.py").exists() for f in PROGRAMS):
        return {}
    sys.path.insert(0, str(folder.absolute()))
    try:
        return {name: importlib.import_module(file) for file, name in PROGRAMS.items()}
    finally:
        sys.path.pop(0)


def in_torch(scene: Scene, row: str, program: ModuleType) -> Callable[[], Any] | None:
    """The same work by a torch program; None if it does not have the rule."""
    name = row.removeprefix(ROUND)
    if name != TRAINING and name not in program.RULES:
        return None
    tensor = program.torch.from_numpy
    # Not by indexing, which would leave a stride of n between a vector's elements.
    vectors = tensor(np.take(np.asarray(scene.own), torch_layout(scene), axis=1))
    x, y = (np.array(a) for a in scene.batch)
    batches = tensor(x), tensor(y).long()
    if row == TRAINING:
        return program.training(scene.model, vectors, *batches)
    count, alpha, _ = knobs_of(scene, name, len(vectors))
    neighbours = neighbours_of(scene.graph)
    if row == name:
        own_losses = tensor(np.array(scene.own_loss))
        return program.aggregation(
            name, scene.model, vectors, *batches, neighbours, count.tolist(), own_losses
        )
    images, labels = (part.flatten(0, 1) for part in batches)
    index = tensor(np.array(scene.shards)).long()
    network = (vectors, images, labels, index, neighbours)
    return program.rounds(name, scene.model, *network, count.tolist(), alpha.tolist(), RATE)


def neighbours_of(graph: Graph) -> list[list[int]]:
    """The neighbours of every node."""
    return [ids[real].tolist() for ids, real in zip(*(np.asarray(a) for a in graph), strict=True)]


def torch_layout(scene: Scene) -> np.ndarray:
    """[d] positions in our vector of the torch module's parameters, in torch's order.

    Ours: bias, kernel [in, out] or [k, k, in, out]. Torch: weight [out, in] or [out, in, k, k], bias.
    """
    numbers = np.arange(scene.own.shape[1], dtype=np.float32)
    leaves = [np.asarray(leaf, np.int64) for leaf in jax.tree.leaves(scene.unravel(jnp.asarray(numbers)))]
    order, channels = [], MODELS[scene.model][-1]
    for bias, kernel in zip(leaves[::2], leaves[1::2], strict=True):
        if kernel.ndim == 4:
            weight, channels = kernel.transpose(3, 2, 0, 1), kernel.shape[-1]
        else:  # the first dense layer reads an image by pixel, then channel; torch by channel, then pixel
            by_channel = kernel.reshape(-1, channels, kernel.shape[-1]).swapaxes(0, 1)
            weight, channels = by_channel.reshape(kernel.shape).T, 1
        order += [weight.ravel(), bias]
    return np.concatenate(order)
