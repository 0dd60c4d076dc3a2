"""Layers of the package: imports point down only, every package has a docstring, no object shadows a module.

`python tests/test_layers.py` prints the layers and their imports.
"""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom up: a module may import from its own layer and those below.
ROOMS = ("base", "numerics", "parts", "config", "engine", "testing", "sweeps", "experiments")
BASE = ("types", "registry", "sources", "files", "memory", "progress", "installed")
# Exceptions. A Result draws itself: its methods import the drawing, which is above it, when they are called.
UP = {("ubar_jax.types", "ubar_jax.experiments.drawing")}
# `experiments.sweep` is a command, whose name is fixed; `ubar_jax.sweep` is the same in Python.
SHADOWS = {("ubar_jax.experiments.notebook", "sweep")}
NEITHER = {"testing": "sweeps", "sweeps": "testing"}


def modules() -> dict[str, Path]:
    paths = sorted((ROOT / "ubar_jax").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return {
        n.removesuffix(".__init__"): p for n, p in zip(names, paths, strict=True) if n != "ubar_jax.__init__"
    }


def room(module: str) -> str:
    first = module.split(".")[1]
    return "base" if first in BASE else first


def imports(path: Path) -> set[str]:
    """The project's modules that a module imports, also inside functions, but not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ubar_jax"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("ubar_jax.")}
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module):
    for found in imports(modules()[module]) - {up for low, up in UP if low == module}:
        here, there = room(module), room(found)
        assert there in ROOMS, f"{module} imports {found}, which is in no layer"
        assert ROOMS.index(there) <= ROOMS.index(here), (
            f"{module} in {here} imports {found} from {there} above it"
        )
        assert NEITHER.get(here) != there, f"{module} imports {found}"


def test_every_room_has_a_door():
    for path in (ROOT / "ubar_jax").rglob("*/"):
        if path.name != "__pycache__":
            assert ast.get_docstring(ast.parse((path / "__init__.py").read_text()))


def test_no_object_has_the_name_of_a_module():
    names = {name.rpartition(".")[2] for name in modules()} - {"__main__"}
    for name in modules():
        if name.endswith("__main__"):
            continue
        for key, value in vars(importlib.import_module(name)).items():
            if (name, key) in SHADOWS:
                continue
            assert key not in names or inspect.ismodule(value), f"{name}.{key} has the name of a module"


@pytest.mark.medium
def test_a_picture_does_not_load_the_engine():
    code = "import sys, ubar_jax.experiments.plot; print([m for m in sys.modules if 'ubar_jax.engine' in m])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def drawn() -> str:
    """The layers from the top down, with their modules and the layers that they import."""
    lines = []
    for name in reversed(ROOMS):
        inside = [module for module in modules() if room(module) == name]
        links = {(module, found) for module in inside for found in imports(modules()[module])} - UP
        below = {room(found) for _, found in links} - {name}
        rows = [module.removeprefix("ubar_jax.").removeprefix(f"{name}.") for module in inside]
        lines.append(f"{name:12} {', '.join(row for row in rows if row != name)}")
        lines.append(f"{'':12} imports {', '.join(sorted(below, key=ROOMS.index)) or 'no other layer'}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(drawn())
