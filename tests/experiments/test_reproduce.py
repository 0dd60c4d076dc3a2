"""The paper's figures: their flagfiles, and the command that runs and draws them."""

import dataclasses
import json
import re

import pandas as pd
import pytest

from ubar_jax.experiments import command, plot, reproduce, sweep

SETTINGS = tuple(f"paper/{profile}/{data}" for profile in ("cpu", "gpu") for data in reproduce.DATASETS)
NAMES = sorted(name for name in command.shipped() if name.startswith("paper/") and name not in SETTINGS)


def runs_of(name):
    """The runs of a flagfile, and the folder that it names."""
    default = sweep.DEFAULT
    lists = {field.name: [getattr(default, field.name)] for field in dataclasses.fields(default)}
    lists |= {"seeds": [str(lists.pop("seed")[0])]}
    given = {}
    for line in command.expanded([f"--flagfile={name}"]):
        key, _, value = line.removeprefix("--").partition("=")
        kind = type(getattr(default, key, ""))
        given.setdefault(key, []).append(int(value) if key == "eval_size" else kind(value))
    [folder] = given.pop("results")
    return *sweep.grid(lists | given), folder


@pytest.mark.parametrize("name", NAMES)
def test_a_flagfile_has_valid_runs_and_opens_with_its_command_and_time(name):
    _, profile, figure = name.split("/")
    runs, notices, folder = runs_of(name)
    assert runs and not [notice for notice in notices if "merged" in notice and "none" not in notice]
    what, command_line, time, *_ = command.shipped()[name].read_text().splitlines()
    assert what.startswith("# ") and f"--flagfile={name}" in command_line
    assert re.match(r"# About .* (on two cores|on a GPU)", time)
    parts = {part for kind in reproduce.FIGURES.values() for part in kind[1]}
    assert figure.partition("_")[2] in parts and folder.startswith(f"results/paper/{profile}/")


def test_both_profiles_have_the_same_figures():
    def parts(profile):
        found = {name.rpartition("/")[2] for name in NAMES if f"/{profile}/" in name}
        return {name.removesuffix("_ubar") for name in found}

    assert parts("cpu") | {"cifar10_connection"} == parts("gpu")


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


@pytest.mark.medium
def test_a_figure_is_run_once_and_drawn_with_its_baseline(tiny, capfd):
    names = list(reproduce.flagfiles("cpu", "gaussian"))
    assert names == [
        f"paper/cpu/mnist_{part}" for part in ("baseline", "bounds", "gaussian_ubar", "gaussian")
    ]
    assert reproduce.run_sweeps(names, None) == []
    assert "== 4 of 4: paper/cpu/mnist_gaussian" in capfd.readouterr().out
    [picture] = reproduce.draw("cpu", "gaussian", tiny)
    assert picture.exists() and picture.with_suffix(".pdf").exists()
    table = pd.read_csv(tiny / "gaussian.csv")
    assert sorted(table["rule"]) == sorted(
        ["average", "baseline", "dmedian", "local", "oracle", *2 * ["ubar(rho=0.4)"]]
    )
    told = json.loads((tiny / "gaussian.json").read_text())
    assert told["runs"] == 7 and "--flagfile=paper/cpu/mnist_gaussian_ubar" in told["commands"][2]

    [(_, figure)] = reproduce.UNDER_ATTACK.draw(reproduce.runs_of("cpu", "gaussian"))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "average",
        "ubar(rho=0.4)",
        "dmedian",
        "average, no attackers",
        "ceiling (oracle)",
        "floor (local)",
    ]
    assert len(figure.axes) == 1 and re.search("byzantine ratio 0.25", figure.axes[0].get_title())

    assert reproduce.run_sweeps(names, None) == []
    assert capfd.readouterr().out.count("are in out/") == 4


def test_a_figure_without_runs_and_a_failed_sweep_are_told(tiny, capfd):
    assert reproduce.draw("cpu", "rho", tiny) == [] and "rho: no finished run" in capfd.readouterr().out
    (tiny / "paper/cpu/mnist_gaussian.flags").write_text("--rule=gone\n")
    assert reproduce.run_sweeps(["paper/cpu/mnist_gaussian"], None) == ["paper/cpu/mnist_gaussian"]


def test_the_baseline_is_no_rule():
    assert plot.BASELINE not in plot.REGISTRIES["rule"].parts
