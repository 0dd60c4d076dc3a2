"""A whole round equals a NumPy loop over nodes; invariants of the round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import slowly

from ubar_jax import Config, simulate
from ubar_jax.engine.compilation import compiled_chunk, initial_state
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.round import JUDGING, batches, draw, make_round, normalise, ravel, to_rows
from ubar_jax.parts.aggregation import aggregate, first_memory, rules
from ubar_jax.parts.byzantine import attacks
from ubar_jax.testing import Node, counts_of, inbox_of, random_case, start_of
from ubar_jax.types import Drawn

pytestmark = pytest.mark.medium


def mlp_loss_and_gradient(x, images, labels, sizes):
    """Loss and gradient of a one-hidden-layer ReLU network, by hand; x [d] in ravelled order."""
    inputs, hidden, classes = sizes
    parts = np.split(x, np.cumsum([hidden, inputs * hidden, classes]))
    b1, w1, b2, w2 = parts[0], parts[1].reshape(inputs, hidden), parts[2], parts[3].reshape(hidden, -1)
    images = images.reshape(len(images), -1)
    pre = images @ w1 + b1
    active = np.maximum(pre, 0)
    logits = active @ w2 + b2
    logits = logits - logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    loss = -log_p[np.arange(len(labels)), labels].mean()
    d_logits = np.exp(log_p)
    d_logits[np.arange(len(labels)), labels] -= 1
    d_logits /= len(labels)
    d_pre = (d_logits @ w2.T) * (pre > 0)
    gradient = [d_pre.sum(0), images.T @ d_pre, d_logits.sum(0), active.T @ d_logits]
    return loss, np.concatenate([g.ravel() for g in gradient])


def examples_of(experiment, state, rounds):
    """(train [rounds, r, L b], judge [rounds, r, b]): the examples of every round, as indices."""
    program, (shards, held_out) = experiment.program, experiment.drawn_from
    size, key = program.batch, state.key
    train = np.asarray(batches(shards, key, 0, rounds + 1, size * program.local_steps))
    judge = {"batch": train[:-1, :, :size], "next": train[1:, :, :size]}
    if program.judge == "held_out":
        judge["held_out"] = np.asarray(batches(held_out, key, 0, rounds, size, JUDGING))
    return train[:-1], judge[program.judge]


def numpy_network(experiment, state, rounds):
    """The algorithm as a loop over nodes, in float64: models after `rounds` rounds."""
    config, program, data = experiment.config, experiment.program, experiment.data
    sizes = (int(np.prod(program.learner.shape)), 12, program.learner.classes)
    models = np.asarray(ravel(state.params), float)
    start, velocity = models.copy(), np.zeros_like(models)
    train, judge = examples_of(experiment, state, rounds)
    decay, dampening = (float(dict(program.optimizer.arguments).get(k, 0)) for k in ("decay", "dampening"))
    rule = rules.parse(config.rule)
    memories = list(start) if rule.part.name == "centred_clipping" else [None] * len(models)
    neighbours = [[int(j) for j in sorted(experiment.network.neighbors(i))] for i in experiment.network]

    def loaded(index):
        return np.asarray(normalise(data, data.x[index]), float), data.y[index]

    def loss_and_gradient(x, index):
        return mlp_loss_and_gradient(x, *loaded(index), sizes)

    for t in range(rounds):
        epoch = t // (program.share // (program.batch * program.local_steps))
        rate = config.learning_rate * 20 / (20 + epoch)
        update = np.zeros_like(models)
        for i in range(program.trained):
            for index in np.split(train[t, i], program.local_steps):
                gradient = loss_and_gradient(models[i] + update[i], index)[1]
                velocity[i] = decay * velocity[i] + (1 - dampening) * gradient
                update[i] -= rate * velocity[i]
        own = models + update if program.order == "then" else models
        sent = list(own[: program.benign])
        for a in range(program.byzantine):
            if program.attack.part.name == "bit_flip":
                sent.append(-own[program.benign + a])
            elif program.attack.part.name == "frozen":
                sent.append(start[0])
            else:
                key = jax.random.fold_in(state.key, t)
                noise = jax.random.normal(key, (program.byzantine, models.shape[1]))
                sent.append(np.asarray(noise, float)[a])
        new = []
        for i in range(program.trained):
            ids, index = neighbours[i], judge[t, i]
            node = Node(
                own=own[i],
                messages=np.stack([sent[j] for j in ids]),
                ids=ids,
                degree=len(ids),
                byzantine=sum(j >= program.benign for j in ids),
                own_loss=loss_and_gradient(own[i], index)[0],
                loss=lambda x, index=index: loss_and_gradient(x, index)[0],
                gradient=lambda x=own[i], index=index: loss_and_gradient(x, index)[1],
                update=update[i],
                weights=np.array([1 / (1 + max(len(ids), len(neighbours[j]))) for j in ids]),
                benign=np.array(ids) < program.benign,
                t=t,
                rounds=config.rounds,
                learning_rate=rate,
                classes=program.learner.classes,
            )
            plain = getattr(reference, rule.part.name)
            if rule.traits.init is None:
                mixed, _ = plain(node, **dict(rule.arguments))
            else:
                mixed, _, memories[i] = plain(node, memories[i], **dict(rule.arguments))
            alpha = float(experiment.knobs.alpha[i])
            new.append(alpha * own[i] + (1 - alpha) * mixed + (program.order == "while") * update[i])
        models = np.stack(new)
    return models


def check_twenty_rounds(rule, attack, rounds=20, tolerance=1e-4, **settings):
    config = Config(
        rule=rule,
        attack=attack,
        dataset="synthetic(examples=900, size=5, classes=4)",
        model="mlp(hidden=12)",
        nodes=8,
        byzantine_ratio=0.33,
        batch_size=16,
        rounds=rounds,
        eval_every=rounds,
        seed=3,
        **settings,
    )
    experiment = prepare(config)
    degrees = {d for _, d in experiment.network.degree()}
    assert len(degrees) > 2 and experiment.program.byzantine == 4  # irregular, with attackers
    state = initial_state(experiment.program, config.seed)
    expected = numpy_network(experiment, state, rounds)
    result = simulate(config)
    got = np.asarray(ravel(result.state.params))
    assert np.linalg.norm(expected - np.asarray(ravel(state.params))) > 0.1  # the models did change
    error = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < tolerance, error


@pytest.mark.parametrize("attack", ["gaussian", *slowly("bit_flip")])
@pytest.mark.parametrize("rule", ["ubar", *slowly("average", "ubar_distance", "ubar_loss")])
def test_twenty_rounds_equal_a_numpy_loop_over_nodes(rule, attack):
    check_twenty_rounds(rule, attack)


FRAMES = {
    "then": {"order": "then"},
    "next": {"judge": "next"},
    "held_out": {"judge": "held_out", "held_out": 0.3},
    "two steps": {"local_steps": 2},
    "all at once": {"order": "then", "judge": "held_out", "held_out": 0.3, "local_steps": 2},
    "dampened": {"optimizer": "momentum(decay=0.8, dampening=0.8)"},
}


@pytest.mark.slow
@pytest.mark.parametrize("frame", FRAMES)
def test_order_judge_and_local_steps_equal_a_numpy_loop_over_nodes(frame):
    check_twenty_rounds("ubar", "bit_flip", **FRAMES[frame])


THEN = [name for name, part in rules.parts.items() if part.traits.orders[0] == "then"]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "attack"), [*((rule, "bit_flip") for rule in THEN), ("nna", "frozen")])
def test_rules_of_the_order_then_equal_a_numpy_loop_over_nodes(rule, attack):
    check_twenty_rounds(rule, attack)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["zeno", "zeno_pp", "loss_gate", "ubar_swapped", "afa", "byrdie", "oracle", "gossip"]
)
def test_further_rules_equal_a_numpy_loop_over_nodes(rule):
    judged = {"judge": "held_out", "held_out": 0.3} if rules.get(rule).traits.judged_by else {}
    check_twenty_rounds(rule, "bit_flip", **judged)


@pytest.mark.slow
def test_monna_equals_a_numpy_loop_over_nodes():
    check_twenty_rounds(
        "nna", "bit_flip", optimizer="momentum(decay=0.99, dampening=0.99)", learning_rate=1.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ubar", "ubar_loss", "dkrum"])
def test_what_an_attacker_expects_of_the_rule_is_what_happens(rule):
    """`view.deployed` reuses the losses of honest messages; the round recomputes them: same result."""
    expected = []

    @attacks.register
    def probe(key, view):
        sent = -0.5 * view.own[: view.byzantine] + 0.1 * jnp.mean(view.own, axis=0, keepdims=True)
        expected.append(view.deployed(jnp.concatenate([view.own, sent])))
        return sent

    config = Config(rule=rule, attack="probe", nodes=8, byzantine_ratio=0.33, batch_size=16, alpha=0.0)
    config = dataclasses.replace(
        config, dataset="synthetic(examples=900, size=5, classes=4)", learning_rate=0.0
    )
    try:
        experiment = prepare(config)
        program = experiment.program
        step = make_round(program)
        state = initial_state(program, 0)
        rng = np.random.default_rng(0)
        models = ravel(state.params)
        models += rng.normal(size=models.shape).astype(np.float32)
        index = batches(experiment.drawn_from.train, state.key, 0, 1, program.batch)[0]
        data, graph = (jax.tree.map(jnp.asarray, a) for a in (experiment.data, experiment.graph))
        state = to_rows(state)._replace(params=models)
        new, seen = step(state, Drawn(index), data, graph, experiment.knobs, np.int32(1))
    finally:
        del attacks.parts["probe"]
    [(mixed, info)] = expected
    np.testing.assert_array_equal(new.params, mixed)
    np.testing.assert_array_equal(seen.accepted, info["selected"])


@pytest.mark.slow
def test_average_on_a_complete_graph_is_centralised_sgd():
    """From a common model, the mean model takes the SGD step of all batches combined."""
    config = Config(
        rule="average",
        topology="complete",
        dataset="synthetic(examples=600)",
        nodes=6,
        batch_size=10,
        rounds=1,
        eval_every=1,
    )
    experiment = prepare(config)
    data = experiment.data
    state = initial_state(experiment.program, config.seed)
    x = np.asarray(ravel(state.params), float)[0]
    shards = experiment.drawn_from.train
    together = np.asarray(batches(shards, state.key, 0, 1, 10)).ravel()  # one batch of 60
    images = np.asarray(normalise(data, data.x[together]), float)
    _, gradient = mlp_loss_and_gradient(x, images, data.y[together], (64, 100, 10))
    got = np.asarray(ravel(simulate(config).state.params)).mean(0)
    assert np.linalg.norm(gradient) > 0.1
    np.testing.assert_allclose(got, x - config.learning_rate * gradient, rtol=1e-4, atol=1e-6)


def test_a_round_can_be_replayed_bit_for_bit():
    config = Config(attack="gaussian", byzantine_ratio=0.3, rounds=6, eval_every=3, batch_size=16)
    experiment = prepare(config)
    call = compiled_chunk(experiment.program).call
    arrays = jax.device_put((experiment.data, experiment.graph, experiment.knobs))

    def chunk(state):
        drawn = draw(experiment.program.drawing, *experiment.drawn_from, state.key, state.t)
        return call(state, drawn, *arrays, np.int32(6))

    state, _ = chunk(initial_state(experiment.program, 0))
    copy = jax.tree.map(jnp.copy, state)
    one, seen = chunk(state)
    two, again = chunk(copy)
    leaves = zip(jax.tree.leaves((one.params, seen)), jax.tree.leaves((two.params, again)), strict=True)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in leaves)


def test_batches_pass_over_every_share_once_an_epoch():
    experiment = prepare(Config(dataset="synthetic(examples=330)", nodes=3, batch_size=20))
    shards, key = experiment.drawn_from.train, jax.random.key(1)
    index = np.asarray(batches(shards, key, 0, 15, 20))  # three epochs of five rounds
    for epoch in index.reshape(3, 5, 3, 20):
        for i in range(3):
            seen = epoch[:, i].ravel()
            assert len(set(seen)) == 100 and set(seen) <= set(shards[i].tolist())
    assert not np.array_equal(index[:5], index[5:10])
    np.testing.assert_array_equal(index[7:12], batches(shards, key, 7, 5, 20))


@pytest.mark.parametrize("rule", rules.parts)
def test_products_of_models_use_the_highest_precision(rule):
    """A GPU's default (TF32) ruins distances, so the precision is read from the lowered program."""
    spec = rules.parse(rule)
    case = random_case(0, d=101)
    count = counts_of(spec, case)[2]
    memory = first_memory(spec, start_of(case.own, case.graph, 5))

    def run(own, sent):
        return aggregate(spec, inbox_of(own, sent, case.graph, case.targets, count), memory)

    text = str(jax.make_jaxpr(run)(case.own, case.sent))
    products = text.count("dot_general[")
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products
    if rule == "ubar":
        assert products > 2  # norms, distances, and the mean of the accepted messages
