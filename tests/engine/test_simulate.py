import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slowly

from ubar_jax import Config, ConfigError, simulate
from ubar_jax.engine.compilation import (
    compiled_chunk,
    compiled_evaluation,
    initial_state,
    statistics_of,
    trace_chunk,
)
from ubar_jax.engine.evaluation import make_evaluate
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.round import normalise, ravel
from ubar_jax.parts import data
from ubar_jax.parts.flax_modules import Head
from ubar_jax.parts.tasks import make_task, models
from ubar_jax.types import Data

BASE = Config(attack="gaussian", byzantine_ratio=0.3, batch_size=16, rounds=6, eval_every=2)


@pytest.mark.medium
def test_one_compilation_serves_seeds_rates_and_strengths():
    """Programs are shared if the padded sizes are equal; on a complete graph they always are."""
    base = dataclasses.replace(BASE, topology="complete")
    program = prepare(base).program
    compiled_chunk.cache_clear()
    for change in (
        {"seed": 5},
        {"learning_rate": 0.1},
        {"attack": "gaussian(std=3)"},
        {"alpha": 0.7},
        {"rho": 0.45},
    ):
        config = dataclasses.replace(base, **change)
        assert prepare(config).program == program
        simulate(config)
    assert compiled_chunk.cache_info().misses == 1


def test_a_chunk_is_one_program_without_callbacks():
    program = prepare(BASE).program
    text = trace_chunk(program).lower().as_text()
    assert "stablehlo.while" in text  # the scan over rounds is inside
    for word in ("callback", "infeed", "outfeed", "host_compute", "send", "recv"):
        assert word not in text, word
    donated = text.count("tf.aliasing_output") + text.count("jax.buffer_donor")
    assert donated >= len(jax.tree.leaves(initial_state(program, 0).params))


@pytest.mark.medium
@pytest.mark.parametrize("keeps", [False, True])
def test_the_next_chunk_is_launched_before_this_one_is_fetched(monkeypatch, keeps):
    """Six rounds, two per chunk. A checkpoint needs the models, which the next chunk overwrites."""
    events, experiment = [], prepare(BASE)

    def noted(name, function):
        return lambda *a, **k: events.append(name) or function(*a, **k)

    module = sys.modules["ubar_jax.engine.simulation"]
    chunk = compiled_chunk(experiment.program)
    chunk = chunk._replace(call=noted("launch", chunk.call))
    monkeypatch.setattr(module, "compiled_chunk", lambda program, width: chunk)
    monkeypatch.setattr(jax, "device_get", noted("read", jax.device_get))
    keep = module.Checkpointing(
        lambda ahead: keeps, noted("keep", lambda batch: jax.block_until_ready(batch.state.params))
    )
    module.run([experiment], progress=noted("progress", lambda latest: None), checkpointing=keep)
    told = "read read progress "
    if keeps:
        assert " ".join(events) == f"read launch {told}keep launch {told}keep launch {told}".strip()
    else:
        assert " ".join(events) == f"read launch launch {told}launch {told}{told}".strip()


@pytest.mark.slow
def test_a_last_chunk_that_is_shorter_changes_nothing():
    even = simulate(dataclasses.replace(BASE, rounds=5, eval_every=5))
    ragged = simulate(dataclasses.replace(BASE, rounds=5, eval_every=2))
    np.testing.assert_array_equal(ragged.curves["round"], [0, 2, 4, 5])
    np.testing.assert_allclose(ragged.final["accuracy"], even.final["accuracy"])
    np.testing.assert_allclose(ragged.curves["train_loss"], even.curves["train_loss"], rtol=1e-5)
    assert ragged.curves["train_loss"].shape == (5,)
    np.testing.assert_array_equal(ragged.accepted, even.accepted)


@pytest.mark.slow
def test_evaluation_takes_a_part_while_training_and_all_at_the_end():
    whole = simulate(BASE)
    part = simulate(dataclasses.replace(BASE, eval_size=50))
    np.testing.assert_array_equal(part.final["accuracy"], whole.final["accuracy"])
    assert not np.array_equal(part.curves["accuracy"][0], whole.curves["accuracy"][0])
    assert set(np.unique(part.curves["accuracy"][0] * 50 % 1).round(4)) <= {0.0, 1.0}


