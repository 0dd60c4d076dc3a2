"""Run the README's Python snippets; check that the files it links exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[1]


def test_python_snippets_run(monkeypatch):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) >= 3
    scope = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), scope)
    assert scope["result"].curves["worst"][-1] > 0.5


def test_named_files_exist():
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
