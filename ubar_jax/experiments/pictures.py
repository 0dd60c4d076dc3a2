"""Figures that a notebook shows when they are the last line of a cell."""

import base64
import html
import io
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure


class Figure(matplotlib.figure.Figure):
    """A matplotlib figure that needs no pyplot to be shown."""

    def _repr_png_(self) -> bytes:
        return png(self, 100)


class Figures(list):
    """Several figures, shown below each other."""

    def _repr_html_(self) -> str:
        return "".join(image("figure", figure) for figure in self)


class Animation(NamedTuple):
    """A page with a player, which needs no other file and no network."""

    page: str  # HTML

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return f"Animation of {len(self.page) / 1e6:.1f} MB; save(path) writes it as a page"

    def save(self, path: str | Path) -> Path:
        """Writes the page to an HTML file."""
        Path(path).write_text(f'<!DOCTYPE html><meta charset="utf-8">\n{self.page}', encoding="utf-8")
        return Path(path)


def png(figure: matplotlib.figure.Figure, dpi: int) -> bytes:
    """A figure as a PNG file."""
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=dpi, bbox_inches="tight")
    return buffer.getvalue()


def image(name: str, figure: matplotlib.figure.Figure) -> str:
    """A figure as HTML that needs no other file."""
    inside = base64.b64encode(png(figure, 120)).decode()
    alt = html.escape(name.replace("_", " "))
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{inside}"></figure>\n'