@pytest.mark.medium
@pytest.mark.parametrize("size", [501, *slowly(1, 499, 750, 1001)])
def test_evaluation_of_any_number_of_examples(size):
    """A forward pass takes at most 500 examples; the last one may be padded."""
    shape, rng = (3, 3, 1), np.random.default_rng(size)
    task = make_task("mlp(hidden=2)", shape, 4)
    x, y = rng.integers(0, 256, (size, *shape), np.uint8), rng.integers(0, 4, size).astype(np.int32)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), jax.jit(task.init)(jax.random.key(0)))
    scale = Data(None, None, np.float32([100]), np.float32([50]))
    got = jax.jit(make_evaluate(task, 2))(params, scale, x, y)
    x, y = jnp.asarray(x), jnp.asarray(y)
    for i in range(2):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        right = np.argmax(task.predict(one, normalise(scale, x)), 1) == y
        assert float(got["accuracy"][i]) == pytest.approx(float(right.mean()), abs=1e-6)
        assert float(got["loss"][i]) == pytest.approx(float(task.loss(one, normalise(scale, x), y)), rel=1e-5)


@pytest.mark.slow
def test_a_run_whose_test_set_is_not_a_multiple_of_the_forward_pass():
    base = dataclasses.replace(BASE, dataset="synthetic(examples=3000, size=2)", attack="none", rounds=2)
    assert simulate(base).curves["accuracy"].shape == (2, 10)
    assert simulate(dataclasses.replace(base, eval_size=501)).curves["accuracy"].shape == (2, 10)


@pytest.mark.medium
def test_before_the_first_round_one_node_stands_for_all():
    config = dataclasses.replace(BASE, topology="complete")
    result, experiment = simulate(config), prepare(config)
    state = initial_state(experiment.program, config.seed)
    every = compiled_evaluation(experiment.program.learner, 10, experiment.program.trained, 360)
    all_of_them = every.call(state.params, statistics_of(experiment.data), *experiment.test)
    for name in ("accuracy", "loss"):
        np.testing.assert_array_equal(result.curves[name][0], all_of_them[name])
    assert result.curves["consensus"][0] == 0


@pytest.mark.medium
def test_a_long_compilation_is_announced(monkeypatch, capsys):
    module = sys.modules["ubar_jax.engine.simulation"]
    compile_it = module.compiled_chunk
    monkeypatch.setattr(module, "compiled_chunk", lambda *key: time.sleep(1.3) or compile_it(*key))
    simulate(BASE)
    assert capsys.readouterr().err == "compiling ubar under gaussian for 10 + 4 nodes ...\n"
    monkeypatch.undo()
    simulate(BASE)  # already compiled in this process
    assert capsys.readouterr().err == ""


@pytest.mark.medium
def test_accuracy_and_consensus_are_what_they_say():
    result = simulate(BASE)
    experiment = prepare(BASE)
    digits = data.load("digits")
    task = make_task("mlp", (8, 8, 1), 10)
    for i in range(10):
        params = jax.tree.map(lambda leaf, i=i: leaf[i], result.state.params)
        logits = task.predict(params, normalise(experiment.data, digits.test_x))
        right = (np.argmax(logits, 1) == digits.test_y).mean()
        assert right == pytest.approx(result.final["accuracy"][i])
        loss = task.loss(params, normalise(experiment.data, digits.test_x), digits.test_y)
        assert float(loss) == pytest.approx(result.final["loss"][i], rel=1e-4)
    models = np.asarray(ravel(result.state.params))[:10]
    spread = np.sqrt(((models - models.mean(0)) ** 2).sum(1).mean())
    assert result.curves["consensus"][-1] == pytest.approx(spread, rel=1e-4)
    assert result.curves["worst"][-1] == result.final["accuracy"].min()


@pytest.mark.slow
def test_shares_of_byzantine_edges():
    none = simulate(dataclasses.replace(BASE, attack="none"))
    assert not none.curves["byzantine_selected"].any()
    average = simulate(dataclasses.replace(BASE, rule="average"))
    network = prepare(BASE).network
    edges = [(i, j) for i in range(10) for j in network.neighbors(i)]
    share = np.mean([j >= 10 for _, j in edges])
    np.testing.assert_allclose(average.curves["byzantine_selected"], share, rtol=1e-6)
    assert np.isnan(average.curves["byzantine_candidates"]).all()
    assert average.accepted.sum() == 6 * len(edges)
    assert all(average.accepted[i, j] == 6 for i, j in edges)
    ubar = simulate(BASE)
    assert ubar.curves["byzantine_selected"][-1] < share


@pytest.mark.medium
def test_divergence_is_told_with_node_and_round():
    result = simulate(dataclasses.replace(BASE, rule="average", attack="nonfinite"))
    t, node = result.diverged
    assert t == 0 and 0 <= node < 10
    wild = simulate(dataclasses.replace(BASE, rule="average", attack="none", learning_rate=1e30, rounds=4))
    assert wild.diverged is not None


