"""What notebooks use: results that draw themselves, sweeps from Python, parts that are written again."""

import dataclasses
import linecache
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import ubar_jax
from ubar_jax import Config, ConfigError, attacks, progress, results, rules, simulate, sweep
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.simulation import Checkpointing, run
from ubar_jax.experiments import drawing
from ubar_jax.registry import PartError
from ubar_jax.sources import source_of

pytestmark = pytest.mark.medium

BASE = Config(attack="gaussian", byzantine_ratio=0.3, nodes=6, batch_size=16, rounds=5, eval_every=2)
GRID = {**dataclasses.asdict(BASE), "rule": ["average", "ubar"], "seed": [0, 1]}


@pytest.fixture(scope="module")
def result():
    return simulate(BASE)


@pytest.fixture
def own():
    """Registers a user's parts, and forgets them after the test."""
    before = {registry.kind: dict(registry.parts) for registry in (rules, attacks)}
    yield
    for registry in (rules, attacks):
        registry.parts.clear()
        registry.parts.update(before[registry.kind])


def cell(code: str, number: int) -> dict:
    """Runs code as IPython runs a cell: its text is in linecache only."""
    name = f"<ipython-input-{number}-0123456789ab>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    space = vars(sys.modules["__main__"])
    exec(compile(code, name, "exec"), space)
    return space


# What was accepted between evaluations.


def test_accepted_links_are_kept_per_evaluation(result):
    network = prepare(BASE).network
    assert {tuple(link) for link in result.links.tolist()} == {
        (i, j) for i in range(6) for j in network.neighbors(i)
    }
    np.testing.assert_array_equal(result.curves["round"], [0, 2, 4, 5])
    assert not result.accepted_since[0].any()
    np.testing.assert_array_equal(result.accepted_since.sum(0), result.accepted[*result.links.T])
    assert (result.accepted_since.max(1) <= [0, 2, 2, 1]).all()
    average = simulate(dataclasses.replace(BASE, rule="average"))
    np.testing.assert_array_equal(average.accepted_since, [[n] * len(average.links) for n in (0, 2, 2, 1)])


def test_a_checkpoint_without_them_is_continued_without_them(result):
    kept = []
    run(
        [prepare(BASE)], checkpointing=Checkpointing(lambda ahead: True, lambda now: kept.append(copied(now)))
    )
    new, old = kept[0], kept[0]._replace(points=dict(kept[0].points))
    del old.points["accepted"]
    [resumed] = run([prepare(BASE)], start=copied(new))
    np.testing.assert_array_equal(resumed.accepted_since, result.accepted_since)
    [resumed] = run([prepare(BASE)], start=old)
    assert resumed.accepted_since is None
    np.testing.assert_array_equal(resumed.accepted, result.accepted)
    np.testing.assert_array_equal(resumed.curves["accuracy"], result.curves["accuracy"])
    with pytest.raises(ConfigError, match="no record of what was accepted between evaluations"):
        resumed.animate()
    assert "accepted_since" not in results.as_run(resumed).curves


def copied(now):
    import jax

    return now._replace(state=jax.tree.map(jnp.copy, now.state))


# A result in a notebook.


def test_a_result_is_told_in_a_few_lines(result):
    assert len(repr(result)) < 600 and len(result._repr_html_()) < 1000
    worst = f"{result.final['accuracy'].min():.1%}"
    for told in (repr(result), result._repr_html_()):
        assert "ubar(rho=0.4) under gaussian(std=1.0)" in told and worst in told and "diverged" not in told
    wild = result._replace(diverged=(3, 1), notices=["a < b"])
    assert "in round 3, at node 1" in repr(wild) and "a &lt; b" in wild._repr_html_()


