"""Memory, order, local steps and judge: what a round can be besides the paper's."""

import csv
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slowly

from ubar_jax import Config, ConfigError, attacks, rules, simulate
from ubar_jax.config import LATER, canonical
from ubar_jax.engine.compilation import initial_state
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.round import draw, make_round, ravel, to_rows
from ubar_jax.engine.simulation import first_snapshot, run
from ubar_jax.registry import load_plugin
from ubar_jax.sweeps import checkpoints
from ubar_jax.testing import check_attack, check_rule
from ubar_jax.types import RoundState

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parents[1] / "plugins"
BASE = Config(
    attack="gaussian",
    byzantine_ratio=0.3,
    dataset="synthetic(examples=600, size=4, classes=4)",
    model="mlp(hidden=6)",
    nodes=7,
    batch_size=8,
    rounds=6,
    eval_every=2,
)


def models_of(result) -> np.ndarray:
    return np.asarray(ravel(result.state.params))


@pytest.fixture
def plugin():
    """Loads plugins; their parts are removed afterwards."""
    before = [(registry, dict(registry.parts)) for registry in (rules, attacks)]
    yield lambda name: load_plugin(str(PLUGINS / f"{name}.py"))
    for registry, parts in before:
        registry.parts.clear()
        registry.parts.update(parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part", "settings"),
    [
        ("memory_rule", "second_chance", {}),
        ("memory_attack", "echo", {}),
        ("then_rule", "near_half", {}),
        ("held_out_rule", "best_of_all", {"judge": "held_out", "held_out": 0.2}),
    ],
)
def test_a_plugin_of_each_kind_is_short_and_runs(plugin, name, part, settings):
    assert len((PLUGINS / f"{name}.py").read_text().splitlines()) <= 25
    plugin(name)
    kind = "attack" if part in attacks.parts else "rule"
    (check_attack if kind == "attack" else check_rule)(part)
    result = simulate(dataclasses.replace(BASE, **{kind: part}, **settings))
    assert np.isfinite(models_of(result)).all()
    assert len(jax.tree.leaves(result.state.rule_memory)) == (name == "memory_rule")
    assert len(jax.tree.leaves(result.state.attack_memory)) == (name == "memory_attack")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "attack"),
    [
        ("centred_clipping", "time_coupled"),
        *slowly(("afa", "sleeper(frozen, start=3)"), ("zeno_pp", "frozen")),
    ],
)
def test_memory_survives_a_checkpoint_and_runs_side_by_side(rule, attack, tmp_path):
    config = dataclasses.replace(BASE, rule=rule, attack=attack, topology="complete")
    experiments = [prepare(dataclasses.replace(config, seed=seed)) for seed in (0, 1)]
    whole = [run([experiment])[0] for experiment in experiments]
    keep = checkpoints.writing(tmp_path, ["a"], 0)

    def stop(now):
        keep.save(now)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiments[:1], checkpointing=keep._replace(save=stop))
    start = checkpoints.load(tmp_path, ["a"], first_snapshot(experiments[:1]))
    assert 0 < start.done < config.rounds
    [resumed] = run(experiments[:1], start=start)
    leaves = (jax.tree.leaves(r.state._replace(key=0)) for r in (whole[0], resumed))
    for one, two in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, two)
    for alone, beside in zip(whole, run(experiments), strict=True):
        np.testing.assert_allclose(models_of(alone), models_of(beside), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_a_state_without_memory_is_what_it_was():
    """So checkpoints of older versions can be read: they hold the leaves in this order."""
    state = initial_state(prepare(BASE).program, 0)
    assert RoundState._fields[:4] == ("params", "opt_state", "t", "key")
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(state[:4]))


@pytest.mark.medium
@pytest.mark.parametrize(
    "settings",
    [
        {"order": "then"},
        *slowly(
            {"judge": "next"},
            {"judge": "held_out", "held_out": 0.3},
            {"rule": "centred_clipping"},
            {"rule": "zeno_pp"},
        ),
    ],
    ids=str,
)
def test_attackers_know_order_judge_and_memory(settings):
    """`view.deployed` returns what the rule makes of the same messages in this round."""
    expected = []

    @attacks.register
    def probe(key, view):
        sent = -0.5 * view.own[: view.byzantine] + 0.1 * jnp.mean(view.own, axis=0, keepdims=True)
        expected.append((view.own, *view.deployed(jnp.concatenate([view.own, sent]))))
        return sent

    try:
        experiment = prepare(dataclasses.replace(BASE, attack="probe", alpha=0.0, **settings))
        program = experiment.program
        state = initial_state(program, 0)
        rng = np.random.default_rng(0)
        models = ravel(state.params)
        models += rng.normal(size=models.shape).astype(np.float32)
        state = to_rows(state)._replace(params=models)
        data, graph = (jax.tree.map(jnp.asarray, a) for a in (experiment.data, experiment.graph))
        drawn = jax.tree.map(lambda a: a[0], draw(program.drawing, *experiment.drawn_from, state.key, 0))
        new, _ = make_round(program)(state, drawn, data, graph, experiment.knobs, np.int32(6))
    finally:
        del attacks.parts["probe"]
    [(sent_by_honest, mixed, _)] = expected
    before, after = (np.asarray(s.params) for s in (state, new))
    if program.order == "then":
        assert not np.allclose(sent_by_honest, before)  # they send their models after the step
        np.testing.assert_array_equal(after, mixed)
    else:
        np.testing.assert_array_equal(sent_by_honest, before)
        step = np.asarray(after - np.asarray(mixed))
        assert 0 < np.abs(step).max() < 1  # what is left is the step


