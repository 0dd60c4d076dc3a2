"""Builds the notebooks: `python experiments/notebooks/build.py [NAME ...]`, or `make notebooks`.

Executes the text of each notebook (NAME.py, jupytext's percent format) and writes NAME.ipynb with its outputs.
Needs the dev extra.
"""

import re
import sys
import time
import tomllib
from pathlib import Path

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).parent
NAMES = ("ubar_demo", "attack_lab")
ADDRESS = re.compile(r"^ADDRESS = [^#\n]*?(?=  #)", re.MULTILINE)


def address() -> str | None:
    """The project's address in pyproject.toml; None while it is not decided."""
    about = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    return about["tool"]["ubar_jax"]["address"] or None


def with_address(text: str) -> str:
    """The text of a notebook, with the project's address in its first cell."""
    quoted = f'"{address()}"' if address() else "None"
    return ADDRESS.sub(f"ADDRESS = {quoted}", text)


def read(name: str) -> nbformat.NotebookNode:
    """A notebook from its text, without outputs."""
    notebook = jupytext.reads(with_address((FOLDER / f"{name}.py").read_text()), fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # jupytext's are random
    notebook.metadata.pop("jupytext", None)
    return notebook


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs a notebook from start to end, in place; keeps neither progress bars nor times."""
    nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": FOLDER}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    return notebook


def main(names: list[str]) -> None:
    for name in names or NAMES:
        (FOLDER / f"{name}.py").write_text(with_address((FOLDER / f"{name}.py").read_text()))
        started, path = time.perf_counter(), FOLDER / f"{name}.ipynb"
        nbformat.write(execute(read(name)), path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