def test_a_result_draws_itself(result):
    figure = result.plot()
    lines = figure.get_axes()[0].get_lines()
    np.testing.assert_allclose(lines[-2].get_ydata(), result.curves["mean"])
    np.testing.assert_allclose(lines[-1].get_ydata(), result.curves["worst"])
    assert len(lines) == 6 + 2 and len(figure.legends[0].get_texts()) == 3
    benign, byzantine = result.network().get_axes()[0].collections
    assert (len(benign.get_offsets()), len(byzantine.get_offsets())) == (6, 3)
    shown = result.accepted_edges().get_axes()[0].get_images()[0].get_array()
    np.testing.assert_allclose(shown.compressed().sum(), result.accepted.sum() / 5)
    for figure in (result.plot(), result.network(), result.accepted_edges()):
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_rule_that_accepts_no_whole_message_has_no_accepted_edges(result):
    median = result._replace(accepted=0 * result.accepted, accepted_since=0 * result.accepted_since)
    with pytest.raises(ConfigError, match="accepted no whole message"):
        median.accepted_edges()
    assert median.animate().page


def test_the_animation_needs_no_network_and_is_small(result, monkeypatch):
    film = ubar_jax.animate(result)
    assert film.page == film._repr_html_() and len(film.page) < drawing.LARGEST
    assert "http" not in film.page.replace("http://www.w3.org", "") and "fa-" not in film.page
    assert film.page.count("data:image/png;base64") == 4
    monkeypatch.setattr(drawing, "LARGEST", len(film.page) * 3 // 4)
    shorter = result.animate().page
    assert 2 <= shorter.count("data:image/png;base64") < 4


def test_frames_show_accuracy_and_accepted_links(result, tmp_path):
    record = results.as_run(result)
    figure, show = drawing._stage(record)
    _, honest, byzantine, nodes, theirs = figure.get_axes()[0].collections
    red = byzantine.get_colors()[0]
    assert red[0] > 0.7 and max(red[1:3]) < 0.2
    for e in range(4):
        show(e)
        np.testing.assert_allclose(nodes.get_array(), result.curves["accuracy"][e])
        for lines, which in ((honest, result.links[:, 1] < 6), (byzantine, result.links[:, 1] >= 6)):
            drawn = np.broadcast_to(np.array(lines.get_linewidths()) > 0, which.sum())
            np.testing.assert_array_equal(drawn, result.accepted_since[e, which] > 0)
        assert f"round {result.curves['round'][e]}: worst" in figure.get_axes()[0].get_title()
    assert len(theirs.get_offsets()) == 3
    page = result.animate().save(tmp_path / "film.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")


def test_the_network_of_an_animation_may_be_lost(result):
    gone = dataclasses.replace(result.config, topology="file(path='gone.txt')")
    assert result._replace(config=gone).animate().page
    with pytest.raises(ConfigError, match="does not exist"):
        result._replace(config=gone).network()


# Progress.


def test_a_bar_tells_rounds_and_worst_accuracy(monkeypatch, capsys, result):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    again = simulate(BASE, progress=True)
    told = capsys.readouterr().err
    assert "ubar(rho=0.4) under gaussian(std=1.0): 100%" in told and "5/5" in told
    assert f"worst={again.curves['worst'][-1]:.1%}" in told
    seen = []
    simulate(BASE, progress=seen.append)
    assert [latest["round"] for latest in seen] == [2, 4, 5] and "accepted" not in seen[0]
    simulate(BASE, progress=False)
    assert capsys.readouterr().err == ""


def test_the_bar_says_that_it_compiles(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.progress_bar(5) as bar:
        say = progress.compiling(bar)
        say("compiling ubar for 6 nodes ...")
        assert bar.postfix == "compiling"
        say("")
        assert not bar.postfix


# Sweeps.


def test_a_grid_and_a_list_give_the_same_runs(tmp_path, capsys):
    swept = sweep(GRID)
    base = dataclasses.replace(BASE, attack="gaussian(std=1)")
    listed = [dataclasses.replace(base, rule=r, seed=s) for r in GRID["rule"] for s in (0, 1)]
    table = swept.table()
    assert list(table.columns) == ["rule", "seed", "worst", "mean", "seconds"]
    assert list(table.rule) == ["average", "average", "ubar(rho=0.4)", "ubar(rho=0.4)"]
    again = sweep(listed, tmp_path)
    for one, two in zip(swept.runs, again.runs, strict=True):
        np.testing.assert_array_equal(one.curves["accuracy"], two.curves["accuracy"])
    alone = simulate(listed[3])
    np.testing.assert_array_equal(swept.runs[3].curves["accepted_since"], alone.accepted_since)
    assert (tmp_path / "runs.csv").exists() and not swept.failed
    stamps = [path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")]
    more = sweep([*listed, dataclasses.replace(base, seed=2)], tmp_path)
    assert len(more.runs) == 5
    assert set(stamps) < {path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert drawing.animate(swept.runs[0]).page

    axis = swept.heat_map("byzantine_ratio").get_axes()[0]
    values = table.groupby("rule", sort=False).worst.mean()
    np.testing.assert_allclose(axis.get_images()[0].get_array().ravel(), values, atol=1e-6)
    assert len(swept.plot().get_axes()[0].get_lines()) >= 2
    assert "4 runs, 0 failed" in repr(swept) and "<table" in swept._repr_html_()
    two = dataclasses.replace(
        swept, runs=[*swept.runs, *(changed(r, nodes=7, attack="none") for r in swept.runs)]
    )
    assert len(two.heat_map("attack")) == 2 and two.heat_map("attack")._repr_html_().count("<img") == 2


def changed(record, **settings):
    return record._replace(config=dataclasses.replace(record.config, **settings))


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"rules": ["ubar"]}, r"unknown setting 'rules' \(did you mean 'rule'\?\); there are alpha"),
        ({"rule": "ubra"}, "did you mean 'ubar'"),
        ([], "no config"),
        ({"rule": []}, "no config"),
        (["ubar"], "takes Configs or a grid"),
    ],
)
def test_what_is_no_grid_is_refused(configs, message):
    with pytest.raises(ConfigError, match=message):
        sweep(configs)


