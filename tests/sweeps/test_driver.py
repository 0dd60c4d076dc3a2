"""What the driver of a cluster does when a worker has died; needs no Ray."""

import dataclasses
import json

import pytest

from ubar_jax import Config
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.simulation import run
from ubar_jax.sweeps import checkpoints, cluster, results
from ubar_jax.sweeps.plan import carry_out, make_plan
from ubar_jax.sweeps.worker import Job, Report

pytestmark = pytest.mark.medium

CONFIG = Config(rule="average", nodes=4, rounds=4, eval_every=2, batch_size=16)


@pytest.fixture
def died(tmp_path, monkeypatch):
    """A function: a worker died at all runs of a plan; returns the state after it and what is repeated."""
    job = Job(tmp_path, tmp_path, (), {}, None, False, 60, False, 9.0)

    def bury(plan, job=job, **attempt):
        again = []
        monkeypatch.setattr(cluster, "_submit", lambda _, __, runs: again.extend(runs))
        state = cluster._State(plan, job, tmp_path, {})
        cluster._bury(
            None, state, cluster._Attempt(list(plan.configs), tmp_path / "note", **attempt), OSError()
        )
        return state, again

    bury.job = job
    return bury


@pytest.fixture
def finished(tmp_path):
    """Two runs with results, as (configs, digests)."""
    configs = [dataclasses.replace(CONFIG, seed=seed) for seed in (0, 1)]
    plan = make_plan(configs, tmp_path)
    carry_out(plan, tmp_path)
    return configs, list(plan.configs)


def test_what_has_a_result_is_over_and_what_is_damaged_is_repeated(died, finished, tmp_path):
    configs, digests = finished
    (tmp_path / digests[1] / "curves.npz").write_bytes(b"")
    state, again = died(make_plan(configs, tmp_path))
    assert again == digests[1:] and state.over == {digests[0]} and not state.failed
    state, again = died(make_plan(configs, tmp_path), died.job._replace(models=True))
    assert again == digests and not state.over  # no models yet


def test_checkpoints_of_finished_runs_are_removed_even_if_nothing_is_left_to_do(died, finished, tmp_path):
    """A worker and its driver may be killed between the result and the end of its checkpoint."""
    configs, digests = finished
    plan = make_plan(configs, tmp_path)
    run([prepare(configs[0])], checkpointing=checkpoints.writing(tmp_path, digests[:1], 0))
    assert checkpoints.found(tmp_path, digests) == ([digests[:1]], [])
    outcome = cluster.carry_out(plan, died.job, 2, None)
    assert not outcome.failed and not list((tmp_path / checkpoints.FOLDER).iterdir())


def test_only_the_late_run_has_failed(died, tmp_path):
    """Also if its worker began the next one before it was killed."""
    configs = [dataclasses.replace(CONFIG, seed=seed) for seed in (0, 1)]
    plan = make_plan(configs, tmp_path)
    late, other = plan.configs
    state, again = died(plan, late=[late], report=Report(runs=[other], earlier=3))
    assert again == [other] and list(state.failed) == [late] and state.earlier == 0
    told = json.loads((tmp_path / late / "failed.json").read_text())["error"]
    assert told == "TimeoutError: the run took longer than --run_timeout=9 seconds"
    assert not results.has_result(tmp_path / late, configs[0])