@pytest.mark.medium
def test_held_out_examples_are_random_and_never_trained_on():
    experiment = prepare(dataclasses.replace(BASE, judge="held_out", held_out=0.3))
    train, held_out = experiment.shares
    plain = prepare(BASE).shares.train
    share = plain.shape[1]
    assert held_out.shape[1] == int(0.3 * share) and train.shape[1] == share - held_out.shape[1]
    for i in range(len(plain)):
        assert sorted([*train[i], *held_out[i]]) == sorted(plain[i])
        assert list(held_out[i]) != list(plain[i][-len(held_out[i]) :])
    assert prepare(dataclasses.replace(BASE, held_out=0.3)).shares.train.tolist() == train.tolist()
    state = initial_state(experiment.program, 0)
    drawn = draw(experiment.program.drawing, *experiment.drawn_from, state.key, 0)
    for i in range(experiment.program.trained):
        assert set(np.asarray(drawn.train)[:, i].ravel()) <= set(train[i].tolist())
        assert set(np.asarray(drawn.judge)[:, i].ravel()) <= set(held_out[i].tolist())


@pytest.mark.medium
def test_the_next_judge_is_the_batch_of_the_next_round():
    experiment = prepare(dataclasses.replace(BASE, judge="next", local_steps=2))
    program, key = experiment.program, jax.random.key(0)
    drawn, later = (draw(program.drawing, *experiment.drawn_from, key, t) for t in (0, 1))
    assert drawn.train.shape[2] == 2 * program.batch
    np.testing.assert_array_equal(drawn.judge[0], drawn.train[1][:, : program.batch])
    np.testing.assert_array_equal(drawn.judge[1], later.train[1][:, : program.batch])


def test_an_epoch_has_fewer_rounds_with_local_steps():
    share = prepare(BASE).program.share
    for steps in (1, 3):
        knobs = prepare(dataclasses.replace(BASE, local_steps=steps)).knobs
        assert knobs.rounds_per_epoch == share // (8 * steps)


def test_the_order_of_the_rule_is_its_own_unless_given():
    assert prepare(dataclasses.replace(BASE, rule="nna")).program.order == "then"
    assert prepare(dataclasses.replace(BASE, rule="nna", order="while")).program.order == "while"
    same = dataclasses.replace(BASE, rule="nna", order="then")
    assert same.digest() == dataclasses.replace(BASE, rule="nna").digest()
    assert canonical(same)[0].order is None
    assert dataclasses.replace(BASE, order="then").digest() != BASE.digest()


def test_a_judge_without_losses_makes_no_difference_and_says_so():
    config, notices = canonical(dataclasses.replace(BASE, rule="dkrum", judge="next"))
    assert config.judge == "batch" and config.digest() == dataclasses.replace(BASE, rule="dkrum").digest()
    assert notices == ["dkrum takes no losses: judge='next' makes no difference"]


def test_a_rule_may_refuse_a_judge(plugin):
    plugin("held_out_rule")
    with pytest.raises(ConfigError, match="does not work with judge='batch'; it works with 'held_out'"):
        prepare(dataclasses.replace(BASE, rule="best_of_all"))


def test_published_runs_keep_their_digests():
    """Settings and arguments that were added later are not in the digest at their defaults."""
    with (ROOT / "experiments/published/seeds/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 30
    numbers = {f.name: f.type for f in dataclasses.fields(Config)}
    for row in rows:
        given = {k: v for k, v in row.items() if k in numbers and k not in LATER and v != ""}
        given = {k: v if numbers[k] is str else json.loads(v) for k, v in given.items()}
        assert Config(**given).digest() == row["digest"]
    old = dataclasses.replace(BASE, optimizer="momentum(decay=0.9)")
    assert canonical(old)[0].optimizer == "momentum(decay=0.9)"
    new = dataclasses.replace(BASE, optimizer="momentum(decay=0.9, dampening=0.5)")
    assert canonical(new)[0].optimizer == "momentum(decay=0.9, dampening=0.5)"