@pytest.mark.slow
def test_ubar_does_not_diverge_by_messages_that_are_not_finite():
    assert simulate(dataclasses.replace(BASE, attack="nonfinite")).diverged is None


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", *slowly("adam")])
def test_optimizers_change_the_steps(optimizer):
    plain = simulate(BASE)
    other = simulate(dataclasses.replace(BASE, optimizer=optimizer, learning_rate=0.01))
    assert not np.allclose(plain.curves["train_loss"], other.curves["train_loss"])
    assert np.isfinite(other.curves["train_loss"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": 0.0}, r"rho is a number in \(0, 1\]"),
        ({"rho": 1.5}, r"rho is a number in \(0, 1\]"),
        ({"alpha": 1.5}, r"alpha is a number in \[0, 1\]"),
        ({"byzantine_ratio": 1.0}, r"byzantine_ratio is a number in \[0, 1\)"),
        ({"byzantine_ratio": -0.1}, r"byzantine_ratio is a number in \[0, 1\)"),
        ({"nodes": 1}, "nodes is an integer >= 2"),
        ({"nodes": 40, "connection": 0.01}, r"in 1000 draws .* try --connection=0\.15 or more"),
        ({"batch_size": 500}, r"larger than a node's share: .* batch_size of at most 102"),
        ({"nodes": 2000, "batch_size": 1, "connection": 0.01}, "larger than a node's share"),
        ({"rule": "ubra"}, r"unknown rule 'ubra' \(did you mean 'ubar'\?\); there are afa"),
        ({"rule": "ubar(roh=0.4)"}, r"no argument 'roh' \(did you mean 'rho'\?\)"),
        ({"rule": "ubar(rho=0.4"}, "malformed; write a name or name"),
        ({"rule": "ubar(rho=0.4, rho=0.5)"}, "malformed"),
        ({"rule": "3"}, "malformed"),
        ({"attack": "bitflip"}, r"did you mean 'bit_flip'\?"),
        ({"attack": "none(3)"}, "too many arguments"),
        ({"topology": "file"}, "needs path="),
        ({"model": "lenet"}, "at least 12x12 pixels, not 8x8"),
        ({"model": "no.such:Module"}, "write package.module:Class"),
        ({"rounds": 0}, "rounds is an integer >= 1"),
        ({"seed": -1}, "seed is an integer in"),
        ({"learning_rate": float("nan")}, "learning_rate is a number >= 0"),
        ({"learning_rate": float("inf")}, "learning_rate is a number >= 0"),
        ({"model": "test_models:Users(foo=3)"}, "cannot be made"),
        ({"topology": "file(path=nets/a.txt)"}, "quote a value"),
        ({"topology": "small_world(degree=5)"}, "must be even"),
        ({"judge": "held_out"}, "needs held-out examples; set held_out"),
        ({"judge": "guess"}, "judge is 'batch' or 'next' or 'held_out'"),
        (
            {"judge": "held_out", "held_out": 0.05},
            "held-out part is smaller than a batch: .*, of which 5 are",
        ),
        ({"held_out": 1.0}, r"held_out is a number in \[0, 1\)"),
        ({"held_out": 0.99}, r"larger than a node's share: .*, of which 100 are held out"),
        ({"order": "than"}, "order is 'while' or 'then' or None"),
        ({"rule": "byrdie", "order": "then"}, "does not work with order='then'; it works with 'while'"),
        ({"local_steps": 50}, "more than an epoch: .* take at most [0-9]+ local steps"),
        ({"local_steps": 0}, "local_steps is an integer >= 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_compiled(change, message):
    with pytest.raises(ConfigError, match=message):
        prepare(dataclasses.replace(BASE, **change))


def test_numpy_numbers_are_numbers():
    plain = dataclasses.replace(BASE, rho=0.3, nodes=12)
    numpys = dataclasses.replace(BASE, rho=np.float64(0.3), nodes=np.int64(12))
    assert prepare(numpys).config == prepare(plain).config


def test_a_model_registered_anew_is_compiled_anew():
    def register(hidden):
        models.register(lambda classes: Head((hidden, classes)), name="again")

    register(5)
    first = prepare(dataclasses.replace(BASE, model="again")).program
    register(6)
    second = prepare(dataclasses.replace(BASE, model="again")).program
    del models.parts["again"]
    assert first != second
    with pytest.raises(ConfigError, match="'mlp' is built in"):
        models.register(lambda classes: Head((5, classes)), name="mlp")


def test_arguments_inside_a_spec_win_over_the_setting():
    assert prepare(dataclasses.replace(BASE, rule="ubar(rho=0.7)", rho=0.2)).config.rule == "ubar(rho=0.7)"
    assert prepare(dataclasses.replace(BASE, rho=0.2)).config.rule == "ubar(rho=0.2)"
    same = dataclasses.replace(BASE, rule="ubar(rho=0.4)", rho=0.9)
    assert same.digest() == BASE.digest()