def test_a_failed_run_takes_no_other_with_it(own, capsys):
    @rules.register
    def broken(inbox):
        """Fails when it is traced."""
        return inbox.nothing, {}

    swept = sweep([dataclasses.replace(BASE, rule=rule) for rule in ("broken", "average")])
    assert [r.config.rule for r in swept.runs] == ["average"] and len(swept.failed) == 1
    assert "FAILED: broken under gaussian(std=1.0), seed 0: rule 'broken' failed" in capsys.readouterr().err
    with pytest.raises(PartError, match="'Inbox' object has no attribute 'nothing'"):
        sweep({**dataclasses.asdict(BASE), "rule": "broken"})


def test_unknown_settings_of_figures_are_refused(result):
    swept = ubar_jax.experiments.notebook.Sweep([results.as_run(result)], {}, ["a notice"])
    for draw in (swept.heat_map, swept.plot):
        with pytest.raises(ConfigError, match=r"unknown setting 'atack' \(did you mean 'attack'\?\)"):
            draw(columns="atack")
    assert "notice: a notice" in repr(swept)


# Parts written in cells.

RULE = """
from ubar_jax import rules

FACTOR = 1.0

@rules.register
def in_cell(inbox):
    '''Own model, times a factor.'''
    return FACTOR * inbox.own, {}
"""


def test_a_rule_written_again_is_a_new_run_with_a_new_program(own):
    config = dataclasses.replace(BASE, rule="in_cell", alpha=0.0)
    cell(RULE, 1)
    first = simulate(config)
    assert simulate(config).digest == first.digest
    assert "FACTOR * inbox.own" in rules.get("in_cell").source
    cell(RULE.replace("FACTOR *", "-FACTOR *"), 2)
    second = simulate(config)
    assert second.digest != first.digest
    assert not np.allclose(second.curves["train_loss"], first.curves["train_loss"])
    cell(RULE, 3)
    third = simulate(config)
    assert third.digest == first.digest
    np.testing.assert_array_equal(third.curves["accuracy"], first.curves["accuracy"])


