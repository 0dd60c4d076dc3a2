"""Figures and tables of hand-made runs."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import image

from ubar_jax.config import Config, canonical
from ubar_jax.experiments import grouping, plot
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps.results import FORMAT, Run

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[2]
RULES = ("average", "ubar(rho=0.4)", "dmedian")


def make_run(rng=None, **given):
    """A run of 6 benign nodes with random numbers; dmedian accepts no whole message."""
    config = canonical(Config(**{"nodes": 6, "rounds": 40, "eval_every": 10} | given))[0]
    rng = rng or np.random.default_rng(int(config.digest(), 16))
    accuracy = rng.random((5, 6))
    shape = (6, 6 + config.byzantine)
    curves = {"round": np.arange(0, 50, 10), "accuracy": accuracy, "worst": accuracy.min(1)}
    curves["accepted"] = rng.integers(0, 41, shape) * (config.rule != "dmedian")
    summary = {"format": FORMAT, "worst": accuracy[-1].min(), "mean": accuracy[-1].mean(), "diverged": None}
    summary |= {"rounds_per_epoch": 20, "versions": {"jax": "1.2.3"}, "device": "cpu"}
    summary["seconds"] = {"setup": 1.0, "rounds": 40 * rng.random(), "evaluation": rng.random()}
    return Run(config, curves, summary, config.digest())


def make_runs(rng=None, **lists):
    """The product of the lists, as in a sweep: runs without attackers occur once."""
    frame = pd.MultiIndex.from_product(lists.values(), names=lists).to_frame()
    runs = [make_run(rng, **point) for point in frame.to_dict("records")]
    return list({run.config: run for run in runs}.values())


def write_runs(runs, folder):
    """Writes runs as a sweep does."""
    for run in runs:
        path = folder / run.config.digest()
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(dataclasses.asdict(run.config)))
        (path / "summary.json").write_text(json.dumps(run.summary))
        np.savez(path / "curves.npz", **run.curves)
    return folder


@pytest.fixture(scope="module")
def runs():
    lists = {"rule": RULES, "attack": ("none", "gaussian", "bit_flip"), "byzantine_ratio": (0.25, 0.4)}
    return make_runs(np.random.default_rng(0), **lists, seed=(0, 1))


def run_module(module, *args, cwd):
    command = [sys.executable, "-m", f"ubar_jax.experiments.{module}", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def lines_of(axis):
    """[(x, y)] of the axis' lines, without those of the legend."""
    return [line.get_xydata().T for line in axis.get_lines() if len(line.get_xydata())]


def test_panels_are_settings_and_lines_are_means_over_seeds(runs):
    (_, figure, _), *_ = plot.all_figures(runs)
    axes = figure.get_axes()
    assert [axis.get_title() for axis in axes] == ["attack none", "attack gaussian", "attack bit_flip"] * 2
    assert axes[0].get_ylabel() == "byzantine ratio 0.25" and axes[3].get_ylabel() == "byzantine ratio 0.4"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == list(RULES)
    for axis, attack, ratio in ((axes[1], "gaussian(std=1.0)", 0.25), (axes[5], "bit_flip", 0.4)):
        for name, (x, y) in zip(RULES, lines_of(axis), strict=True):
            wanted = dataclasses.replace(runs[0].config, rule=name, attack=attack, byzantine_ratio=ratio)
            own = [run for run in runs if dataclasses.replace(run.config, seed=0) == wanted]
            assert len(own) == 2
            np.testing.assert_allclose(y, (own[0].curves["worst"] + own[1].curves["worst"]) / 2)
            np.testing.assert_allclose(x, [0, 0.5, 1, 1.5, 2])  # epochs of 20 rounds
        assert len(axis.collections) == 3  # one band per rule
        assert axis.get_xlabel() == "epoch"
    # Runs without attackers have no ratio: both rows show the same lines.
    np.testing.assert_array_equal(lines_of(axes[0]), lines_of(axes[3]))


def test_runs_that_do_not_know_their_epochs_are_drawn_by_rounds(runs):
    old = [run._replace(summary={k: v for k, v in run.summary.items() if "epoch" not in k}) for run in runs]
    (_, figure, _), *_ = plot.all_figures([*old[:1], *runs[1:]])
    assert figure.get_axes()[0].get_xlabel() == "round"
    assert lines_of(figure.get_axes()[0])[0][0].tolist() == [0, 10, 20, 30, 40]


