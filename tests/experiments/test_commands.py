"""Bad commands: one message, exit code 2, nothing executed, within seconds."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl import flags
from conftest import slowly

from ubar_jax.experiments import command, sweep
from ubar_jax.parts import download
from ubar_jax.sweeps import cluster
from ubar_jax.sweeps.groups import Estimate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """(exit code, stdout, stderr) of a sweep command, run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "_jax_has_gpus", lambda: False)
    monkeypatch.setattr(
        sweep, "estimate", lambda left: [Estimate(1, 1, 1)] * len(left)
    )  # the real one compiles

    def run(*args):
        for name in flags.FLAGS:
            flags.FLAGS[name].unparse()
        try:
            code = command.guarded(sweep.main, command.parse(["sweep", *args]))
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nodes=100000"], "1437 training examples, 0 for each of 100000 nodes"),
        (["--attack=ipm", "--byzantine_ratio=0.999999999"], "0 for each of 10000000283 nodes"),
        (["--nodes=1000000000000"], "nodes is an integer >= 2 (at most 2147483647)"),
        (["--rounds=99999999999999999999"], "rounds is an integer >= 1 (at most 2147483647)"),
        (["--rounds=2000000000", "--eval_every=2000000000"], "batches between two evaluations 2.56e+03 GB"),
        (["--rounds=2000000000", "--nodes=40"], "every round's and evaluation's numbers"),
        (["--dataset=synthetic(examples=99999999999999)"], "examples is an integer >= 20 (at most"),
        (["--dataset=synthetic(examples=2000000000)"], "needs at least 3,840,000,005,120 bytes"),
        (["--topology=file(path=3)"], "path=3 is not allowed; path is a word or a text in quotes"),
        (["--learning_rate=1e300"], "learning_rate is a number >= 0 (0, or from 1.2e-38 to 3.4e+38)"),
        (["--schedule=fading(half=1e300)"], "half is a number > 0 (0, or from 1.2e-38 to 3.4e+38)"),
        (["--model=mlp(hidden=2000000000)"], "needs at least 18,000,000,105,968 bytes of memory (models"),
        (["--dataset=synthetic(examples=200000)", "--nodes=100000", "--batch_size=1"], "the graph"),
        (["--sharding=by_label(pieces=2000000000)"], "allow 143 pieces"),
        (["--results="], "flag --results=: is empty"),
        (["--flagfile="], "--flagfile is empty"),
        (["--flagfile"], "--flagfile is empty"),
        (["--flagfile=gone.flags"], "flagfile 'gone.flags' cannot be read (No such file or directory)"),
        (["--flagfile=gone"], "among the shipped ones: attacks, digits, judges, "),
        (["--flagfile=experiments/quickstart"], "cannot be read (No such file or directory)"),
        (["--flagfile=loop.flags"], "flagfile 'loop.flags' includes itself"),
        (["--flagfile=."], "cannot be read (Is a directory)"),
        (["--flagfile=binary.flags"], "it is not a text file"),
        (["--checkpoint_seconds=nan"], "must be a number >= 0"),
        (["--checkpoint_seconds=-1"], "must be a number >= 0"),
        (["--run_timeout=0"], "must be a number > 0"),
        (["--workers=0"], "is not a positive integer"),
        (["--workers=100000"], "cores; give a number from 1 to that"),
        (["--workers=1", "--address=localhost:6379"], "give one"),
        (["--workers=1", "--devices=2"], "a worker uses one device; leave --devices out"),
        (["--address=localhost"], "is not HOST:PORT, such as 192.168.0.1:6379"),
        (["--address=ray://localhost:10001"], "is not HOST:PORT"),
        (["--plugin=exits.py"], "plugin 'exits.py' cannot be imported (SystemExit: 3)"),
        (["--rul=ubar"], "Did you mean: rule"),
        (["--model=os:system('touch canary')"], "system is not a class of flax.linen.Module"),
        (["--model=os:PathLike"], "PathLike is not a class of flax.linen.Module"),
        (["--rule=" + "(" * 5000], "is malformed"),
        (["--rule=ubar(rho=" + "9" * 5000 + ")"], "is malformed"),
        (["--seeds=" + "9" * 5000], "is not a whole number"),
        (["--rule=x\0y"], "is malformed"),
    ],
)
def test_what_cannot_work_is_refused_in_words(call, args, message, tmp_path):
    (tmp_path / "loop.flags").write_text("--rounds=3\n--flagfile=loop.flags\n")
    (tmp_path / "binary.flags").write_bytes(b"\xff\xfe--rounds\xff")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    started = time.process_time()
    code, out, err = call("--dry_run", *args)
    assert code == 2 and out == "", (code, out)
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert time.process_time() - started < 20
    assert not (tmp_path / "canary").exists()


