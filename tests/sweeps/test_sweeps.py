"""Sweeps: groups, resuming, failures, damaged files; finished runs are never lost."""

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from conftest import slowly

from ubar_jax import Config, ConfigError, progress, results, rules, simulate
from ubar_jax.config import canonical
from ubar_jax.engine.compilation import compiled_chunk
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.simulation import run
from ubar_jax.sweeps import checkpoints, cluster
from ubar_jax.sweeps import plan as sweeps
from ubar_jax.sweeps.groups import choose_width, estimate, grouped, in_packs

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[2]
BASE = Config(
    attack="gaussian", byzantine_ratio=0.3, topology="complete", batch_size=16, rounds=5, eval_every=3
)
TIMES = ("seconds",)


def varied(**lists):
    """Canonical configs, one per value of a list; other fields as in BASE."""
    changes = [{name: value} for name, values in lists.items() for value in values]
    return [canonical(dataclasses.replace(BASE, **change))[0] for change in changes]


def assert_same(folder: Path, other: Path):
    """Asserts that both folders have the same runs with the same numbers, bit for bit, except times."""
    names = sorted(p.parent.name for p in folder.glob(results.RUNS))
    assert names and names == sorted(p.parent.name for p in other.glob(results.RUNS))
    for name in names:
        one, two = (results.load_run(f / name) for f in (folder, other))
        assert one.config == two.config and one.curves.keys() == two.curves.keys()
        for key in one.curves.keys() - {"seconds"}:
            np.testing.assert_array_equal(one.curves[key], two.curves[key], err_msg=key)
        assert {k: v for k, v in one.summary.items() if k not in TIMES} == {
            k: v for k, v in two.summary.items() if k not in TIMES
        }