def test_panels_by_any_two_settings_and_a_figure_for_each_of_the_rest():
    runs = make_runs(rule=RULES[:2], attack=["gaussian"], byzantine_ratio=[0.25, 0.4], nodes=[6], seed=[0])
    runs += make_runs(
        rule=RULES[:2], attack=["gaussian"], byzantine_ratio=[0.25], topology=["ring"], seed=[0]
    )
    drawn = {name: figure for name, figure, _ in plot.all_figures(runs, "topology", "byzantine_ratio")}
    axes = drawn["worst_accuracy"].get_axes()
    assert [axis.get_title() for axis in axes] == ["byzantine ratio 0.25", "byzantine ratio 0.4"] * 2
    assert [axis.get_ylabel() for axis in axes] == ["topology erdos_renyi", "", "topology ring", ""]
    assert [text.get_text() for text in axes[3].texts] == ["no run"]
    names = [name for name, _, _ in plot.all_figures(runs, columns="attack", rows="nodes")]
    assert names == [
        "worst_accuracy_byzantine_ratio_0.25_topology_erdos_renyi",
        "worst_accuracy_byzantine_ratio_0.25_topology_ring",
        "worst_accuracy_byzantine_ratio_0.4_topology_erdos_renyi",
    ]
    with pytest.raises(ConfigError, match="both 'nodes'; give two different"):
        list(plot.all_figures(runs, "nodes", "nodes"))


def test_many_panels_wrap_and_go_on_in_further_figures():
    rates = np.linspace(0.01, 0.4, 40)
    runs = make_runs(rule=["ubar"], attack=["gaussian"], byzantine_ratio=[0.25], learning_rate=rates)
    drawn = [(name, len(figure.get_axes())) for name, figure, _ in plot.all_figures(runs)]
    assert drawn == [("worst_accuracy", 30), ("worst_accuracy_page2", 10)]


def test_lines_differ_in_colour_and_marker():
    styles = [plot._style(index) for index in range(16)]
    assert len({(style["color"], style["marker"]) for style in styles}) == 16
    assert len({style["marker"] for style in styles[:8]}) == len({str(s["ls"]) for s in styles[:8]}) == 8