def test_workers_without_ray_are_told_what_to_install(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = call("--dry_run", "--workers=1")
    assert code == 2 and "need Ray: pip install 'ubar_jax[cluster]'" in err


@pytest.mark.medium
@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        ("plot", ["--rows=bogus"], "value should be one of"),
        ("plot", ["--results=gone"], "there is no folder 'gone'; give folders of sweeps"),
        ("report", ["stray"], "unknown argument 'stray'"),
        ("bench", ["bogus"], "unknown section 'bogus'"),
        *slowly(
            ("plot", ["--results="], "is empty"),
            ("plot", ["--out="], "is empty"),
            ("report", ["--flagfile=gone"], "flagfile 'gone' cannot be read"),
            ("bench", ["--repeats=0"], "repeats"),
            ("bench", ["--results="], "is empty"),
        ),
    ],
)
def test_all_commands_say_no_in_one_way(module, args, message, tmp_path):
    done = run_command(module, *args, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stdout == ""


def run_command(module, *args, cwd):
    words = [sys.executable, "-m", f"ubar_jax.experiments.{module}", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_a_dry_run_writes_nothing(call, tmp_path):
    code, out, _ = call("--dry_run", "--results=out", "--rounds=3")
    assert code == 0 and "1 runs to do" in out
    assert not list(tmp_path.iterdir())


def test_flagfiles_in_flagfiles_stand_where_they_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.flags").write_text("# first\n--rule=a\n\n  --flagfile=b.flags\n// last\n--rule=c\n")
    (tmp_path / "b.flags").write_text("--rule=b\n")
    args = ["--x=1", "--flagfile", "a.flags", "--flagfile=b.flags", "--", "--flagfile=gone"]
    wanted = ["--x=1", "--rule=a", "--rule=b", "--rule=c", "--rule=b", "--", "--flagfile=gone"]
    assert command.expanded(args) == wanted


@pytest.mark.parametrize("name", ["quickstart", "quickstart.flags"])
def test_a_shipped_flagfile_is_found_by_its_name(call, name, tmp_path):
    (tmp_path / "quickstart").mkdir()  # a folder of that name is no flagfile
    code, out, _ = call("--dry_run", f"--flagfile={name}", "--results=out")
    assert code == 0 and "6 runs to do" in out


def test_a_file_goes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--rounds=300" in command.expanded(["--flagfile=quickstart"])
    (tmp_path / "quickstart").write_text("--rule=mine\n--flagfile=quickstart.flags\n")
    assert command.expanded(["--flagfile=quickstart"])[:2] == ["--rule=mine", "--rule=ubar(rho=0.4)"]


def test_downloads_are_turned_off_by_a_flag_and_in_a_dry_run(call, monkeypatch):
    for args in (["--download=false", "list"], ["--dry_run"]):
        monkeypatch.delenv("UBAR_DOWNLOAD")
        assert download.allowed()
        assert call(*args)[0] == 0
        assert not download.allowed()
    monkeypatch.delenv("UBAR_DOWNLOAD")
    call("list")
    assert download.allowed()


VALID = [
    ["--rule=ubar(rho=0.4)", "--attack=gaussian(std=2)", "--byzantine_ratio=0.3", "--nodes=6"],
    ["--rule=bridge(variant=K)", "--rho=oracle", "--attack=sleeper(alie(z=1), start=2)", "--seeds=0,1"],
    ["--topology=small_world(degree=4, rewire=0.2)", "--sharding=dirichlet(a=0.5)", "--batch_size=8"],
    ["--dataset=synthetic(examples=200, size=5)", "--model=mlp(hidden=7)", "--optimizer=momentum"],
    ["--learning_rate=0.1", "--alpha=0.3", "--schedule=constant", "--rounds=3", "--eval_every=2"],
    ["--topology=file(path='net.txt')", "--connection=0.5", "--width=2", "--checkpoint_seconds=5"],
]
PIECES = [
    "(",
    ")",
    "=",
    ",",
    "'",
    '"',
    "[",
    "]",
    "{",
    "*",
    "**",
    ":",
    ";",
    "\\",
    "%s",
    "\x00",
    "\n",
    "é",
    "-",
]
PIECES += ["1e999", "-1", "nan", "None", "True", "0x10", "9" * 30, "os", "lambda: 0", "(1).__class__", "#"]
PIECES += [
    "__import__('os').system('touch canary')",
    "os:system('touch canary')",
    'f\'{open("canary","w")}\'',
]


def mutated(draw: random.Random) -> list[str]:
    """A valid command with one to three places cut, doubled, replaced, or filled with odd text."""
    args = list(draw.choice(VALID))
    for _ in range(draw.randint(1, 3)):
        i = draw.randrange(len(args))
        text, at = args[i], draw.randrange(len(args[i]) + 1)
        to = min(len(text), at + draw.randint(1, 6))
        kind = draw.randrange(5)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:at] + draw.choice(PIECES) + text[at:]
        elif kind == 2:
            text = text[:at] + draw.choice(PIECES) + text[to:]
        elif kind == 3:
            text = text[: text.find("=") + 1] + draw.choice(PIECES)
        else:
            text = text[:to] + text[at:]
        args[i] = text
    return args


def check_mutations(call, folder, seed, commands):
    draw, refused = random.Random(seed), 0
    for _ in range(commands):
        args = mutated(draw)
        started = time.process_time()
        code, _, err = call("--dry_run", *args)
        assert code in (0, 2), (args, code, err)
        if code == 2:
            refused += 1
            assert err.startswith("error: ") and err.count("error:") == 1 and "Traceback" not in err, (
                args,
                err,
            )
        assert time.process_time() - started < 20, args
        assert [path.name for path in folder.iterdir()] == [], args
    assert refused > commands / 2


def test_malformed_commands(call, tmp_path):
    check_mutations(call, tmp_path, 0, 60)


@pytest.mark.slow
def test_many_malformed_commands(call, tmp_path):
    check_mutations(call, tmp_path, 1, int(os.environ.get("UBAR_FUZZ", 300)))


def test_help_and_list_import_no_package_that_they_do_not_need(tmp_path):
    code = "import sys; from ubar_jax.experiments import sweep; sweep.listing()\n"
    code += "heavy = ('pandas', 'matplotlib', 'flax', 'optax', 'sklearn', 'orbax', 'ray')\n"
    code += "print([name for name in heavy if name in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
