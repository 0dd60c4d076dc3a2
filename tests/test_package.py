"""The package as it is installed: the wheel, the console commands, and what an import changes."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = ("sweep", "plot", "report", "bench", "reproduce")

LOOK = """
import json, logging, os, sys, warnings
sys.path.insert(0, {root!r})
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
{first}

def state():
    root = logging.getLogger()
    found = {{f"environ {{k}}": v for k, v in os.environ.items()}}
    found |= {{"filters": str(warnings.filters), "showwarning": str(warnings.showwarning)}}
    found |= {{"handlers": str(root.handlers), "level": root.level, "hooks": str((sys.excepthook, sys.path))}}
    return found | {{f"jax {{k}}": str(sys.modules["jax"].config.values[k]) for k in options}}

options = list(sys.modules["jax"].config.values) if "jax" in sys.modules else []

before = state()
{then}
after = state()
print(json.dumps(sorted(k for k in before | after if before.get(k) != after.get(k))))
"""


@pytest.mark.parametrize(
    ("first", "then", "changed"),
    [
        ("", "import ubar_jax", '["environ TF_CPP_MIN_LOG_LEVEL"]'),
        ("import jax", "import ubar_jax; [getattr(ubar_jax, name) for name in ubar_jax.__all__]", "[]"),
    ],
)
def test_an_import_changes_nothing_but_the_level_of_the_log_of_xla(first, then, changed):
    """`import jax` sets that level itself if it is not set."""
    code = LOOK.format(root=str(ROOT), first=first, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == changed and done.stderr == ""


def test_no_address_is_invented():
    """The public address has one place; it is not decided."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["ubar_jax"] == {"address": ""}
    assert "urls" not in settings["project"]


def test_the_citation_has_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_dependency_has_a_lower_bound():
    """`make test-oldest` installs exactly these."""
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "lowest"], capture_output=True, text=True, check=True
    )
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(done.stdout.split()) == len(dependencies) and "jax==0.7.2" in done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the checkout, built from a copy of it."""
    copy, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(
        ".git", ".*cache", ".venv*", "venv*", "build", "dist", "results", "*.egg-info"
    )
    shutil.copytree(ROOT, copy, ignore=left_out)
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), str(copy)]
    done = subprocess.run(words, capture_output=True, text=True)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("needs a package index, for setuptools")
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a command of a new environment that has the wheel, in an empty folder, without the checkout.

    Other packages come from this environment: PYTHONPATH does not show what is installed as editable.
    """
    folder, work = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("work")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = str(folder / "bin" / "python")
    words = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(words, check=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PYTHONPATH": sysconfig.get_path("purelib"), "JAX_PLATFORMS": "cpu"}

    def run(program, *args):
        words = [str(folder / "bin" / program), *args]
        return subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=900)

    run.folder, run.work = folder, work
    return run


@pytest.mark.slow
def test_the_wheel_has_all_modules_and_only_flagfiles_besides(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ubar_jax/")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ubar_jax").rglob("*.py")}
    flagfiles = {
        f"ubar_jax/experiments/flagfiles/{path.relative_to(ROOT / 'experiments')}"
        for path in (ROOT / "experiments").rglob("*.flags")
    }
    assert len(flagfiles) >= 7
    assert inside == modules | flagfiles | {"ubar_jax/py.typed"}


@pytest.mark.slow
def test_the_wheel_runs_without_the_checkout(installed):
    where = installed("python", "-c", "import ubar_jax; print(ubar_jax.__file__)")
    assert where.stdout.startswith(str(installed.folder)), where.stderr
    dry = installed("python", "-m", "ubar_jax.experiments.sweep", "--flagfile=quickstart", "--dry_run")
    assert dry.returncode == 0 and "6 runs to do" in dry.stdout, dry.stderr
    (installed.work / "tiny.flags").write_text("--nodes=4\n--rounds=2\n--eval_every=2\n--results=mine\n")
    done = installed("ubar-sweep", "--flagfile=tiny.flags", "--rule=ubar", "--rule=average")
    assert done.returncode == 0 and "2 runs in" in done.stdout, done.stderr
    assert installed("ubar-plot", "--results=mine").returncode == 0
    assert installed("ubar-report", "--results=mine").returncode == 0
    assert (installed.work / "mine" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_console_commands_show_their_flags(installed, name):
    told, folder = installed(f"ubar-{name}", "--help"), "--out" if name == "reproduce" else "--results"
    assert folder in told.stdout and f"ubar_jax.experiments.{name}" in told.stdout, told
    refused = installed(f"ubar-{name}", f"{folder}=")
    assert refused.returncode == 2 and refused.stderr.startswith("error: ")


@pytest.mark.slow
def test_the_bench_says_that_the_torch_programs_are_not_in_the_package(installed):
    done = installed("ubar-bench", "peak", "--repeats=1", "--results=cost")
    assert done.returncode == 0 and "they need the folder benchmarks of a checkout" in done.stdout
