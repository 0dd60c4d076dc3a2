"""Editing a part or a graph file changes the digest of its runs, and of no others."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ubar_jax import Config, rules
from ubar_jax.parts.byzantine import attacks
from ubar_jax.registry import load_plugin
from ubar_jax.sources import source_of

ROOT = Path(__file__).parents[1]
PLUGIN = '''
import functools
import types

import numpy as np

from ubar_jax import attacks, rules

SCALE = 2
UNUSED = 3
A, B, C = 1, 1, 2
WORDS = {'b', 'a'}
TABLE = np.arange(3000)
LATER = [print, object()]
LATER.append(LATER)
K = 5
W = 7


def first(x):
    return x + 10


def second(x):
    return x + 20


def decorated(f):
    @functools.wraps(f)
    def inner(x):
        return f(x) + 30
    return inner


@decorated
def third(x, k=K):
    return x + k


class Base:
    def of_base(self):
        return 40


class Own(Base):
    width: int = W

    def __init__(self):
        self.size = 50

    @staticmethod
    def still(x):
        return second(x)


TABLES = {"a": first, "b": functools.partial(pow, 60)}
OWN = Own()
SPACE = types.SimpleNamespace(a=70)


def helper(x):
    return SCALE * x + [A, B, C, WORDS, TABLE, LATER, third, OWN, SPACE, TABLES]


def other(x):
    return x


@rules.register(pairs=lambda degree, count: degree)
def edited_rule(inbox):
    """Takes itself."""
    return helper(inbox.own), {}


@attacks.register
def edited_attack(key, view):
    """Sends itself."""
    return -view.own[view.benign:]
'''


@pytest.fixture
def plugin(tmp_path):
    def write(text):
        (tmp_path / "edited.py").write_text(text)
        importlib.invalidate_caches()
        load_plugin(str(tmp_path / "edited.py"))
        return Config(rule="edited_rule").digest()

    yield write
    rules.parts.pop("edited_rule", None)
    attacks.parts.pop("edited_attack", None)
    sys.modules.pop("edited", None)


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("helper(inbox.own)", "helper(inbox.own + 1)", True),
        ("SCALE * x +", "SCALE * x * x +", True),
        ("SCALE = 2", "SCALE = 4", True),
        ("count: degree", "count: 0 * degree", True),
        ("A, B, C = 1, 1, 2", "A, B, C = 1, 2, 1", True),
        ("WORDS = {'b', 'a'}", "WORDS = {'a', 'b'}", False),
        ("WORDS = {'b', 'a'}", "WORDS = {'b', 'c'}", True),
        ("TABLE = np.arange(3000)", "TABLE = np.arange(3000) // 2", True),
        ("x + 10", "x + 11", True),  # in a table
        ("x + 20", "x + 21", True),  # called by a static method
        ("f(x) + 30", "f(x) + 31", True),  # a decorator
        ("K = 5", "K = 6", True),  # a default
        ("return 40", "return 41", True),  # a base class
        ("size = 50", "size = 51", True),
        ("pow, 60", "pow, 61", True),
        ("a=70", "a=71", True),
        ("W = 7", "W = 8", True),  # a class body
        ("UNUSED = 3", "UNUSED = 4", False),
        ("    return x\n", "    return x + 1\n", False),
        ("return -view", "return -2 * view", False),
    ],
)
def test_an_edited_rule_is_a_new_run(plugin, before, after, new):
    assert before in PLUGIN
    assert (plugin(PLUGIN) != plugin(PLUGIN.replace(before, after))) == new


@pytest.mark.medium
def test_the_digest_is_the_same_in_every_process(tmp_path):
    """Neither addresses nor the order of a set, which differs between processes, are in it."""
    (tmp_path / "edited.py").write_text(PLUGIN)
    code = "import edited; from ubar_jax import Config; print(Config(rule='edited_rule').digest())"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", code]
    seeds = ({**env, "PYTHONHASHSEED": seed} for seed in ("1", "2"))
    one, two = (subprocess.run(command, env=e, capture_output=True, text=True, check=True) for e in seeds)
    assert one.stdout == two.stdout and len(one.stdout) == 13


def test_a_plugin_that_is_not_used_changes_nothing_and_an_inner_attack_counts(plugin):
    plain = Config(attack="gaussian", byzantine_ratio=0.3).digest()
    plugin(PLUGIN)
    assert Config(attack="gaussian", byzantine_ratio=0.3).digest() == plain
    inner = Config(attack="sleeper(edited_attack)", byzantine_ratio=0.3)
    before = inner.digest()
    plugin(PLUGIN.replace("return -view", "return -2 * view"))
    assert inner.digest() != before


def test_the_text_is_taken_once(plugin, tmp_path):
    digest = plugin(PLUGIN)
    (tmp_path / "edited.py").write_text(PLUGIN.replace("SCALE * x", "x"))
    assert Config(rule="edited_rule").digest() == digest  # the rule in memory is still the old one


def test_an_edited_graph_file_is_a_new_run(tmp_path):
    path = tmp_path / "net.txt"
    config = Config(topology=f"file(path={str(path)!r})", nodes=4)
    path.write_text("a b\nb c\nc d\n")
    before = config.digest()
    assert config.digest() == before
    path.write_text("a b\nb c\nc d\nd a\n")
    assert config.digest() != before


def test_an_edited_model_is_a_new_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "import flax.linen as nn\n\nW = 3\n\n\nclass Mine(nn.Module):\n    width: int = W\n"
    digests = []
    for given in (text, text, text.replace("3", "4")):
        (tmp_path / "own_model.py").write_text(given)
        sys.modules.pop("own_model", None)
        importlib.invalidate_caches()
        digests.append(Config(model="own_model:Mine").digest())
    source = source_of(sys.modules["own_model"].Mine)
    del sys.modules["own_model"]
    assert digests[0] == digests[1] != digests[2]
    assert source.splitlines() == ["class Mine(nn.Module):", "    width: int = W", "", "W = 4"]  # no bytecode


def test_functions_without_a_file_are_told_by_their_code():
    texts = []
    for number in (2.5, 2.5, 3.5):
        scope = {"__name__": "nowhere"}
        exec(f"def f(x):\n    return [x * {number} for _ in x]", scope)
        texts.append(source_of(scope["f"]))
    assert texts[0] == texts[1] != texts[2]


def test_digests_of_runs_without_own_parts_are_those_of_the_first_version():
    """Digests as in experiments/published: results of earlier versions must still be found."""
    map_run = Config(
        rule="ubar(rho=0.4)",
        attack="ipm",
        dataset="mnist",
        nodes=30,
        byzantine_ratio=0.5,
        batch_size=64,
        rounds=300,
        eval_every=50,
        eval_size=1000,
    )
    assert map_run.digest() == "116061a37113"
    assert Config().digest() == "038f59c04f49"
    assert dataclasses.replace(map_run, seed=1).digest() != map_run.digest()