def test_files_and_numbers(runs, tmp_path):
    folder = write_runs(runs, tmp_path / "out")
    done = run_module("plot", "--results=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stems = ["worst_accuracy", "heat_map_byzantine_ratio_0.25", "heat_map_byzantine_ratio_0.4"]
    for stem in stems:
        assert f"{stem}.png" in done.stdout
        assert (folder / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
        height, width, _ = image.imread(folder / f"{stem}.png").shape
        assert min(height, width) > 200 and max(height, width) < 2500
    table = pd.read_csv(folder / "heat_map_byzantine_ratio_0.4.csv", index_col="rule")
    shown = ["none", "gaussian(std=1.0)", "bit_flip"]
    ends = {f"{attack}, {end} seed": end for end in ("lowest", "highest") for attack in shown}
    assert list(table.index) == list(RULES) and list(table) == [*shown, *ends]
    for rule in table.index:
        for attack in shown:
            own = [r for r in runs if (r.config.rule, r.config.attack) == (rule, attack)]
            own = [r for r in own if r.config.byzantine_ratio == (0.4 if attack != "none" else 0)]
            mean = np.mean([r.summary["worst"] for r in own])
            assert len(own) == 2 and table.loc[rule, attack] == pytest.approx(mean, abs=6e-5)
            low, high = (table.loc[rule, f"{attack}, {end} seed"] for end in ("lowest", "highest"))
            worst = sorted(r.summary["worst"] for r in own)
            assert [low, high] == pytest.approx(worst, abs=6e-5)
    seconds = pd.read_csv(folder / "time_table.csv", index_col="rule")
    own = [r.summary["seconds"] for r in runs if r.config.rule == "dmedian"]
    assert seconds.loc["dmedian", "runs"] == len(own) == 10
    assert seconds.loc["dmedian", "round"] == pytest.approx(
        np.mean([s["rounds"] / 40 for s in own]), abs=1e-6
    )
    assert seconds.loc["dmedian", "evaluation"] == pytest.approx(
        np.mean([s["evaluation"] for s in own]), abs=1e-6
    )
    assert "compilation" not in seconds


def test_a_long_list_of_attacks_goes_down_the_heat_map():
    attacks = ["gaussian", "bit_flip", "alie", "ipm"]
    runs = make_runs(rule=RULES, attack=attacks, byzantine_ratio=[0.25], seed=[0])[:-1]
    axis = plot.heat_map(runs, "attack").get_axes()[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == attacks
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("rule", "attack")
    shown = np.array([text.get_text() for text in axis.texts]).reshape(4, 3)
    numbers = {
        (r.config.attack.split("(")[0], r.config.rule): f"{100 * r.summary['worst']:.0f}" for r in runs
    }
    assert shown.tolist() == [[numbers.get((a, r), "") for r in RULES] for a in attacks]
    assert shown[3, 2] == ""  # the missing run


def test_floor_and_ceiling_are_lines_behind_and_rules_keep_their_colours(runs):
    more = make_runs(rule=["local", "oracle"], attack=["gaussian"], byzantine_ratio=[0.25, 0.4], seed=[0, 1])
    before, after = (next(iter(plot.all_figures(group)))[1] for group in (runs, [*more, *runs]))
    labels = [text.get_text() for text in after.legends[0].get_texts()]
    assert labels == [*RULES, "ceiling (oracle)", "floor (local)"]
    for old, axis in zip(before.get_axes(), after.get_axes(), strict=True):
        lines = [line for line in axis.get_lines() if len(line.get_xydata())]
        rules = [line for line in lines if line.get_marker() != "None"]
        bounds = [line for line in lines if line.get_marker() == "None"]
        assert [line.get_color() for line in rules] == list(plot.COLOURS[:3])
        np.testing.assert_array_equal([line.get_xydata().T for line in rules], lines_of(old))
        assert axis.get_title() == old.get_title() and len(axis.collections) == 3
        assert len(bounds) == (0 if axis.get_title() == "attack none" else 2)
        assert all(line.get_zorder() < rules[0].get_zorder() for line in bounds)
    for bound, name in zip(bounds, ("local", "oracle"), strict=True):  # of bit_flip: the runs of gaussian
        own = [r for r in more if (r.config.rule, r.config.byzantine_ratio) == (name, 0.4)]
        np.testing.assert_allclose(bound.get_ydata(), np.mean([r.curves["worst"] for r in own], axis=0))


@pytest.mark.parametrize(
    "attacks", [["gaussian", "bit_flip"], ["gaussian", "bit_flip", "alie", "ipm", "mimic"]]
)
def test_heat_maps_have_the_ceiling_first_and_the_floor_last_set_apart(attacks):
    rules = ["average", "local", "oracle", "dmedian"]
    runs = make_runs(rule=rules, attack=attacks, byzantine_ratio=[0.25], seed=[0])
    assert list(plot.final_worst(runs, "attack").index) == ["oracle", "average", "dmedian", "local"]
    axis = plot.heat_map(runs, "attack").get_axes()[0]
    upright = len(rules) >= len(attacks)
    labels = axis.get_yticklabels() if upright else axis.get_xticklabels()
    shown = ["ceiling (oracle)", "average", "dmedian", "floor (local)"]
    assert [label.get_text() for label in labels] == shown
    gaps = [line.get_ydata() if upright else line.get_xdata() for line in axis.get_lines()]
    assert [gap[0] for gap in gaps] == [0.5, 2.5]
    assert not plot.heat_map(runs[: len(attacks)], "attack").get_axes()[0].get_lines()


def test_compilation_is_told_where_it_was_timed(runs):
    timed = [
        run._replace(
            summary=run.summary | {"seconds": {"compilation": 3.0, "rounds": 8.0, "evaluation": 1.0}}
        )
        for run in runs
    ]
    table = plot.time_table(timed).set_index("rule")
    assert table.loc["average", "compilation"] == 3 and table.loc["average", "round"] == 0.2


def test_several_folders_are_read_as_one(runs, tmp_path):
    first, second = write_runs(runs[:2], tmp_path / "a"), write_runs(runs[1:3], tmp_path / "b")
    done = run_module("plot", "--results=a", "--results=b", "--out=c", "--rows=nodes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert pd.read_csv(tmp_path / "c" / "time_table.csv")["runs"].sum() == 3
    assert (tmp_path / "c" / "node_accuracy.png").exists()  # drawn for up to three runs
    assert not list(first.glob("*.png")) and not list(second.glob("*.png"))


def test_heat_maps_of_few_rules_have_room_for_the_words_beside_the_colour_bar():
    for seeds, least in (([0], 2.6), ([0, 1], 3.9)):
        runs = make_runs(rule=["ubar"], attack=["bit_flip"], byzantine_ratio=[0.25, 0.4], seed=seeds)
        assert plot.heat_map(runs, "byzantine_ratio").get_size_inches()[1] >= least


def test_arguments_that_differ_are_told_even_if_they_have_their_default():
    stds = ["gaussian(std=1.0)", "gaussian(std=30.0)", "bit_flip"]
    assert [grouping.short("attack", value, stds) for value in stds] == [
        "gaussian(std=1)",
        "gaussian(std=30)",
        "bit_flip",
    ]
    assert grouping.short("attack", stds[0]) == grouping.short("attack", stds[0], stds[2:]) == "gaussian"
    runs = [make_run(attack=value, byzantine_ratio=0.4) for value in stds[:2]]
    labels = plot.heat_map(runs, "attack").get_axes()[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["gaussian(std=1)", "gaussian(std=30)"]
    links = [f"erdos_renyi(connection={p})" for p in (0.4, 0.6)]
    assert grouping.words({"topology": links[0]}, links) == "topology erdos_renyi(connection=0.4)"