@pytest.mark.slow
def test_a_group_shares_one_program_and_equals_its_runs_alone(tmp_path):
    configs = varied(seed=[0, 1, 2]) + varied(learning_rate=[0.1]) + varied(rounds=[4], alpha=[0.7])
    configs += varied(attack=["gaussian(std=3)", "ipm(eps=0.3)", "ipm(eps=0.7)"])
    alone = {c: simulate(c) for c in configs}
    compiled_chunk.cache_clear()
    plan = sweeps.make_plan(configs, tmp_path)
    outcome = sweeps.carry_out(plan, tmp_path)
    assert len(plan.groups) == 2 == compiled_chunk.cache_info().misses
    assert len(outcome.programs) == 2 and not outcome.failed
    for config, expected in alone.items():
        got = results.load_run(tmp_path / config.digest())
        for key in expected.curves.keys() - {"seconds"}:
            np.testing.assert_array_equal(got.curves[key], expected.curves[key], err_msg=key)
        np.testing.assert_array_equal(got.curves["accepted"], expected.accepted)

    [first, second] = in_packs(grouped([prepare(c) for c in configs[:4]])[0], 3)
    for pack in (first, second):
        for experiment, result in zip(pack, run(pack), strict=True):
            expected = alone[experiment.config]
            for a, b in zip(*(jax.tree.leaves(r.state.params) for r in (result, expected)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
            np.testing.assert_array_equal(result.accepted, expected.accepted)
            np.testing.assert_allclose(result.curves["loss"], expected.curves["loss"], rtol=1e-5)
    assert [e.config.seed for e in first] == [0, 1, 2]
    assert [e.config.learning_rate for e in second] == [0.1] * 3  # the last run, repeated to fill the pack


@pytest.mark.slow
def test_graphs_of_one_padded_shape_share_a_program():
    base = dataclasses.replace(BASE, topology="erdos_renyi", rule="dmedian", nodes=8)
    experiments = [prepare(dataclasses.replace(base, seed=seed)) for seed in range(6)]
    group = max(grouped(experiments), key=len)
    assert len(group) >= 2 and not np.array_equal(group[0].graph.mask, group[1].graph.mask)
    for together, alone in zip(run(group[:2]), (run([e])[0] for e in group[:2]), strict=True):
        for a, b in zip(*(jax.tree.leaves(r.state.params) for r in (together, alone)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told_and_its_runs_begin_anew(tmp_path, capsys):
    configs = varied(seed=[0, 1])

    def interrupted(folder):
        [pack] = in_packs([prepare(c) for c in configs], 2)
        keep = checkpoints.writing(folder, [c.digest() for c in configs], 0)

        def stop(state):
            keep.save(state)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(pack, checkpointing=keep._replace(save=stop))
        return [p for p in (folder / checkpoints.FOLDER).rglob("*") if p.is_file()]

    def finish(folder):
        outcome = sweeps.carry_out(sweeps.make_plan(configs, folder), folder, width=2)
        assert not outcome.failed and outcome.seconds["compilation"] >= 0
        return capsys.readouterr().out

    assert interrupted(tmp_path / "good")
    assert "continues from round 3" in finish(tmp_path / "good")
    damages = {"cut": lambda f: f.write_bytes(b""), "flip": lambda f: f.write_bytes(scratch(f.read_bytes()))}
    for name, damage in damages.items():
        folder = tmp_path / name
        files = interrupted(folder)
        damage(
            max(files, key=lambda f: f.stat().st_size)
            if name == "flip"
            else next(f for f in files if "meta" in f.parts)
        )
        assert "is damaged" in finish(folder)
    for name in ("cut", "flip"):
        assert_same(tmp_path / "good", tmp_path / name)
        assert not list((tmp_path / name / checkpoints.FOLDER).glob("*"))


@pytest.mark.slow
def test_a_run_that_cannot_be_saved_takes_no_other_with_it(tmp_path, monkeypatch):
    configs = varied(seed=[0, 1, 2])
    save = results.save

    def fails(folder, result, models):
        if result.config.seed == 1:
            raise RuntimeError("no")
        save(folder, result, models)

    monkeypatch.setattr(results, "save", fails)
    outcome = sweeps.carry_out(sweeps.make_plan(configs, tmp_path), tmp_path, width=5)
    assert list(outcome.failed) == [configs[1].digest()]
    assert {r.config.seed for r in results.load_runs(tmp_path)} == {0, 2}


@pytest.fixture
def telling_rule():
    @rules.register
    def telling(inbox):
        """Own model, and two scalars."""
        seen = jnp.sum(inbox.graph.mask)
        return inbox.own, {"seen": seen, "now": inbox.t}

    yield
    del rules.parts["telling"]


@pytest.mark.slow
def test_scalars_of_a_rules_info_arrive_in_curves_tables_and_tensorboard(tmp_path, telling_rule):
    [config] = varied(rule=["telling"])
    sweeps.carry_out(sweeps.make_plan([config], tmp_path), tmp_path, tensorboard=True)
    curves = results.load_run(tmp_path / config.digest()).curves
    np.testing.assert_array_equal(curves["now"], range(5))
    np.testing.assert_array_equal(curves["seen"], [10 * 13] * 5)
    table = results.load(tmp_path)
    np.testing.assert_array_equal(table["round"], [0, 3, 5])
    np.testing.assert_array_equal(table["now"], [np.nan, 2, 4])
    assert {"train_loss", "byzantine_selected", "seen", "loss", "worst"} <= set(table.columns)
    [events] = (tmp_path / "tensorboard" / config.digest()).glob("events*")
    assert b"seen" in events.read_bytes() and b"train_loss" in events.read_bytes()


@pytest.mark.parametrize("name", ["worst", "loss", "finite", "byzantine_selected", "epoch", "alpha"])
def test_a_scalar_may_not_have_the_name_of_another_number(name):
    @rules.register
    def clashing(inbox):
        """Own model, and a scalar."""
        return inbox.own, {name: jnp.zeros(())}

    with pytest.raises(ConfigError, match=f"has a scalar '{name}', which is the name of another number"):
        simulate(dataclasses.replace(BASE, rule="clashing"))
    del rules.parts["clashing"]


def test_configs_need_not_be_canonical(tmp_path):
    given = dataclasses.replace(BASE, rule="ubar", rho=0.4, attack="gaussian(std=1)")
    plan = sweeps.make_plan([given, canonical(given)[0]], tmp_path)
    assert list(plan.configs.values()) == [canonical(given)[0]] and len(plan.left) == 1
    none = dataclasses.replace(BASE, byzantine_ratio=0.0)
    assert any("run as attack 'none'" in notice for notice in sweeps.make_plan([none], tmp_path).notices)


def test_a_table_of_all_runs(tmp_path):
    configs = varied(seed=[0, 1])
    sweeps.carry_out(sweeps.make_plan(configs, tmp_path), tmp_path)
    table = pd.read_csv(results.write_table(tmp_path))
    assert sorted(table.digest) == sorted(config.digest() for config in configs)
    assert set(table.columns) > {"rule", "attack", "seed", "worst", "mean", "seconds"}
    for row in table.itertuples():
        summary = results.load_run(tmp_path / row.digest).summary
        assert row.worst == pytest.approx(summary["worst"], rel=1e-5) and row.rule == "ubar(rho=0.4)"
        assert row.seconds == pytest.approx(sum(summary["seconds"].values()), abs=1e-3)


def test_whole_numbers_in_the_table_stay_whole():
    summary = {"worst": 0.5, "mean": 0.6, "diverged": None, "seconds": {"rounds": 1.0}}
    runs = [results.Run(Config(eval_size=size), {}, summary, str(size)) for size in (501, None)]
    text = results.table(runs)[["digest", "nodes", "eval_size", "seed"]].to_csv(index=False)
    assert text.splitlines()[1:] == ["501,10,501,0", "None,10,,0"]


def test_a_line_every_so_often_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.2)
    with progress.progress_bar(200) as bar:
        bar.set_description("1/2 runs, ubar", refresh=False)
        bar.update(50)
        time.sleep(0.5)
        bar.set_postfix(worst="91%")
        time.sleep(0.25)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("1/2 runs, ubar: 50 of 200 rounds, 00:00 so far, about 00:0")
    assert last.endswith("left, worst=91%")


def test_a_damaged_entry_of_the_compilation_cache_is_written_anew(tmp_path):
    """JAX itself would warn, compile, and never replace the entry."""
    code = """
import warnings
import ubar_jax
warnings.simplefilter("error")
import jax
from ubar_jax.engine import compilation
compilation.use_cache()
with compilation.repaired_cache():
    made = compilation._compile(lambda: jax.jit(lambda x: x + 1).trace(1.0))
print(made.cached)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    command = [sys.executable, "-c", code]

    def run_it():
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout.strip()

    assert [run_it(), run_it()] == ["False", "True"]
    (entry,) = tmp_path.glob("jit*-cache")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:700])
    assert [run_it(), run_it()] == ["False", "True"]
    assert len(entry.read_bytes()) > 700


def test_runs_of_a_pack_have_equal_rounds_and_data():
    experiments = [prepare(c) for c in varied(rounds=[4, 5]) + varied(eval_size=[50, 60])]
    assert len(grouped(experiments)) == 1
    assert [len(set(e.config for e in pack)) for pack in in_packs(experiments, 4)] == [1, 1, 1, 1]
    [longer] = estimate(grouped([prepare(c) for c in varied(rounds=[400_000])]))
    [short] = estimate(grouped(experiments))
    assert 5 < sum(short) < 60 < sum(longer) and short.evaluation > 0
    assert longer.rounds > 1000 * short.rounds


def test_a_finished_sweep_is_not_run_again_and_a_grown_one_goes_on(tmp_path):
    configs = varied(seed=[0, 1])
    sweeps.carry_out(sweeps.make_plan(configs[:1], tmp_path), tmp_path)
    before = (tmp_path / configs[0].digest() / "summary.json").stat().st_mtime_ns
    plan = sweeps.make_plan(configs, tmp_path)
    assert plan.finished == {configs[0].digest()} and [e.config for g in plan.left for e in g] == configs[1:]
    sweeps.carry_out(plan, tmp_path)
    assert (tmp_path / configs[0].digest() / "summary.json").stat().st_mtime_ns == before
    assert len(results.load_runs(tmp_path)) == 2
    assert not sweeps.make_plan(configs, tmp_path, models=True).finished

    table = results.load(tmp_path, tmp_path)  # the same folder twice: each run counts once
    assert isinstance(table, pd.DataFrame) and len(table) == 2 * 3
    row = table[(table.seed == 1) & (table["round"] == 5)].iloc[0]
    kept = results.load_run(tmp_path / configs[1].digest())
    assert row.worst == kept.summary["worst"] and row.rule == "ubar(rho=0.4)"
    assert row.epoch == 5 / kept.summary["rounds_per_epoch"]
    assert {"attack", "learning_rate", "mean", "std", "loss", "consensus", "seconds"} <= set(table.columns)


def cut(whole):
    return whole[:40]


def scratch(whole):
    """Overwrites ten bytes in the middle of the largest array's compressed data."""
    return whole[: len(whole) // 3] + bytes(10) + whole[len(whole) // 3 + 10 :]


@pytest.mark.parametrize(
    ("name", "damage"),
    [("curves.npz", cut), ("curves.npz", scratch), ("summary.json", cut), ("config.json", cut)],
)
def test_a_damaged_file_is_named_and_that_run_done_again(name, damage, tmp_path):
    configs = varied(seed=[0, 1])
    sweeps.carry_out(sweeps.make_plan(configs, tmp_path), tmp_path)
    path = tmp_path / configs[1].digest() / name
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with pytest.warns(UserWarning, match=f"{name} is damaged"):
        assert len(results.load_runs(tmp_path)) == 1
    plan = sweeps.make_plan(configs, tmp_path)
    assert [e.config for g in plan.left for e in g] == configs[1:]
    assert len(plan.notices) == 1 and str(path) in plan.notices[0]
    sweeps.carry_out(plan, tmp_path)
    assert len(results.load_runs(tmp_path)) == 2


def test_results_of_another_format_are_refused(tmp_path):
    configs = varied(seed=[0])
    sweeps.carry_out(sweeps.make_plan(configs, tmp_path), tmp_path)
    path = tmp_path / configs[0].digest() / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ConfigError, match="format 99, this version reads"):
        sweeps.make_plan(configs, tmp_path)


@pytest.fixture
def broken_rule():
    @rules.register
    def broken(inbox):
        """Fails when it is traced."""
        raise RuntimeError("this rule is broken")

    yield "broken"
    del rules.parts["broken"]


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tmp_path, broken_rule):
    configs = varied(rule=[broken_rule, "average", "ubar"])
    outcome = sweeps.carry_out(sweeps.make_plan(configs, tmp_path), tmp_path)
    assert list(outcome.failed) == [configs[0].digest()]
    failure = json.loads((tmp_path / configs[0].digest() / "failed.json").read_text())
    assert "PartError: rule 'broken' failed at line " in failure["error"]
    assert ": RuntimeError: this rule is broken. A rule is a function" in failure["error"]
    assert failure["config"]["rule"] == "broken"
    assert len(results.load_runs(tmp_path)) == 2
    plan = sweeps.make_plan(configs, tmp_path)
    assert [e.config for g in plan.left for e in g] == configs[:1]  # the failed run is repeated


def test_a_rule_that_asks_for_losses_must_say_how_many(tmp_path):
    def greedy(inbox):
        """Asks for a loss that it did not declare with pairs=."""
        return inbox.own + inbox.loss_of(inbox.rows[:, 0], inbox.rows[:, 0])[:, None], {}

    rules.register(greedy)
    [config] = varied(rule=["greedy"])
    [error] = sweeps.carry_out(sweeps.make_plan([config], tmp_path), tmp_path).failed.values()
    del rules.parts["greedy"]
    assert "greedy asks for losses: register it with pairs=" in str(error)


def test_a_run_that_takes_too_long_fails_and_the_others_go_on(tmp_path):
    configs = varied(rounds=[3 * 10**6, 6])  # of one program, so the second compiles nothing
    outcome = sweeps.carry_out(
        sweeps.make_plan(configs, tmp_path), tmp_path, checkpoint_seconds=0, run_timeout=2
    )
    [digest] = outcome.failed
    failure = json.loads((tmp_path / digest / "failed.json").read_text())
    assert failure["error"] == "TimeoutError: the run took longer than --run_timeout=2 seconds"
    assert failure["config"]["rounds"] == 3 * 10**6 and len(results.load_runs(tmp_path)) == 1


def test_checkpoints_of_others_are_left_alone(tmp_path, monkeypatch):
    """Those of other runs, which another worker may be writing, and those of other versions."""
    [config] = varied(seed=[0])
    keep = checkpoints.writing(tmp_path, [config.digest()], 0)
    run([prepare(config)], checkpointing=keep)
    for damaged in (tmp_path / checkpoints.FOLDER).rglob("meta/*"):
        whole = damaged.read_bytes()
        damaged.write_bytes(b"")
        assert checkpoints.found(tmp_path, ["another"]) == ([], [])
        damaged.write_bytes(whole)
    mine = [config.digest()]
    assert checkpoints.found(tmp_path, mine) == ([mine], [])
    monkeypatch.setattr(checkpoints, "versions", lambda: {"jax": "0.0.1"})
    assert checkpoints.found(tmp_path, mine) == ([], [])
    assert checkpoints.found(tmp_path, mine, anywhere=True) == ([mine], [])
    [path] = (tmp_path / checkpoints.FOLDER).iterdir()
    old = path.rename(path.with_name(path.name.partition("-")[2]))  # the name that older versions gave
    assert checkpoints.found(tmp_path, ["another"], anywhere=True) == ([], []) and old.exists()
    assert checkpoints.found(tmp_path, mine, anywhere=True) == ([mine], []) and path.exists()


def test_results_of_other_versions_are_read(tmp_path):
    [config] = varied(seed=[0])
    sweeps.carry_out(sweeps.make_plan([config], tmp_path), tmp_path)
    path = tmp_path / config.digest() / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "versions": {"jax": "0.0.1"}}))
    assert sweeps.make_plan([config], tmp_path).finished == {config.digest()}


