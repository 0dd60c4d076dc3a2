"""The paper's figures: their flagfiles, and the command that runs and draws them."""

import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from absl import flags

from ubar_jax.experiments import command, grids, grouping, plot, reproduce
from ubar_jax.sweeps import results
from ubar_jax.sweeps.results import Run

SETTINGS = tuple(f"paper/{profile}/{data}" for profile in ("cpu", "gpu") for data in reproduce.DATASETS)
NAMES = sorted(name for name in command.shipped() if name.startswith("paper/") and name not in SETTINGS)


@pytest.mark.parametrize("name", NAMES)
def test_a_flagfile_has_valid_runs_and_opens_with_its_command_and_time(name):
    _, profile, figure = name.split("/")
    runs, _, folder = grids.grid_of(name)
    about = [line for line in command.shipped()[name].read_text().splitlines() if line.startswith("#")]
    assert f"--flagfile={name}" in about[-2]
    number = re.match(r"# About .* (?:on two cores|on a GPU) .*\((\d+) runs?\)\.", about[-1])[1]
    assert int(number) == len(runs)
    parts = {part for recipe in reproduce.FIGURES.values() for part in recipe.parts}
    assert figure.partition("_")[2] in parts and str(folder).startswith(f"results/paper/{profile}/")


def faked(profile, figure):
    """A finished run for every run behind a figure, without running it."""
    for name in reproduce.flagfiles(profile, figure):
        for run in grids.grid_of(name)[0]:
            times = np.arange(0, run.config.rounds + 1, run.config.eval_every)
            worst = np.full(len(times), 0.9 if run.config.dataset == "mnist" else 0.3)
            accuracy = np.repeat(worst[:, None], 3, axis=1)
            summary = {"worst": worst[-1], "mean": worst[-1], "rounds_per_epoch": 7, "diverged": None}
            summary |= {"seconds": {"rounds": 1.0, "evaluation": 1.0}, "versions": {}, "device": "cpu"}
            yield Run(run.config, {"round": times, "worst": worst, "accuracy": accuracy}, summary, run.digest)


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("figure", reproduce.FIGURES)
def test_every_figure_shows_one_data_set_per_cell_and_its_bounds(figure, profile, monkeypatch):
    fakes = list(faked(profile, figure))
    monkeypatch.setattr(results, "load_runs", lambda *folders: fakes)
    recipe, (runs, total) = reproduce.FIGURES[figure], reproduce.runs_of(profile, figure)
    assert len(runs) == total
    shown = grouping.with_bounds(runs)
    assert len(list(recipe.draw(shown, *recipe.settings))) >= (figure != "time")
    apart = ("attack",) if figure == "theorem1" else recipe.settings  # it has a panel per run
    for labels, group in grouping.split(shown, ["dataset", "rule", *apart]):
        assert len(group) == len({run.config.seed for run in group}), labels
    if recipe.draw is reproduce.draw_cells:
        assert {run.config.dataset for run in runs} == {"mnist"}
        drawn = []
        monkeypatch.setattr(plot, "heat_map", lambda group, *_: drawn.append(group))
        list(recipe.draw(shown, *recipe.settings))
        for group in drawn:
            cells = [
                {run.config.seed for run in cell} for _, cell in grouping.split(group, ["rule", "attack"])
            ]
            assert all(seeds == cells[0] for seeds in cells)
    if figure not in ("theorem1", "time"):
        for labels, group in grouping.split(shown, ["dataset", *recipe.settings]):
            assert {"local", "oracle"} <= {run.config.rule for run in group}, labels
    rules = {run.config.rule.partition("(")[0] for run in runs}
    if figure in ("gaussian", "bit_flip", "mhamdi", "size", "connection", "time"):
        assert {"average", "dkrum", "dmedian", "dbulyan", "bridge", "ubar"} <= rules
    if figure in ("stages", "rho"):
        assert {"ubar(rho=0.4)", "local", "oracle"} <= {run.config.rule for run in runs}


COMMON = "--nodes=6\n--batch_size=16\n--rounds=8\n--eval_every=4\n--results=out/{folder}\n"
TINY = {
    "baseline": ("bounds", "--rule=average\n--attack=none\n"),
    "bounds": ("bounds", "--rule=local\n--rule=oracle\n--attack=gaussian\n--byzantine_ratio=0.25\n"),
    "gaussian": ("gaussian", "--rule=average\n--rule=dmedian\n--attack=gaussian\n--byzantine_ratio=0.25\n"),
    "gaussian_ubar": ("gaussian", "--rule=ubar\n--attack=gaussian\n--byzantine_ratio=0.25\n--seeds=0,1\n"),
}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with small flagfiles instead of the shipped ones."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "paper" / "cpu"
    home.mkdir(parents=True)
    for name, (folder, text) in TINY.items():
        (home / f"mnist_{name}.flags").write_text(text + COMMON.format(folder=folder))
    shipped = {f"paper/cpu/{file.stem}": file for file in home.glob("*.flags")}
    monkeypatch.setattr(command, "shipped", lambda: shipped)
    return tmp_path


