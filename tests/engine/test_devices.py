import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from ubar_jax import Config, ConfigError, use_devices
from ubar_jax.engine import devices
from ubar_jax.numerics import nn

ROOT = Path(__file__).parents[2]

# Runs in a process of its own, in which JAX has not started.
SPREAD = """
import dataclasses, sys
import numpy as np
import jax
from ubar_jax import Config, use_devices
use_devices(3)
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.simulation import first_snapshot, run
from ubar_jax.sweeps import checkpoints

BASE = Config(byzantine_ratio=0.3, nodes=7, rounds=4, eval_every=2, batch_size=8,
              dataset="synthetic(examples=600, size=4, classes=4)", model="mlp(hidden=6)")

def results_on(count, runs, **more):
    assert use_devices(count) == count
    return run([prepare(config) for config in runs], **more)

def same(one, two):
    for a, b in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(two.state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("accuracy", "train_loss", "consensus"):
        np.testing.assert_allclose(one.curves[name], two.curves[name], rtol=1e-6)
    np.testing.assert_array_equal(one.accepted, two.accepted)
"""
EQUAL = """
config = dataclasses.replace(BASE, rule={rule!r}, attack={attack!r}, **{more!r})
[one], *others = (results_on(count, [config]) for count in (1, 2, 3))
for [other] in others:
    same(one, other)
"""
CONTINUED = """
from pathlib import Path
config = dataclasses.replace(BASE, rule="centred_clipping", attack="time_coupled", topology="complete")
runs = [dataclasses.replace(config, seed=seed) for seed in (0, 1)]
whole = results_on(1, runs)
folder = Path({folder!r})
keep = checkpoints.writing(folder, ["a"], 0)

def save(now):
    keep.save(now)
    raise KeyboardInterrupt

try:
    results_on(3, runs, checkpointing=keep._replace(due=lambda ahead: True, save=save))
except KeyboardInterrupt:
    pass
use_devices(2)
start = checkpoints.load(folder, ["a"], first_snapshot([prepare(config) for config in runs]))
assert start.done == 2
for one, other in zip(whole, results_on(2, runs, start=start)):
    same(one, other)
"""


def in_a_process(code, cores=3):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": str(cores)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "attack", "more"),
    [
        ("ubar", "alie", {}),
        ("average", "min_max", {"local_steps": 2}),
        ("dbulyan", "label_flip", {"model": "lenet", "dataset": "synthetic(examples=600, size=12)"}),
        ("ios", "ipm_optimised", {}),
        ("ubar", "min_max", {"order": "then", "judge": "held_out", "held_out": 0.2, "optimizer": "momentum"}),
    ],
)
def test_models_have_the_same_bits_on_any_number_of_devices(rule, attack, more):
    in_a_process(SPREAD + EQUAL.format(rule=rule, attack=attack, more=more))


@pytest.mark.slow
def test_a_checkpoint_is_continued_on_another_number_of_devices(tmp_path):
    in_a_process(SPREAD + CONTINUED.format(folder=str(tmp_path)))


@pytest.mark.medium
def test_rows_are_split_dealt_out_and_put_together_again():
    code = """
import jax, numpy as np, jax.numpy as jnp
from ubar_jax import use_devices
assert use_devices() == 3
from ubar_jax.engine import devices
from ubar_jax.numerics import nn
rows = {}
def f(x):
    rows.setdefault("traced", []).append(len(x))
    return 2 * x, x[:, 0]
for count in range(1, 9):
    x = np.arange(2.0 * count).reshape(count, 2)
    for way in (nn.split, nn.deal):
        a, b = jax.jit(nn.over(devices.mesh(3), lambda x: way(f, x)))(x)
        np.testing.assert_array_equal(a, 2 * x)
        np.testing.assert_array_equal(b, x[:, 0])
    assert rows["traced"][-1] == -(-count // 3)
part = lambda k: jnp.float32(k) ** 3
whole = jax.jit(lambda: nn.split_sum(part, 7, jnp.float32(1)))()
assert whole == jax.jit(nn.over(devices.mesh(3), lambda: nn.split_sum(part, 7, jnp.float32(1))))() == 442
"""
    in_a_process(code)


def test_without_a_mesh_nothing_is_split():
    x = np.arange(6.0).reshape(3, 2)
    assert nn.over(None, len) is len
    np.testing.assert_array_equal(nn.split(lambda x: x + 1, x), x + 1)


def test_a_process_in_which_jax_has_started_keeps_its_devices(monkeypatch):
    assert jax.devices()
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # use_devices changes it
    monkeypatch.setattr(devices, "cores", lambda: 64)
    with pytest.warns(UserWarning, match=r"JAX has started with \d+ CPU device"):
        assert use_devices(64) == len(jax.devices())
    assert use_devices() == len(jax.devices())
    assert use_devices(1) == 1


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setattr(devices, "cores", lambda: 2)
    with pytest.raises(ConfigError, match=r"devices=3: this machine has 2 cores; give a number from 1"):
        use_devices(3)


def test_devices_are_not_a_setting_of_a_run():
    assert "devices" not in {field.name for field in dataclasses.fields(Config)}
