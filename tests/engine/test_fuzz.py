"""Random valid settings over all registries: no run fails, and the invariants of every run hold."""

import dataclasses
import os
import random

import jax
import numpy as np
import pytest

from ubar_jax import Config, ConfigError, simulate
from ubar_jax.config import REGISTRIES, canonical
from ubar_jax.parts.aggregation import rules
from ubar_jax.registry import Choice

NODES, ROUNDS = 6, 3
SMALL = {"examples": 240, "size": 3, "classes": 3}  # so that compilation dominates the cost of a run


def random_value(draw: random.Random, allowed):
    """A valid value for an argument with this annotation, near the lower end of its range."""
    if isinstance(allowed, Choice):
        return draw.choice(allowed.options)
    if allowed.words and draw.random() < 0.3:
        return draw.choice(allowed.words)
    low = allowed.low if allowed.low > float("-inf") else -2
    high = min(allowed.high, low + 4)
    if allowed.integer:
        return draw.randint(int(low), int(high))
    return round(low + (high - low) * draw.uniform(0.01, 0.99), 3)


def random_spec(draw: random.Random, kind: str, names=None) -> str:
    """A random part of a kind, with some of its arguments set."""
    registry = REGISTRIES[kind]
    part = registry.get(draw.choice(sorted(names or registry.parts)))
    given = {}
    for name, parameter in part.parameters.items():
        allowed = SMALL.get(name) if part.name == "synthetic" else parameter.allowed
        if part.name == "synthetic" and name in SMALL:
            given[name] = allowed
        elif part.name == "sleeper" and name == "attack":
            given[name] = random_spec(draw, kind, set(registry.parts) - {"none", "sleeper"})
        elif allowed and draw.random() < 0.5:
            given[name] = random_value(draw, allowed)
    return f"{part.name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


def random_config(draw: random.Random) -> Config:
    fixed = {
        "dataset": {"synthetic"},
        "model": {"mlp"},
        "topology": set(REGISTRIES["topology"].parts) - {"file"},
    }
    specs = {kind: random_spec(draw, kind, fixed.get(kind)) for kind in REGISTRIES}
    if draw.random() < 0.9:  # mostly small values; the others test the error messages
        specs["model"] = f"mlp(hidden={draw.randint(1, 4)})"
    return Config(
        **specs,
        nodes=NODES,
        byzantine_ratio=draw.choice([0.0, 0.2, 0.4]),
        connection=draw.choice([0.5, 0.9, 1.0]),
        rho=draw.choice([0.1, 0.5, 1.0, "conservative", "oracle"]),
        alpha=draw.choice([None, None, 0.0, 0.3, 1.0]),
        learning_rate=draw.choice([0.0, 0.01, 0.1]),
        batch_size=draw.choice([1, 7, 16]),
        rounds=ROUNDS,
        eval_every=draw.choice([1, 2, 5]),
        eval_size=draw.choice([None, 1, 30, 1000]),
        seed=draw.randrange(3),
        order=draw.choice([None, None, "while", "then"]),
        local_steps=draw.choice([1, 1, 2]),
        held_out=draw.choice([0.0, 0.5]),
        judge=draw.choice(["batch", "batch", "next", "held_out"]),
    )


def check(config: Config) -> bool:
    """Runs a config twice; False if it is refused."""
    try:
        config, _ = canonical(config)
        result = simulate(config)
    except ConfigError as error:
        assert len(str(error)) > 20
        return False
    evaluations = 1 + -(-ROUNDS // config.eval_every)
    curves, said = result.curves, f"{config}"
    for name in ("round", "worst", "mean", "std", "consensus", "seconds"):
        assert curves[name].shape == (evaluations,), said
    for name in ("accuracy", "loss"):
        assert curves[name].shape == (evaluations, NODES), said
    for name in ("train_loss", "byzantine_candidates", "byzantine_selected"):
        assert curves[name].shape == (ROUNDS,), said
    assert (curves["worst"] <= curves["mean"] + 1e-6).all(), said
    assert result.accepted.shape == (NODES, NODES + config.byzantine), said
    assert (result.accepted >= 0).all() and (result.accepted <= ROUNDS).all(), said
    if rules.parse(config.rule).traits.defends:
        assert result.diverged is None, said
        honest = [np.asarray(leaf)[:NODES] for leaf in jax.tree.leaves(result.state.params)]
        assert all(np.isfinite(leaf).all() for leaf in honest), said
    again = simulate(config)
    for one, two in zip(*(jax.tree.leaves(r.state.params) for r in (result, again)), strict=True):
        np.testing.assert_array_equal(one, two, err_msg=said)
    for name in curves.keys() - {"seconds"}:
        np.testing.assert_array_equal(curves[name], again.curves[name], err_msg=f"{name} of {said}")
    return True


def check_many(seed: int, count: int) -> None:
    draw = random.Random(seed)
    ran = sum(check(random_config(draw)) for _ in range(count))
    print(f"{ran} of {count} settings ran, the others were refused")
    assert ran > count / 2


@pytest.mark.medium
def test_random_settings():
    check_many(0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_random_settings(seed):
    check_many(seed, int(os.environ.get("UBAR_FUZZ", 24)) // 2)


def test_settings_differ():
    draw = random.Random(0)
    configs = [random_config(draw) for _ in range(200)]
    for kind in set(REGISTRIES) - {"dataset", "model"}:
        names = {getattr(config, kind).split("(")[0] for config in configs}
        assert names == set(REGISTRIES[kind].parts) - {"file"}, kind
    assert len({dataclasses.astuple(config) for config in configs}) == 200