@pytest.fixture
def call(monkeypatch):
    """Runs the command with some flags; returns the exit code."""

    def run(**given):
        values = {"figure": None, "profile": "cpu", "workers": None, "draw_only": False, "out": "drawn"}
        monkeypatch.setattr(flags, "FLAGS", type("Flags", (), values | given))
        return reproduce.main(["reproduce"])

    return run


@pytest.mark.medium
def test_a_figure_is_run_once_and_drawn_with_its_baseline(tiny, call, capfd):
    names = reproduce.flagfiles("cpu", "gaussian")
    assert names == [f"paper/cpu/mnist_{part}" for part in reproduce.FIGURES["gaussian"].parts]
    assert call(figure=["gaussian"]) == 0
    out = capfd.readouterr().out
    assert "== 4 of 4: paper/cpu/mnist_gaussian" in out and "gaussian: 7 of 7 runs are finished" in out
    assert (tiny / "drawn/gaussian.png").exists() and (tiny / "drawn/gaussian.pdf").exists()
    table = pd.read_csv(tiny / "drawn/gaussian.csv")
    rules = ["average", grouping.BASELINE, "dmedian", "local", "oracle", *2 * ["ubar(rho=0.4)"]]
    assert sorted(table["rule"]) == sorted(rules)
    told = json.loads((tiny / "drawn/gaussian.json").read_text())
    assert told["runs"] == "7 of 7" and "--flagfile=paper/cpu/mnist_gaussian_ubar" in told["commands"][2]
    assert len(told["last sweeps"]) == 2 and "machine" in told["last sweeps"][0]

    runs, _ = reproduce.runs_of("cpu", "gaussian")
    [(_, figure)] = reproduce.draw_panels(grouping.with_bounds(runs), "dataset", "byzantine_ratio")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["average", "ubar(rho=0.4)", "dmedian"]
    assert labels[3:] == ["average, no attackers", "ceiling (oracle)", "floor (local)"]
    assert len(figure.axes) == 1 and "byzantine ratio 0.25" in figure.axes[0].get_title()
    assert "attack gaussian" in figure.get_suptitle() and figure.axes[0].get_xlabel() == "round"

    assert call(figure=["gaussian"]) == 0
    assert capfd.readouterr().out.count("are in out/") == 4


@pytest.mark.parametrize(
    ("code", "told"), [(0, [0, 4]), (3, [0, 4]), (1, [1, 4]), (2, [2, 1]), (4, [4, 1]), (-9, [1, 1])]
)
def test_sweeps_that_all_would_fail_alike_end_it(tiny, call, monkeypatch, code, told):
    """A failed run does not stop the others; bad input, a full disk and a killed sweep do."""
    began = []
    monkeypatch.setattr(reproduce, "run_sweep", lambda name, workers: began.append(name) or code)
    assert [call(figure=["gaussian"]), len(began)] == told


def test_times_are_measured_without_workers(tiny, call, monkeypatch):
    file = tiny / "paper/cpu/cifar10_time.flags"
    file.write_text("--compile_ahead=false\n" + COMMON.format(folder="time"))
    shipped = command.shipped() | {"paper/cpu/cifar10_time": file}
    monkeypatch.setattr(command, "shipped", lambda: shipped)
    seen = []
    monkeypatch.setattr(reproduce, "run_sweep", lambda name, workers: seen.append(workers) or 0)
    assert call(figure=["gaussian", "time"], workers=2) == 0 and seen == [2, 2, 2, 2, None]


@pytest.mark.medium
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_this_process_alone_ends_the_sweep_too(sent, monkeypatch, tmp_path):
    """As from a supervisor; Ctrl-C in a terminal goes to both."""
    script = "import pathlib, time; pathlib.Path('up').touch(); time.sleep(60)"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "sweep_command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(reproduce, "PATIENCE", 0.1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def send():
        while not Path("up").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), sent)

    threading.Thread(target=send).start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            reproduce.run_sweep("any", None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 30


def test_bounds_without_a_rule_have_no_panel():
    """While runs are missing, as those of a data set that comes later."""
    [rule, *_] = faked("cpu", "gaussian")
    rule = rule._replace(config=dataclasses.replace(rule.config, rule="dmedian", attack="gaussian", seed=0))
    bound = rule._replace(config=dataclasses.replace(rule.config, rule="local", dataset="cifar10"))
    [(_, figure)] = reproduce.draw_panels([rule, bound], "dataset", "byzantine_ratio")
    assert len(figure.axes) == 1 and not list(reproduce.draw_panels([bound], "dataset", "byzantine_ratio"))


def test_a_figure_without_runs_is_told(tiny, call, capfd):
    assert call(figure=["rho"], draw_only=True) == 0
    assert "rho: 0 of " in capfd.readouterr().out and not list((tiny / "drawn").iterdir())
