"""The report of hand-made runs."""

import dataclasses
import datetime
import html.parser
import json
import re

import networkx as nx
import numpy as np
import pytest
from test_plot import RULES, make_run, make_runs, run_module, write_runs

from ubar_jax.experiments import report
from ubar_jax.registry import ConfigError

pytestmark = pytest.mark.medium


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def runs():
    lists = {"rule": RULES, "attack": ("none", "gaussian"), "byzantine_ratio": (0.25, 0.4), "seed": (0, 1)}
    return make_runs(np.random.default_rng(1), **lists)


def test_the_page_is_whole_and_self_contained(runs, tmp_path):
    for run in runs[:2]:
        run.summary["notices"] = [f"{runs[0].config.rule} was clipped"]
    folder = write_runs(runs, tmp_path / "out")
    command = "python -m ubar_jax.experiments.sweep --attack=none --rule='ubar(rho=0.4)'"
    noted = {"command": command, "versions": {"flax": "0.12.3"}, "device": "a device", "groups": 7}
    noted["date"] = "2026-01-02"
    noted["seconds"] = {"total": 50.0, "compilation": 20.0}
    (folder / "sweep.json").write_text(json.dumps(noted))
    (folder / "0123456789ab").mkdir()
    failed = {"config": {"rule": "dkrum", "attack": "alie", "seed": 5}, "error": "Trace\nValueError: a < b"}
    (folder / "0123456789ab" / "failed.json").write_text(json.dumps(failed))
    done = run_module("report", "--results=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (folder / "report.html").read_text()
    page = Page(text)
    words = " ".join(page.words)
    for wanted in (
        *RULES,
        command,
        "flax",
        "0.12.3",
        "a device",
        '"jax": "1.2.3"',
        "ValueError: a < b",
        "40% of 50",
    ):
        assert wanted in words, wanted
    assert "No whole message was accepted by dmedian" in words
    assert f"Report of {datetime.date.today().isoformat()}." in words and "out, 2026-01-02" in words
    assert (
        "3 rules" not in words and "average, ubar(rho=0.4), dmedian under none, gaussian on digits" in words
    )
    assert "average was clipped" in words and str(tmp_path) not in text
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 6  # curves, two heat maps, networks, nodes, edges
    assert all(i["src"].startswith("data:image/png;base64,iVBOR") and i["alt"] for i in images)
    assert not re.search(r"https?://|<link|<script|@import|url\(", text)
    ids = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert [a["href"] for tag, a in page.tags if tag == "a"] == [f"#{name}" for name in ids]
    own = [r.summary for r in runs if (r.config.rule, r.config.byzantine_ratio) == ("dmedian", 0.4)]
    row = ["dmedian", "gaussian", "0.4", "2", f"{np.mean([s['worst'] for s in own]):.1%}"]
    row += [f"{end(s['worst'] for s in own):.1%}" for end in (min, max)]
    row += [f"{np.mean([s['mean'] for s in own]):.1%}", "0"]
    assert row in [re.findall("<td>(.*?)</td>", line) for line in text.split("<tr>")]


def test_a_folder_that_noted_nothing(runs, tmp_path):
    text = report.page(runs[:1], [write_runs(runs[:1], tmp_path / "a & b")])
    assert "command not recorded" in text and "Failed runs" not in text
    assert "a &amp; b" in text and "a & b" not in text


def test_networks_are_those_of_the_runs_with_attackers_last():
    run = make_run(attack="gaussian", byzantine_ratio=0.4, topology="ring", seed=3)
    graph = report.network(run)
    axis = report.draw_networks([(run, graph)]).get_axes()[0]
    benign, byzantine = (collection.get_offsets() for collection in axis.collections)
    assert (len(benign), len(byzantine)) == (6, 4)
    assert axis.get_title().endswith("6 benign, 4 Byzantine")
    dotted = [line for line in axis.get_lines() if line.get_linestyle() == ":"]
    assert len(axis.get_lines()) == 10
    assert len(dotted) == sum(max(edge) >= 6 for edge in graph.edges)


def test_a_network_that_cannot_be_built_again_is_named(runs):
    gone = dataclasses.replace(runs[0].config, topology="file(path='gone.txt')")
    run = runs[0]._replace(config=gone)
    (said,) = report.networks([run])
    assert "cannot be drawn: graph file &#x27;gone.txt&#x27; does not exist" in said
    shown = report.accepted_edges([run]).get_axes()[0].get_images()[0].get_array()
    np.testing.assert_allclose(shown, run.curves["accepted"] / 40)


def test_a_network_whose_file_was_edited_is_not_drawn(tmp_path):
    path = tmp_path / "net.txt"
    path.write_text("a b\nb c\nc d\nd e\ne f\n")
    run = make_run(topology=f"file(path={str(path)!r})")
    assert report.network(run).number_of_edges() == 5
    path.write_text("a b\nb c\nc d\nd e\ne f\nf a\n")
    with pytest.raises(ConfigError, match="was edited after the run"):
        report.network(run)


def test_the_numbers_of_networks_span_the_seeds():
    lists = {"rule": ["ubar"], "attack": ["none", "gaussian"], "byzantine_ratio": [0.3], "seed": [0, 1, 2]}
    runs = make_runs(**lists, nodes=[30]) + make_runs(**lists, topology=["complete"])
    text = "".join(report.networks(runs))
    heads = re.findall("<th>(.*?)</th>", text)
    rows = [re.findall("<td>(.*?)</td>", line) for line in text.split("<tr>")]
    rows = {tuple(row[:3]): dict(zip(heads[3:], row[3:], strict=True)) for row in rows if row}
    assert list(rows) == [("erdos_renyi", "30", "0"), ("erdos_renyi", "30", "13")] + [
        ("complete", "6", f) for f in ("0", "3")
    ]
    row = rows["erdos_renyi", "30", "13"]
    assert row["least benign share"] == "0.471 to 0.545" and row["algebraic connectivity"] == "4.03 to 6.24"
    assert row["nodes with Byzantine majority or tie"] == "0 to 3"
    assert " ".join(rows["complete", "6", "3"].values()) == "8 8 8 3 3 0.625 0 0 6 0.667"
    assert " ".join(rows["complete", "6", "0"].values()) == "5 5 5 0 0 1 0 0 6 1"


def test_floor_and_ceiling_are_explained_where_they_are_shown(runs):
    bounds = make_runs(rule=["local", "oracle"], attack=["gaussian"], byzantine_ratio=[0.4])
    bounds[0].curves["accepted"][:] = 0
    assert "the floor is `local`" not in report.page(runs[-1:], [])
    text = report.page([*bounds, *runs[-1:]], [])
    assert "the floor is `local`" in text and "No whole message was accepted by dmedian:" in text


def test_accepted_edges_are_shares_of_rounds_and_blank_between_strangers():
    run = make_run(attack="gaussian", byzantine_ratio=0.4, seed=1)
    axis = report.accepted_edges([run]).get_axes()[0]
    shown = axis.get_images()[0].get_array().filled(np.nan)
    links = nx.to_numpy_array(report.network(run), nodelist=range(10))[:6] > 0
    np.testing.assert_array_equal(np.isnan(shown), ~links)
    np.testing.assert_allclose(shown[links], (run.curves["accepted"] / 40)[links])
    line, bar = axis.get_lines()
    assert set(line.get_xdata()) == {5.5} and bar.get_xdata().tolist() == [5.5, 9.5]


def test_pictures_are_of_the_worst_run_of_each_rule(runs, monkeypatch):
    seen = {}
    monkeypatch.setattr(report, "accepted", lambda picked: seen.setdefault("runs", picked) and [])
    report.page(runs, [])
    assert [run.config.rule for run in seen["runs"]] == list(RULES)
    for run in seen["runs"]:
        assert run.summary["worst"] == min(
            r.summary["worst"] for r in runs if r.config.rule == run.config.rule
        )
