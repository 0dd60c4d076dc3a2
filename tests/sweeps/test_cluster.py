"""Sweeps on workers: the bits of the plain loop or one clear message, whatever dies, fills up or is hurt."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from test_sweeps import assert_same, sweep

from ubar_jax import ConfigError, results
from ubar_jax.engine.devices import cores
from ubar_jax.sweeps import checkpoints

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cores() < 2, reason="two workers need two cores"),
    pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="Ctrl-C is ignored here"),
]

KILLS = int(os.environ.get("UBAR_KILLS", 4))
GRID = ["--rule=average", "--rule=dmedian", "--attack=gaussian", "--byzantine_ratio=0.3"]
GRID += ["--topology=file(path='net.txt')", "--nodes=6", "--batch_size=16", "--optimizer=momentum"]
GRID += ["--rounds=400", "--eval_every=20", "--checkpoint_seconds=0"]
NETWORK = "\n".join(f"{a} {b}" for a in range(9) for b in range(a))
PLUGIN = """
import errno, os, signal, time
from pathlib import Path
import numpy as np
from ubar_jax import rules

@rules.register
def endless(inbox):
    '''Is never traced to its end.'''
    while True:
        time.sleep(1)

@rules.register
def deadly(inbox):
    '''Ends its process, as the system does when memory is short.'''
    os.kill(os.getpid(), signal.SIGKILL)

@rules.register
def greedy(inbox):
    '''Asks for more memory than there is.'''
    np.ones(2**50)

@rules.register
def hoarding(inbox):
    '''Fills the disk.'''
    def full(path, **arrays):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    np.savez_compressed = full
    return inbox.own, {}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `quiet`, the undisturbed sweep of the plain loop, and everything that sweeps need."""
    home = tmp_path_factory.mktemp("cluster")
    (home / "net.txt").write_text(NETWORK)
    (home / "mine.py").write_text(PLUGIN)
    assert finish(home, "--results=quiet")[0] == 0
    return home


def begin(home, *args, seeds="0,1"):
    env = {"JAX_COMPILATION_CACHE_DIR": str(home / "cache")}
    return sweep("--plugin=mine.py", f"--seeds={seeds}", *GRID, *args, cwd=home, **env)


def finish(home, *args, seeds="0,1"):
    """(exit code, stdout, stderr) of a sweep."""
    process = begin(home, *args, seeds=seeds)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def written(folder):
    """The checkpoints that are whole, and the finished runs."""
    steps = [path for path in folder.glob(f"{checkpoints.FOLDER}/*/*") if path.name.isdigit()]
    return sorted(map(str, [*steps, *folder.glob(results.RUNS)]))


def young_checkpoints(folder):
    """The folders of checkpoints whose runs are far from their end."""
    steps = [path for path in folder.glob(f"{checkpoints.FOLDER}/*/*") if path.name.isdigit()]
    return [path.parent for path in steps if int(path.name) <= 200]


def wait_for(sign, process):
    """Waits until `sign()`; whether it came before the process ended."""
    while not sign() and process.poll() is None:
        time.sleep(0.05)
    return process.poll() is None


def processes_of(home):
    """The folders in /proc of this folder's sweeps, with Ray's processes."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if str(home / "cache").encode() in (path / "environ").read_bytes():
                yield path


def workers_of(home):
    """The process ids of the workers of this folder's sweeps that have a task."""
    found = []
    for path in processes_of(home):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes().startswith(b"ray::work"):
                found.append(int(path.name))
    return found


def listening(home):
    """The local addresses, in hexadecimal, at which this folder's sweeps listen."""
    sockets = set()
    for path in processes_of(home):
        with contextlib.suppress(OSError):
            sockets |= {os.readlink(file) for file in (path / "fd").iterdir()}
    lines = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()
    ]
    return {
        line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets
    }


def test_two_workers_write_what_the_plain_loop_writes(home):
    """A plugin and a graph file, both named by relative paths, and every flag that workers need."""
    process = begin(home, "--results=two", "--workers=2", "--tensorboard", "--save_models")
    assert wait_for(lambda: written(home / "two"), process)
    addresses = listening(home)
    assert addresses and addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}  # loopback
    assert wait_for(lambda: len(workers_of(home)) == 2, process)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "4 runs in" in out and "2 groups" in out and "Traceback" not in err
    assert_same(home / "quiet", home / "two")
    assert (
        len(list((home / "two").glob("*/models.npz"))) == len(list((home / "two/tensorboard").iterdir())) == 4
    )
    assert not list((home / "two").glob(".part-*")) and not list(
        (home / "two").glob(f"{checkpoints.FOLDER}/*")
    )
    assert (home / "two" / results.TABLE).exists() and "4 of 4 runs" in finish(home, "--results=two")[1]


