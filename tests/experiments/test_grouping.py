"""Runs grouped by their settings, and settings as words."""

import dataclasses

import numpy as np
import pytest
from test_plot import make_run, make_runs

from ubar_jax import Config, simulate
from ubar_jax.experiments import grouping

pytestmark = pytest.mark.medium


def test_labels_leave_defaults_out():
    assert grouping.short("rule", "dkrum(rho=0.4, byzantine=None)") == "dkrum(rho=0.4)"
    assert grouping.short("rule", "dkrum(rho=0.3, byzantine='oracle')") == "dkrum(rho=0.3, byzantine=oracle)"
    assert grouping.short("attack", "gaussian(std=1.0)") == "gaussian"
    assert grouping.short("attack", "gaussian(std=200.0)") == "gaussian(std=200)"
    assert grouping.short("rule", "of_a_plugin(a=1)") == "of_a_plugin(a=1)"
    assert grouping.short("model", "package.module:Class") == "package.module:Class"
    assert grouping.short("byzantine_ratio", 0.25) == "0.25"


def bounds_at(runs):
    """{(rule, attack, ratio, topology, judge, seed): digest of the run shown} of floor and ceiling."""
    names = ("rule", "attack", "byzantine_ratio", "topology", "judge", "seed")
    shown = [run for run in grouping.with_bounds(runs) if run.config.rule in grouping.BOUNDS]
    found = {tuple(getattr(run.config, name) for name in names): run.digest for run in shown}
    assert len(found) == len(shown)
    return found


def test_floor_and_ceiling_are_shown_where_their_settings_agree():
    er, ratio = "erdos_renyi(connection=0.4)", {"byzantine_ratio": 0.4}
    ruled = make_runs(rule=["ubar"], attack=["none", "alie", "ipm"], byzantine_ratio=[0.25, 0.4], seed=[0, 1])
    alie, ipm = sorted({run.config.attack for run in ruled} - {"none"})
    local = make_run(rule="local", attack="gaussian", **ratio)
    oracle = make_run(rule="oracle", attack="ipm", **ratio)
    calm = make_run(rule="local")
    wanted = {("local", attack, 0.4, er, "batch", 0): local.digest for attack in (alie, ipm)}
    wanted |= {("oracle", attack, 0.4, er, "batch", 0): oracle.digest for attack in (alie, ipm)}
    wanted |= {("local", "none", 0, er, "batch", 0): calm.digest}  # not under attack: its shares are larger
    assert bounds_at([*ruled, local, oracle, calm]) == wanted
    # A run with exactly the settings comes first.
    exact = make_run(rule="local", attack="alie", **ratio)
    wanted[("local", alie, 0.4, er, "batch", 0)] = exact.digest
    assert bounds_at([exact, *ruled, local, oracle, calm]) == wanted
    assert (
        bounds_at([*ruled, local, oracle, calm, exact])[("local", alie, 0.4, er, "batch", 0)] == exact.digest
    )
    # Only the floor holds for other topologies; both hold for every judge, and no other run is added.
    ring = make_run(rule="ubar", attack="alie", topology="ring", **ratio)
    assert bounds_at([ring, local, oracle]) == {
        ("local", alie, 0.4, "ring", "batch", 0): local.digest,
        ("oracle", ipm, 0.4, er, "batch", 0): oracle.digest,
    }
    judged = {"attack": "ipm", "held_out": 0.2, "judge": "held_out", **ratio}
    held = [make_run(rule=rule, **judged) for rule in ("ubar", "local", "oracle")]
    assert bounds_at(held) == {(r.config.rule, ipm, 0.4, er, "held_out", 0): r.digest for r in held[1:]}
    assert grouping.with_bounds(ruled) == ruled and grouping.with_bounds([local, oracle]) == [oracle, local]


@pytest.mark.slow
def test_floor_and_ceiling_do_not_depend_on_the_settings_that_may_differ():
    base = Config(attack="gaussian", byzantine_ratio=0.4, nodes=5, rounds=4, eval_every=2, batch_size=16)
    changes = {"attack": "label_flip", "topology": "ring", "alpha": 0.3, "order": "then"}
    for rule in ("oracle", "local"):
        config = dataclasses.replace(base, rule=rule)
        curves = simulate(config).curves
        for name in set(grouping.BOUNDS[rule].free) - {"judge"}:  # a rule that takes no losses has no judge
            other = simulate(dataclasses.replace(config, **{name: changes[name]})).curves
            np.testing.assert_allclose(other["accuracy"], curves["accuracy"], atol=0.003)
            np.testing.assert_allclose(other["consensus"], curves["consensus"], rtol=1e-4)


def test_strengths_are_in_the_order_of_numbers():
    runs = [make_run(attack=f"ipm(eps={eps})", byzantine_ratio=0.4) for eps in (10, 3, 0.5, 100)]
    assert [value.split("=")[1] for value in grouping.settings(runs, "attack")] == [
        "0.5)",
        "3.0)",
        "10.0)",
        "100.0)",
    ]
