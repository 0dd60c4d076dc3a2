"""Drawings of runs: the network with its attackers, accepted links, accuracy, an animation of the rounds."""

import base64
import contextlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import networkx as nx
import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from ubar_jax.experiments import grouping, plot
from ubar_jax.experiments.pictures import Animation, Figure
from ubar_jax.parts import topology
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps.results import Run, as_run
from ubar_jax.types import Result

BAD = plot.COLOURS[1]


def network(run: Run) -> nx.Graph:
    """The run's network, built again. Refuses a graph file that is not the run's any more."""
    spec = topology.topologies.parse(run.config.topology)
    graph = topology.build(spec, run.config.nodes, run.config.byzantine, run.config.seed)
    if spec.traits.reads and run.config.digest() != run.digest:
        raise ConfigError(f"the file of {spec} or another file of the run was edited after the run")
    return graph


@matplotlib.rc_context(plot.PLAIN)
def draw_networks(graphs: Sequence[tuple[Run, nx.Graph]]) -> Figure:
    """One panel per network: benign nodes are light circles, Byzantine nodes dark squares."""
    figure, axes = plot.panels(len(graphs), 3, 3.2)
    for axis, (run, graph) in zip(axes, graphs, strict=True):
        benign, places = run.config.nodes, nx.kamada_kawai_layout(graph)
        width = np.clip(80 / graph.number_of_edges(), 0.25, 0.8)
        for a, b in graph.edges:
            look = {"color": BAD, "ls": ":"} if max(a, b) >= benign else {"color": "0.6", "ls": "-"}
            axis.plot(*zip(places[a], places[b], strict=True), lw=width, zorder=1, **look)
        shapes = {"benign": ("o", "#CFE8F7", "black"), "Byzantine": ("s", BAD, "white")}
        for kind, (marker, colour, ink) in shapes.items():
            nodes = [node for node in graph if (node >= benign) == (kind == "Byzantine")]
            x, y = np.reshape([places[node] for node in nodes], (-1, 2)).T
            size = max(30, 200 - 2 * len(graph))
            axis.scatter(x, y, size, colour, marker=marker, edgecolors="black", zorder=2, label=kind)
            for node in nodes if len(graph) <= 60 else ():
                axis.annotate(node, places[node], ha="center", va="center", fontsize=6, color=ink, zorder=3)
        where = f"{grouping.short('topology', run.config.topology)}, seed {run.config.seed}"
        axis.set_title(f"{where}\n{benign} benign, {len(graph) - benign} Byzantine")
        axis.axis("off")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@matplotlib.rc_context(plot.PLAIN)