@pytest.mark.slow
def test_an_attack_inside_another_is_compiled_again(own):
    config = dataclasses.replace(BASE, rule="average", attack="sleeper(again, start=0)", rounds=2)

    def written(sign):
        def again(key, view):
            """The mean, or its opposite."""
            mean = jnp.mean(view.own[: view.benign], axis=0)
            return sign * jnp.broadcast_to(mean, (view.byzantine, len(mean)))

        attacks.register(again)
        return simulate(config).curves["accuracy"][-1]

    assert not np.array_equal(written(1.0), written(-9.0))


def test_a_class_written_in_a_cell_is_followed():
    text = "OFFSET = 1\nclass Helper:\n    scale = 2\n    def of(self, x):\n        return x * 5 + OFFSET\n"
    sources = []
    for number, (old, new) in enumerate([("", ""), ("scale = 2", "scale = 3"), ("OFFSET = 1", "OFFSET = 4")]):
        sources.append(source_of(cell(text.replace(old, new) if old else text, 10 + number)["Helper"]))
    assert len(set(sources)) == 3
    assert source_of(cell(text, 20)["Helper"]) == sources[0]


BROKEN = {
    "ordr > 0": ("NameError: name 'ordr' is not defined", NameError),
    "(inbox.own if inbox.t > 3 else 2 * inbox.own), {}": ("write jnp.where", TypeError),
    "inbox.own": ("returned a .*Tracer instead of 2", None),
    "(inbox.own, {}, 1)": ("returned 3 things instead of 2", None),
    "(inbox.own[0], {})": (r"shape \[\d+\] to mix in, not \[r, d\] = \[6, \d+\]", None),
    "(inbox.own, {'selected': inbox.weights})": ("'selected' as float32 of shape", None),
    "(inbox.own, None)": ("returned a NoneType as info, not a dict", None),
}


@pytest.mark.parametrize("returned", BROKEN)
def test_a_broken_rule_gives_its_own_error(own, returned):
    message, cause = BROKEN[returned]
    cell(RULE.replace("FACTOR * inbox.own, {}", returned), 30)
    with pytest.raises(PartError, match=message) as caught:
        simulate(dataclasses.replace(BASE, rule="in_cell"))
    told = str(caught.value)
    assert told.startswith("rule 'in_cell' ") and "A rule is a function from an inbox to" in told
    if cause:
        assert isinstance(caught.value.__cause__, cause)
        assert f"at line 9 of the cell, `return {returned}`" in told
    assert caught.value._render_traceback_() == [f"PartError: {told}"] and len(told) < 700


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda key, view: view.own, r"returned \[6, \d+\], not \[3, \d+\]"),
        (lambda key, view: 3, "returned a int"),
        (lambda key, view: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_broken_attack_gives_its_own_error(own, function, message):
    attacks.register(function, name="mine")
    with pytest.raises(PartError, match=f"attack 'mine' .*{message}"):
        simulate(dataclasses.replace(BASE, attack="mine"))


def test_a_part_that_takes_too_few_arguments_is_refused_at_once(own):
    with pytest.raises(ConfigError, match=r"rule 'none' takes 0 arguments, but is called with 1\. A rule is"):
        rules.register(lambda: None, name="none")
    with pytest.raises(ConfigError, match="attack 'short' takes 2 arguments, but is called with 3"):
        attacks.register(lambda key, view: None, name="short", init=lambda start: 0)
    assert "short" not in attacks.parts


def test_a_setting_that_is_refused_is_told_in_one_line_in_a_notebook():
    with pytest.raises(ConfigError) as caught:
        simulate(Config(rule="ubra"))
    assert caught.value._render_traceback_() == [f"ConfigError: {caught.value}"]