def test_a_full_disk_stops_the_sweep_and_keeps_what_is_whole(tmp_path, monkeypatch):
    configs = varied(seed=[0, 1, 2])
    write = np.savez_compressed

    def savez(path, **arrays):
        if results.load_runs(tmp_path):
            path.write_bytes(b"half of a fi")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, **arrays)

    monkeypatch.setattr(np, "savez_compressed", savez)
    with pytest.raises(OSError, match="No space left"):
        sweeps.carry_out(sweeps.make_plan(configs, tmp_path), tmp_path, checkpoint_seconds=0)
    monkeypatch.undo()
    begun, _ = checkpoints.found(tmp_path, [config.digest() for config in configs])
    assert begun == [[configs[1].digest()]]  # it continues from there
    assert [r.config.seed for r in results.load_runs(tmp_path)] == [0]
    assert not list(tmp_path.glob(".part-*")) and not list(tmp_path.glob("*/failed.json"))
    sweeps.carry_out(sweeps.make_plan(configs, tmp_path), tmp_path)
    assert len(results.load_runs(tmp_path)) == 3


def test_tensorboard_gets_the_scalars(tmp_path):
    [config] = varied(seed=[0])
    sweeps.carry_out(sweeps.make_plan([config], tmp_path), tmp_path, tensorboard=True)
    [events] = (tmp_path / "tensorboard" / config.digest()).glob("events*")
    written = events.read_bytes()
    assert all(name in written for name in (b"worst", b"mean", b"consensus", b"loss"))