def accepted_edges(runs: Sequence[Run]) -> Figure:
    """Share of rounds in which the receiver (row) accepted the sender (column); one panel per run."""
    figure, axes = plot.panels(len(runs), 3, 3.2)
    for axis, run in zip(axes, runs, strict=True):
        share = run.curves["accepted"] / run.config.rounds
        benign, n = share.shape
        with contextlib.suppress(ConfigError):  # if the network cannot be built again, no cell is blank
            share[nx.to_numpy_array(network(run), nodelist=range(n))[:benign] == 0] = np.nan
        picture = axis.imshow(share, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        if n > benign:
            axis.axvline(benign - 0.5, color=BAD, lw=2)
            above = {"transform": axis.get_xaxis_transform(), "clip_on": False, "solid_capstyle": "butt"}
            axis.plot([benign - 0.5, n - 0.5], [1.02, 1.02], color=BAD, lw=4, **above)
        axis.set_title(grouping.run_words(run), pad=8)
        axis.set(xlabel=f"sender (Byzantine: {benign} and up)" if n > benign else "sender", ylabel="receiver")
        axis.locator_params(integer=True)
    figure.colorbar(picture, ax=axes, label="share of rounds accepted", pad=0.02, aspect=30)
    return figure


@matplotlib.rc_context(plot.STYLE)
def accuracy(result: Result | Run) -> Figure:
    """Test accuracy over time: every benign node, their mean, and the worst of them."""
    run = _run(result)
    unit = plot.time_unit([run])
    x, each = plot.times(run, unit), run.curves["accuracy"]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.plot(x, each, color=plot.COLOURS[6], lw=0.8)
    axis.plot(x, each.mean(1), color=plot.COLOURS[2], lw=2)
    axis.plot(x, each.min(1), color=plot.COLOURS[0], ls="--", lw=2)
    axis.set(title=grouping.run_words(run), ylim=(-0.03, 1.03), xlabel=unit, ylabel="test accuracy")
    lines = [axis.get_lines()[i] for i in (0, -2, -1)]
    labels = ["each benign node", "their mean", "the worst of them"]
    figure.legend(lines, labels, loc="outside lower center", ncols=3)
    return figure


def draw_network(result: Result | Run) -> Figure:
    """The network of a run: benign nodes are light circles, Byzantine nodes dark squares."""
    run = _run(result)
    return draw_networks([(run, network(run))])


def draw_accepted(result: Result | Run) -> Figure:
    """Share of rounds in which the receiver (row) accepted the sender (column)."""
    run = _run(result)
    if not run.curves["accepted"].any():
        rule = grouping.short("rule", run.config.rule)
        raise ConfigError(f"{rule} accepted no whole message: there are no accepted links to draw")
    return accepted_edges([run])


RED = "#C00018"
FRAMES = 40  # most frames of an animation
PER_SECOND = 4
LARGEST = 2_000_000  # characters of its page
SYMBOLS = {"minus": "&minus;", "plus": "+", "pause": "&#10074;&#10074;", "play": "&#9654;"}
SYMBOLS |= {"fast-backward": "&laquo;", "step-backward": "&lsaquo;", "play fa-flip-horizontal": "&#9664;"}
SYMBOLS |= {"fast-forward": "&raquo;", "step-forward": "&rsaquo;"}


def animate(result: Result | Run) -> Animation:
    """The network from evaluation to evaluation, as a page that plays without a network connection.

    Benign nodes have the colour of their accuracy. Links are dark if a benign message was accepted since the
    evaluation before, and red if a Byzantine one was; they are thicker the more often it was.
    """
    run = _run(result)
    if "accepted_since" not in run.curves:
        raise ConfigError(
            "this run has no record of what was accepted between evaluations: it is of an older version, or "
            "was resumed from its checkpoint; run it again, in another folder"
        )
    count = min(FRAMES, len(run.curves["round"]))
    while len(page := _player(run, count)) > LARGEST and count > 2:
        count = max(2, int(0.9 * count * LARGEST / len(page)))
    return Animation(page)


@matplotlib.rc_context({**plot.PLAIN, "animation.embed_limit": 1000, "savefig.bbox": "standard"})
def _player(run: Run, count: int) -> str:
    """The animation with `count` frames as HTML."""
    frames = np.unique(np.linspace(0, len(run.curves["round"]) - 1, count).round().astype(int))
    figure, show = _stage(run)
    film = FuncAnimation(figure, show, frames=frames, interval=1000 / PER_SECOND)
    page = film.to_jshtml(default_mode="loop")
    page = re.sub(r"<link[^>]*font-awesome[^>]*>", "", page)  # its icons are on a server
    page = re.sub(r'<i class="fa fa-([^"]*)"></i>', lambda found: SYMBOLS[found[1]], page)
    return re.sub(r'(?<=data:image/png;base64,)[^"]+', lambda found: _smaller(found[0]), page)


def _smaller(frame: str) -> str:
    """A frame (PNG as base64) with 256 colours, a third of its size."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(re.sub(r"[\\\s]", "", frame)))).convert("RGB")
    picture.quantize(256).save(buffer := io.BytesIO(), format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _stage(run: Run) -> tuple[Figure, Callable[[int], None]]:
    """(figure, function that draws evaluation e into it)."""
    benign, links = run.config.nodes, run.curves["links"]
    graph = _graph(run)
    places = nx.kamada_kawai_layout(graph)
    passed = np.maximum(1, np.diff(run.curves["round"], prepend=0))  # rounds since the evaluation before
    share = run.curves["accepted_since"] / passed[:, None]
    honest = links[:, 1] < benign
    lines: Any = np.array([[places[a], places[b]] for a, b in links])

    figure = Figure(figsize=(5.4, 4.9), dpi=80, layout="constrained")
    axis = figure.subplots()
    axis.axis("off")
    axis.set_aspect("equal")
    axis.add_collection(LineCollection(lines, colors="0.85", lw=0.6, zorder=1))
    looks = {"accepted benign message": (honest, "0.5"), "accepted Byzantine message": (~honest, RED)}
    drawn: list[tuple[Any, np.ndarray]] = []
    for which, colour in looks.values():
        drawn.append((LineCollection(lines[which], colors=colour, lw=0, zorder=2 + (colour == RED)), which))
        axis.add_collection(drawn[-1][0])
    size = max(30, 260 - 4 * len(graph))
    x, y = np.array([places[node] for node in range(benign)]).T
    look: dict[str, Any] = {"edgecolors": "black", "zorder": 4}
    nodes = axis.scatter(x, y, size, np.zeros(benign), vmin=0, vmax=1, cmap="cividis", **look)
    x, y = np.reshape([places[node] for node in graph if node >= benign], (-1, 2)).T
    axis.scatter(x, y, 0.8 * size, RED, marker="s", **look)
    figure.colorbar(nodes, label="test accuracy of a benign node (circle)", pad=0.02, aspect=30)
    handles = [Line2D([], [], color=colour, lw=2.5, label=name) for name, (_, colour) in looks.items()]
    handles.append(Line2D([], [], color="0.85", lw=1, label="other link"))
    square: dict[str, Any] = {"marker": "s", "ls": "", "color": RED, "markeredgecolor": "black"}
    handles.append(Line2D([], [], label="Byzantine node", **square))
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    rule, attack = (grouping.short(name, getattr(run.config, name)) for name in ("rule", "attack"))
    title = axis.set_title("\n")
    note = "" if run.curves["accepted"].any() else " (accepts no whole message)"

    def show(e: int) -> None:
        nodes.set_array(run.curves["accuracy"][e])
        for collection, which in drawn:
            collection.set_linewidth(np.where(share[e, which] > 0, 0.6 + 2.2 * share[e, which], 0))
        when, worst = run.curves["round"][e], run.curves["accuracy"][e].min()
        title.set_text(f"{rule} under {attack}{note}\nround {when}: worst node {worst:.0%}")

    return figure, show


def _graph(run: Run) -> nx.Graph:
    """The run's network or, if it cannot be built again, its links to benign nodes."""
    with contextlib.suppress(ConfigError):
        return network(run)
    graph = nx.Graph()
    graph.add_nodes_from(range(run.config.nodes + run.config.byzantine))
    graph.add_edges_from(run.curves["links"].tolist())
    return graph


def _run(result: Result | Run) -> Run:
    return as_run(result) if isinstance(result, Result) else result
