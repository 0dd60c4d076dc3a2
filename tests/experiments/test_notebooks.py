"""The notebooks: their text and their executed form have the same cells, and they run from start to end."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
NAMES = ("ubar_demo", "attack_lab")

pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")


@pytest.fixture(scope="module")
def build():
    """The module that builds the notebooks."""
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_text_and_executed_notebook_have_the_same_cells(build, name):
    text = (FOLDER / f"{name}.py").read_text()
    assert build.with_address(text) == text  # the address is that of pyproject.toml
    kept, read = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4), build.read(name)
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == [
        (cell.cell_type, cell.source) for cell in read.cells
    ]
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))  # executed in order, in a new process


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_small_and_without_errors_or_paths(name):
    raw = (FOLDER / f"{name}.ipynb").read_text()
    assert len(raw) < 4_000_000
    kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert not [out for out in outputs(kept) if out.output_type == "error" or out.get("name") == "stderr"]
    words = [json.dumps(out) for out in outputs(kept)]
    assert not [text for text in words if re.search(r"/(home|root|tmp|Users)/", text)]
    pages = [out.data["text/html"] for out in outputs(kept) if "text/html" in out.get("data", {})]
    assert [page for page in pages if "anim" in page and len(page) <= 2_000_000]  # an animation
    assert sum("image/png" in out.get("data", {}) for out in outputs(kept)) >= 2


@pytest.mark.medium
def test_the_address_comes_from_pyproject(build, monkeypatch):
    text = "a = 1\nADDRESS = None  # of the repository\n"
    monkeypatch.setattr(build, "address", lambda: "https://example.org/a")
    filled = build.with_address(text)
    assert filled == 'a = 1\nADDRESS = "https://example.org/a"  # of the repository\n'
    monkeypatch.setattr(build, "address", lambda: None)
    assert build.with_address(filled) == text


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_says_what_to_do_where_nothing_is_installed(name, tmp_path, monkeypatch):
    source = (FOLDER / f"{name}.py").read_text().split('# %% tags=["install"]\n')[1].split("# %%")[0]
    found, ran = importlib.util.find_spec, []
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ubar_jax" else found(name, *rest)
    )
    monkeypatch.setattr("subprocess.run", lambda command, check: ran.append(command[-1]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match=r"Upload its wheel .* or open the notebook inside a checkout"):
        exec(source, {})
    (tmp_path / "ubar_jax-0.1.0-py3-none-any.whl").touch()
    exec(source, {})
    (tmp_path / "checkout" / "ubar_jax").mkdir(parents=True)
    (tmp_path / "checkout" / "experiments" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "checkout" / "experiments" / "notebooks")
    exec(source, {})
    assert ran == [str(tmp_path / "ubar_jax-0.1.0-py3-none-any.whl"), str(tmp_path / "checkout")]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_start_to_end(build, name):
    done = build.execute(build.read(name))
    assert not [out for out in outputs(done) if out.output_type == "error"]
    kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for old, new in zip(kept.cells, done.cells, strict=True):
        kinds = [[out.output_type, *sorted(out.get("data", {}))] for out in old.get("outputs", [])]
        assert kinds == [[out.output_type, *sorted(out.get("data", {}))] for out in new.get("outputs", [])]


BROKEN = '''from ubar_jax import Config, rules, simulate

@rules.register
def mine(inbox):
    """Asks a traced value."""
    if inbox.t > 3:
        return inbox.own, {}
    return 2 * inbox.own, {}

simulate(Config(rule="mine", rounds=2))'''


@pytest.mark.slow
def test_a_broken_rule_is_told_in_a_few_lines_and_works_once_it_is_written_again(build):
    v4 = nbformat.v4
    mended = BROKEN.replace("if inbox.t > 3:", "if True:")
    cells = [v4.new_code_cell(BROKEN, metadata={"tags": ["raises-exception"]}), v4.new_code_cell(mended)]
    broken, whole = build.execute(v4.new_notebook(cells=cells)).cells
    [error] = [out for out in broken.outputs if out.output_type == "error"]
    told = "\n".join(error.traceback)
    assert "rule 'mine' failed at line 6 of the cell, `if inbox.t > 3:`: TracerBoolConversionError" in told
    assert len(told) < 900
    [out] = whole.outputs
    assert "mine under none" in out.data["text/plain"] and "<table>" in out.data["text/html"]