def sweep(*args, cwd, **env):
    command = [sys.executable, "-m", "ubar_jax.experiments.sweep", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env}
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)  # importing JAX sets it in this process, and children inherit it
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, **streams)


GRID = ["--rule=ubar", "--rule=dmedian", "--attack=gaussian", "--byzantine_ratio=0.3", "--topology=complete"]
GRID += ["--rounds=200", "--eval_every=10", "--batch_size=16", "--seeds=0,1", "--optimizer=momentum"]
GRID += ["--learning_rate=0.01"]


@pytest.mark.parametrize(("width", "least", "groups"), slowly((1, 3, 2), (2, 3, 2)))
def test_killed_at_random_moments_it_ends_as_if_uninterrupted(width, least, groups, tmp_path):
    """After `least` SIGKILLs or more, results are bit-identical to those of an uninterrupted sweep."""
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    args = [*GRID[2 - groups :], f"--width={width}", "--checkpoint_seconds=0"]
    quiet = sweep(*args, "--results=quiet", cwd=tmp_path, **env)
    out, err = quiet.communicate(timeout=300)
    assert quiet.returncode == 0, err
    assert f"{groups} groups, {groups} compiled and 0 from the cache" in out
    folder, draw = tmp_path / "killed", random.Random(width)

    def written():
        return sorted(map(str, [*folder.glob(".checkpoints/*/*"), *folder.glob(results.RUNS)]))

    kills = 0
    while kills < least or not any(name.rpartition("/")[2].isdigit() for name in written()):
        process, before = sweep(*args, "--results=killed", cwd=tmp_path, **env), written()
        while written() == before and process.poll() is None:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))  # a random moment: computing or writing
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
        kills += 1
        kept = " ".join(name[len(str(folder)) + 1 :] for name in written())
        print(f"width {width}, kill {kills}: then there were {kept}")
    process = sweep(*args, "--results=killed", cwd=tmp_path, **env)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "continues from round" in out
    assert "0 compiled" in out  # all programs come from the cache
    assert "aot_loader" not in err  # no XLA warnings about cached programs
    assert_same(tmp_path / "quiet", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob(".checkpoints/*"))


