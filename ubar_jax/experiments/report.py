"""One self-contained HTML page of results: `python -m ubar_jax.experiments.report --results=FOLDER`.

Writes report.html: a summary table, all figures of `plot` (with its flags --rows and --columns), the networks
with their attackers and numbers, every node's accuracy and the accepted messages in each rule's worst run,
notices, times, command, date and versions. Repeat --results to combine several folders.
"""

import collections
import datetime
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from absl import flags

from ubar_jax.experiments import grouping, plot
from ubar_jax.experiments.drawing import accepted_edges, draw_networks, network
from ubar_jax.experiments.pictures import image
from ubar_jax.parts import topology
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps.results import Run, varying

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 sans-serif; color: #111; background: #fff; max-width: 70rem; margin: 1rem auto }}
body {{ padding: 0 1rem }}
h2 {{ border-top: 1px solid #bbb; margin-top: 2rem; padding-top: 1rem }}
h1, pre, p {{ overflow-wrap: anywhere }}
img {{ max-width: 100%; height: auto }}
figure {{ margin: 1rem 0 }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums }}
th, td {{ border-bottom: 1px solid #ccc; padding: 0.2rem 1rem 0.2rem 0; text-align: left }}
th, td {{ white-space: nowrap }}
.wrap td {{ white-space: normal; vertical-align: top }}
.heads th {{ white-space: normal; vertical-align: bottom }}
pre {{ background: #f2f2f2; padding: 0.6rem; white-space: pre-wrap }}
</style></head>
<body>
<h1>{title}</h1>
<p>Report of {date}.</p>
<nav><ul>{links}</ul></nav>
{sections}
</body></html>
"""
SUMMARY = """Final accuracy on the whole test set: of the worst benign node (mean over seeds, lowest and
highest seed), and the mean over all benign nodes."""
NOTICES = "Changes and remarks by the simulator, and in how many runs."
FIGURES = """Accuracy of the worst benign node. Runs without attackers have no Byzantine ratio and are shown
at every ratio. Heat maps are drawn if both the rules and the setting of the columns vary."""
BOUNDS = """The ceiling is `oracle`, the mean with the truly benign neighbours; the floor is `local`, no
exchange. Both are runs, so a rule may cross them."""
NETWORKS = "One network per topology, number of nodes and number of attackers, each at its first seed."
NUMBERS = f"""Numbers of the benign nodes; lowest to highest where seeds differ. Degrees count all neighbours.
Byzantine majority: more Byzantine than benign neighbours. Algebraic connectivity: second smallest eigenvalue
of the benign nodes' Laplacian. Spectral gap: 1 - |second eigenvalue| of the benign block of the Metropolis
matrix, with the weights of Byzantine neighbours on the diagonal. Both are left out above {topology.DENSE}
benign nodes."""
NODES = "One run per rule: that with the lowest final worst-node accuracy, over all settings and seeds."
EDGES = """The same runs: share of rounds in which a node (row) accepted the message of a neighbour (column).
Byzantine senders are to the right of the line, under the bar. Blank: not neighbours."""
TIME = """Seconds per round (mean, lowest and highest run), for all evaluations of a run, and for
compilation. A round is training, attack and aggregation; it includes compilation if that was not timed."""


def page(
    runs: Sequence[Run], folders: Sequence[Path], rows: str | None = None, columns: str | None = None
) -> str:
    """The HTML page, with the commands and failures recorded in `folders`."""
    worst = [
        min(group, key=lambda run: (run.summary["worst"], run.config.seed))
        for _, group in grouping.split(runs, ["rule"])
    ]
    bounded = any(run.config.rule in grouping.BOUNDS for run in runs)
    figures = [image(name, figure) for name, figure, _ in plot.all_figures(runs, rows, columns)]
    sections = {
        "Summary": [text(SUMMARY), *summary(runs), *failures(folders)],
        "Figures": [text(f"{FIGURES} {BOUNDS}" if bounded else FIGURES), *figures],
        "Networks": [text(NETWORKS), *networks(runs)],
        "Every node": [text(NODES), image("accuracy of every benign node", plot.node_accuracy(worst))],
        "Accepted edges": [text(EDGES), *accepted(worst)],
        "Notices": [text(NOTICES), *notices(runs)],
        "Time": [text(TIME), table(plot.time_table(runs))],
        "How it was run": [*map(provenance, folders), *versions(runs)],
    }
    ids = {name: name.lower().replace(" ", "-") for name in sections}
    return PAGE.format(
        title=html.escape(title(runs)),
        date=datetime.date.today().isoformat(),
        links="".join(f'<li><a href="#{ids[name]}">{name}</a></li>' for name in sections),
        sections="\n".join(
            f'<section id="{ids[name]}"><h2>{name}</h2>\n{"".join(parts)}</section>'
            for name, parts in sections.items()
        ),
    )


def title(runs: Sequence[Run]) -> str:
    """Title: rules, attacks, data sets and number of runs."""

    def told(name):
        values = [grouping.short(name, value) for value in grouping.settings(runs, name)]
        return ", ".join(values) if len(values) <= 3 else f"{len(values)} {name}s"

    attacked = f"under {told('attack')}" if told("attack") != "none" else "without attackers"
    return f"{told('rule')} {attacked} on {told('dataset')}: {len(runs)} runs"


def notices(runs: Sequence[Run]) -> list[str]:
    """A table of the notices, with the number of runs and the attacks."""
    told = collections.defaultdict(list)
    for run in runs:
        for notice in run.summary.get("notices", []):
            told[notice].append(run)
    if not told:
        return [text("None.")]
    lines = []
    for notice, group in told.items():
        attacks = ", ".join(grouping.short("attack", value) for value in grouping.settings(group, "attack"))
        lines.append({"runs": len(group), "attacks": attacks, "notice": notice})
    return [table(pd.DataFrame(lines), "wrap")]


def text(words: str, tag: str = "p") -> str:
    return f"<{tag}>{html.escape(words)}</{tag}>\n"


def table(frame: pd.DataFrame, classes: str | None = None) -> str:
    look = {"border": 0, "justify": "left", "na_rep": "", "float_format": "{:.4f}".format}
    with pd.option_context("display.max_colwidth", None):
        inside = frame.to_html(index=False, classes=classes, **look)
    return f'<div class="wide">{inside}</div>\n'


def summary(runs: Sequence[Run]) -> list[str]:
    """Final accuracy by rule and varying settings, over all seeds; and the settings common to all runs."""
    varied = ["rule", *varying(runs, grouping.SETTINGS)]
    lines: list[dict[str, Any]] = []
    for labels, group in grouping.split(runs, varied):
        worst, mean = ([run.summary[name] for run in group] for name in ("worst", "mean"))
        lines.append({name.replace("_", " "): grouping.short(name, value) for name, value in labels.items()})
        lines[-1] |= {"seeds": len(group), "worst node": f"{np.mean(worst):.1%}"}
        lines[-1] |= {"lowest seed": f"{min(worst):.1%}", "highest seed": f"{max(worst):.1%}"}
        lines[-1] |= {"mean": f"{np.mean(mean):.1%}"}
        lines[-1] |= {"diverged": sum(run.summary["diverged"] is not None for run in group)}
    shared = [f"{n}={getattr(runs[0].config, n)}" for n in grouping.SETTINGS if n not in varied]
    return [table(pd.DataFrame(lines)), text(f"In all runs: {', '.join(shared)}.")]


def failures(folders: Sequence[Path]) -> list[str]:
    """The runs that failed, if any."""
    lines = []
    for path in (path for folder in folders for path in sorted(folder.glob("[!.]*/failed.json"))):
        failed = _read(path)
        config, error = failed.get("config", {}), failed.get("error", "not recorded")
        lines.append({n: str(config.get(n)) for n in ("rule", "attack", "byzantine_ratio", "seed")})
        lines[-1] |= {"error": error.strip().split("\n")[-1], "folder": path.parent.name}
    return [text("Failed runs", "h3"), table(pd.DataFrame(lines))] if lines else []


def networks(runs: Sequence[Run]) -> list[str]:
    """Drawings and numbers of the runs' networks; names those that cannot be built again."""
    kinds: dict[tuple[str, int, int], dict[int, Run]] = collections.defaultdict(dict)
    drawn, lines, lost = [], [], []
    for _, (run, *_) in grouping.split(runs, ["topology", "nodes", "byzantine_ratio", "seed"]):
        kind = run.config.topology, run.config.nodes, run.config.byzantine
        kinds[kind].setdefault(run.config.seed, run)
    for (spec, benign, byzantine), seeds in kinds.items():
        first, *others = seeds.values()
        try:
            graph = network(first)
            numbers = [topology.numbers_of(g, benign) for g in (graph, *map(network, others))]
        except ConfigError as error:  # a plugin's topology, or a missing graph file
            lost.append(text(f"{spec} cannot be drawn: {error}"))
            continue
        drawn.append((first, graph))
        lines.append({"topology": grouping.short("topology", spec), "benign": benign, "Byzantine": byzantine})
        for name, values in zip(topology.NetworkNumbers._fields, zip(*numbers, strict=True), strict=True):
            lines[-1][name.replace("_", " ").replace("byzantine", "Byzantine")] = span(values)
    if not drawn:
        return lost
    picture = image("networks with their attackers", draw_networks(drawn))
    return [picture, text(NUMBERS), table(pd.DataFrame(lines), "heads"), *lost]


def span(values: Sequence[float]) -> str:
    """'4.03', or '4.03 to 6.24' if values differ; empty if there is none."""
    ends = [f"{v:.3g}" if v < 100 else f"{v:.0f}" for v in (min(values), max(values)) if not np.isnan(v)]
    return " to ".join(dict.fromkeys(ends))


def accepted(runs: Sequence[Run]) -> list[str]:
    """The figure of accepted edges, and the names of rules that have none."""
    selecting = [run for run in runs if run.curves["accepted"].any()]
    others = [grouping.short("rule", run.config.rule) for run in runs if not run.curves["accepted"].any()]
    others = [rule for rule in others if rule != "local"]  # it takes no message at all
    parts = [image("accepted edges", accepted_edges(selecting))] if selecting else []
    if others:
        why = "a coordinate-wise rule mixes values of all messages"
        parts.append(text(f"No whole message was accepted by {', '.join(others)}: {why}."))
    return parts


def _read(path: Path) -> dict:
    """The contents of a JSON file; {} if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def provenance(folder: Path) -> str:
    """The command recorded in a sweep's folder, and its other records."""
    noted = _read(folder / "sweep.json")
    command, date = (noted.pop(name, f"{name} not recorded") for name in ("command", "date"))
    parts = [text(f"{folder.absolute().name}, {date}", "h3"), text(command, "pre")]
    if seconds := noted.get("seconds"):
        share = seconds["compilation"] / seconds["total"]
        parts.append(text(f"Compilation took {share:.0%} of {seconds['total']:.0f} seconds."))
    return "".join(parts) + (text(json.dumps(noted, indent=1), "pre") if noted else "")


def versions(runs: Sequence[Run]) -> list[str]:
    """The versions and devices recorded by the runs."""
    said = [f"{json.dumps(run.summary['versions'])} on {run.summary['device']}" for run in runs]
    return [text(f"{count} runs: {words}") for words, count in collections.Counter(said).items()]


def write(runs: list[Run], out: Path) -> None:
    written = page(runs, [Path(f) for f in flags.FLAGS.results], flags.FLAGS.rows, flags.FLAGS.columns)
    (out / "report.html").write_text(written, encoding="utf-8")
    print(out / "report.html")


if __name__ == "__main__":
    plot.launch(write)
