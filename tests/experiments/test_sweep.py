"""The sweep command, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import slowly

from ubar_jax.experiments.sweep import GRID, grid
from ubar_jax.parts.byzantine import attacks
from ubar_jax.sweeps.results import load_runs

pytestmark = pytest.mark.medium

SMALL = ["--rounds=4", "--eval_every=2", "--batch_size=16", "--nodes=6"]
ROOT = Path(__file__).parents[2]


def sweep(*args, cwd, **env):
    command = [sys.executable, "-m", "ubar_jax.experiments.sweep", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def lists(**given):
    defaults = {name: [None] for name in GRID}
    defaults |= {"rule": ["ubar"], "attack": ["none"], "topology": ["erdos_renyi"]}
    defaults |= {"dataset": ["digits"], "model": ["mlp"], "sharding": ["iid"], "optimizer": ["sgd"]}
    defaults |= {"schedule": ["fading"], "nodes": [6], "byzantine_ratio": [0.5], "rounds": [4]}
    defaults |= {"learning_rate": [0.05], "batch_size": [16], "seeds": ["0"], "rho": ["0.4"]}
    defaults |= {"local_steps": [1], "held_out": [0.0], "judge": ["batch"]}
    return {**defaults, **given}


def test_the_grid_is_the_product_with_duplicates_merged():
    runs, notices = grid(
        lists(
            rule=["ubar", "ubar(rho=0.4)", "average"],
            rho=["0.4", "conservative"],
            attack=["none", "gaussian", "gaussian(std=1)"],
            byzantine_ratio=[0.0, 0.5],
            seeds=["0,1", "2"],
        )
    )
    # ubar at two rhos and average; none, and gaussian at ratio 0.5; three seeds.
    assert len(runs) == 3 * 2 * 3
    assert any("has no attacker: run as attack 'none'" in n for n in notices)
    assert any("duplicates merged" in n for n in notices)


def test_a_sweep_from_a_flagfile(tmp_path):
    (tmp_path / "base.flags").write_text("\n".join(SMALL) + "\n")
    (tmp_path / "my.flags").write_text(
        "# a comment\n--flagfile=base.flags\n--rule=ubar(rho=0.4)\n--rule=average\n"
        "--attack=nonfinite\n--byzantine_ratio=0.4\n--save_models\n--results=out\n"
    )
    done = sweep("--flagfile=my.flags", cwd=tmp_path)
    assert done.returncode == 3, done.stderr  # a run diverged
    assert "worst" in done.stdout and "ubar(rho=0.4)" in done.stdout
    assert "diverged at round 0" in done.stdout
    assert (tmp_path / "out" / "worst_accuracy.png").stat().st_size > 10_000
    runs = load_runs(tmp_path / "out")
    assert {r.config.rule for r in runs} == {"ubar(rho=0.4)", "average"}
    for run in runs:
        assert run.curves["accuracy"].shape == (3, 6)
        assert run.summary["worst"] == pytest.approx(run.curves["accuracy"][-1].min())
        folder = tmp_path / "out" / run.config.digest()
        with np.load(folder / "models.npz") as models:
            assert sum(models[k].size for k in models) == 6 * 7510 + 3  # + 3: t and the key
        assert json.loads((folder / "summary.json").read_text())["versions"]["jax"]
    again = sweep("--flagfile=my.flags", cwd=tmp_path)
    assert "2 of 2 runs are in out already" in again.stdout
    plot = [sys.executable, "-m", "ubar_jax.experiments.plot", "--results=out"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    drawn = subprocess.run(plot, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert "worst_accuracy.png" in drawn.stdout


@pytest.mark.slow
def test_a_clipped_count_is_told_once(tmp_path):
    args = ["--rule=dkrum", "--seeds=0", *SMALL, "--rounds=1", "--results=out"]
    out = sweep(*args, cwd=tmp_path).stdout
    assert out.count("needs more neighbours than 6 of 6 benign nodes have") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rul=ubar"], "Did you mean: rule"),
        (["--rule=ubarr"], "did you mean 'ubar'?"),
        (["--dataset=mnist"], "TFDS_DATA_DIR"),
        *slowly(
            (["--results=/proc/no/such"], "cannot be written"),
            (["--plugin=no_such_module"], "plugin 'no_such_module' cannot be imported"),
            (["--seeds=x"], "--seeds='x' is not a whole number"),
            (["lisst"], "unknown argument 'lisst'"),
        ),
    ],
)
def test_bad_input_gets_one_clear_message(args, message, tmp_path):
    done = sweep(*args, cwd=tmp_path, TFDS_DATA_DIR=str(tmp_path / "nothing"))
    assert done.returncode != 0
    assert message in done.stderr and "Traceback" not in done.stderr


def test_list_names_every_part(tmp_path):
    out = sweep("list", cwd=tmp_path).stdout
    for text in ("ubar(rho=0.4)", "gaussian(std=1.0)", "erdos_renyi(connection=0.4)", "digits()", "cnn()"):
        assert text in out
    assert "rho: a number in (0, 1] or 'conservative' or 'oracle'" in out
    for name in set(attacks.parts) - {"none"}:
        last = attacks.get(name).description.split("Knows")[1]  # what the attacker knows
        assert last.split("\n")[0] in out, name


PLUGIN = '''
import jax.numpy as jnp
from ubar_jax import attacks, rules

@rules.register
def first_neighbour(inbox):
    """Takes the first neighbour's model."""
    chosen = jnp.cumsum(inbox.graph.mask, axis=1) == 1
    from ubar_jax import linalg
    return linalg.mean(inbox, chosen & inbox.graph.mask), {"selected": chosen & inbox.graph.mask}

@attacks.register
def zeros(key, view):
    """Sends zeros."""
    return jnp.zeros((view.byzantine, view.own.shape[1]))
'''


@pytest.mark.slow
def test_a_plugin_brings_its_own_parts(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    args = ["--rule=first_neighbour", "--attack=zeros", "--byzantine_ratio=0.3", *SMALL]
    done = sweep("--plugin=mine.py", *args, "--results=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "first_neighbour" in done.stdout
    check = "import mine\nfrom ubar_jax.testing import check_attack, check_rule\n"
    check += "check_rule('first_neighbour', relabel=False)\ncheck_attack('zeros')"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", check], env=env, check=True, timeout=300)