def test_ctrl_c_says_how_to_go_on_and_a_folder_has_one_owner(tmp_path):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("Ctrl-C is ignored here, as in a background job of a script")
    args = ["--rounds=100000", "--checkpoint_seconds=0", "--results=out"]
    process = sweep(*args, cwd=tmp_path)
    while not list((tmp_path / "out").glob(".checkpoints/*/*")):
        assert process.poll() is None
        time.sleep(0.1)
    second = sweep(*args, cwd=tmp_path)
    _, err = second.communicate(timeout=300)
    assert second.returncode == 2 and f"in use by process {process.pid} on " in err
    assert "python -m ubar_jax.experiments.sweep --rounds=100000" in err
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "run the same command to continue" in err and "Traceback" not in err


def test_dry_run_and_exit_codes(tmp_path):
    plugin = (
        "from ubar_jax import rules\n\n@rules.register\ndef broken(inbox):\n    '''Fails.'''\n    1 / 0\n"
    )
    (tmp_path / "mine.py").write_text(plugin)
    args = [
        "--plugin=mine.py",
        "--rule=broken",
        "--rule=average",
        "--seeds=0,1",
        "--rounds=4",
        "--eval_every=2",
    ]
    args += ["--topology=complete", "--batch_size=16", "--results=out"]
    dry = sweep(*args, "--dry_run", cwd=tmp_path)
    out, err = dry.communicate(timeout=300)
    assert dry.returncode == 0, err
    assert "group 2: average" in out and "4 runs to do, 0 done already; 2 compilations" in out
    assert "about 0" in out and not list((tmp_path / "out").glob(results.RUNS))
    real = sweep(*args, cwd=tmp_path)
    out, err = real.communicate(timeout=300)
    assert real.returncode == 1
    failed = "rule 'broken' failed at line 6 of mine.py, `1 / 0`: ZeroDivisionError: division by zero"
    assert f"FAILED: broken under none, seed 0: {failed}" in err and "2 of 4 runs failed" in err
    assert len(results.load_runs(tmp_path / "out")) == 2
    about = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert about["groups"] == 2 and "--plugin=mine.py" in about["command"] and "jax" in about["versions"]


def test_every_run_is_in_one_task():
    """Packs with a checkpoint stay together, unless they overlap: those of older versions may."""
    group = [SimpleNamespace(digest=digest) for digest in "abcde"]
    assert cluster._units(group, set(), [], 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert cluster._units(group, {"a"}, [["b", "c"], ["c"], ["x"]], 2) == [["b", "c"], ["d", "e"]]
    assert cluster._units(group, set("ab"), [["a", "b"], ["c", "c"]], 3) == [["c"], ["d", "e"]]
    assert choose_width(group[:1], 3, size=5) == 3 and choose_width(group, 9) == 5
