"""Run the Python snippets of README and GUIDE; check the files they link and the numbers they name."""

import re
from pathlib import Path

import pytest

from ubar_jax.config import REGISTRIES

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "GUIDE.md")


@pytest.mark.medium
@pytest.mark.parametrize(("page", "least"), [("README.md", 1), ("GUIDE.md", 3)])
def test_python_snippets_run(page, least):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(snippets) >= least
    scope = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), scope)
    assert scope["result"].curves["worst"][-1] > 0.5


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_headings_exist(page):
    for name, anchor in re.findall(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)", (ROOT / page).read_text()):
        assert (ROOT / name).exists(), name
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)", (ROOT / name).read_text())
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, anchor


def built_in(kind):
    return [name for name, part in REGISTRIES[kind].parts.items() if part.built_in]


@pytest.mark.parametrize(
    ("kind", "plural"),
    [("rule", "rules"), ("attack", "attacks"), ("topology", "topologies"), ("model", "models")],
)
def test_numbers_of_parts_are_those_of_the_registries(kind, plural):
    inside = (ROOT / "README.md").read_text().split("## What is inside")[1]
    assert f"{len(built_in(kind))} {plural}" in inside


@pytest.mark.parametrize("kind", ["rule", "attack"])
def test_every_rule_and_attack_is_in_the_guide(kind):
    guide = (ROOT / "GUIDE.md").read_text().split("## Rules and attacks")[1].split("\n## ")[0]
    assert [name for name in built_in(kind) if not re.search(rf"`{name}\b", guide)] == []