def test_killed_at_random_moments_it_ends_as_if_undisturbed(home):
    """SIGKILLs of the driver and of workers; a sweep that ends too early is compared and started anew."""
    draw, folder = random.Random(KILLS), home / "killed"
    args = ("--results=killed", "--workers=2")
    kills, ends, given_up = {"driver": 0, "worker": 0}, 0, 0
    process = begin(home, *args)
    while sum(kills.values()) < KILLS or process is not None:
        if process is None:
            process = begin(home, *args)
        before = written(folder)
        enough = sum(kills.values()) >= KILLS
        if not enough and wait_for(lambda seen=before: written(folder) != seen, process):
            time.sleep(draw.uniform(0, 1))
            victim = draw.choice(["driver", "worker"])
            pids = [process.pid] if victim == "driver" else workers_of(home)
            if pids and process.poll() is None:
                os.kill(draw.choice(pids), signal.SIGKILL)
                kills[victim] += 1
            if victim == "worker" or not pids:
                continue
        _, err = process.communicate(timeout=300)
        if process.returncode == 0:
            assert_same(home / "quiet", folder)
            assert not list(folder.glob(f"{checkpoints.FOLDER}/*"))
            shutil.rmtree(folder)
            ends += 1
        elif process.returncode == 1:
            assert "its worker died 3 times without getting further" in err and "Traceback" not in err
            given_up += 1
        else:
            assert process.returncode == -signal.SIGKILL, err
        again = process.returncode != 0
        process = begin(home, *args) if again else None
    print(f"{kills} killed, {ends} sweeps with the same bits, {given_up} that had to be started again")
    assert ends


def test_ctrl_c_then_damage_then_the_same_command(home):
    """Also: one owner per folder; a damaged result, checkpoint and cache; a folder of another format."""
    folder, args = home / "hurt", ("--results=hurt", "--workers=2")
    process = begin(home, *args)
    assert wait_for(lambda: list(folder.glob(results.RUNS)) and young_checkpoints(folder), process)
    with pytest.raises(ConfigError, match=f"is in use by process {process.pid} on "):
        results.owned(folder, "another").__enter__()
    [checkpoint, *_] = young_checkpoints(folder)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command to continue" in err and "Traceback" not in err
    for file in checkpoint.rglob("meta/*"):
        file.write_bytes(b"")
    [result, *_] = folder.glob("[!.]*/curves.npz")
    result.write_bytes(result.read_bytes()[:40])
    for entry in (home / "cache").glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:700])
    code, out, err = finish(home, *args)
    assert code == 0 and "Error reading persistent" not in err, err
    assert f"notice: {result.relative_to(home)} is damaged" in out
    assert f"notice: checkpoint {checkpoint} is damaged" in out
    assert_same(home / "quiet", folder)

    summary = next(folder.glob(results.RUNS))
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "format": 99}))
    code, _, err = finish(home, "--results=hurt", "--workers=2")
    assert code == 2 and "has results of format 99, this version reads 1" in err


def test_runs_that_take_too_long_or_too_much_fail_alone(home):
    rules = ("--rule=endless", "--rule=deadly", "--rule=greedy")
    code, _, err = finish(home, *rules, "--results=worse", "--workers=2", "--run_timeout=30", seeds="0")
    assert code == 1 and "3 of 5 runs failed" in err and "Traceback" not in err
    for path in (home / "worse").glob(results.RUNS):
        shutil.copytree(home / "quiet" / path.parent.name, home / "expected" / path.parent.name)
    assert_same(home / "expected", home / "worse")
    assert len(results.load_runs(home / "worse")) == 2
    reasons = [json.loads(path.read_text()) for path in (home / "worse").glob("*/failed.json")]
    told = {reason["config"]["rule"]: reason["error"] for reason in reasons}
    assert told["endless"] == "TimeoutError: the run took longer than --run_timeout=30 seconds"
    assert "its worker died 3 times without getting further (killed from outside, perhaps" in told["deadly"]
    assert "MemoryError" in told["greedy"]


def test_a_full_disk_on_a_worker_ends_the_sweep_in_words(home):
    code, _, err = finish(home, "--rule=hoarding", "--results=full", "--workers=2")
    assert code == 4 and "error: the disk is full; finished runs are saved" in err and "Traceback" not in err
    assert not list((home / "full").glob("*/failed.json")) and not list((home / "full").glob(".part-*"))


@pytest.fixture
def two_hosts(monkeypatch):
    """Two Ray nodes of one core each, on this machine."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster, cluster.add_node(num_cpus=1)
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore:os.fork.. was called")  # Ray executes at once
def test_a_host_is_lost(home, two_hosts):
    cluster, second = two_hosts
    folder, args = home / "lost", ("--results=lost", f"--address={cluster.address}")
    process = begin(home, *args)
    assert wait_for(lambda: len(written(folder)) >= 2, process)
    cluster.remove_node(second, allow_graceful=False)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert_same(home / "quiet", folder)
