"""Several processes that simulate together, on this machine."""

import hashlib
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from ubar_jax import Config, ConfigError, simulate, use_processes
from ubar_jax.engine import meeting

ROOT = Path(__file__).parents[2]
SETTINGS = {"rule": "ubar", "attack": "ipm", "byzantine_ratio": 0.3, "nodes": 7, "rounds": 6}
TOGETHER = f"""
import sys
from ubar_jax import Config, simulate, use_processes
assert use_processes(sys.argv[1], 2, int(sys.argv[2])) == 2
from test_meeting import models_of
print(models_of(simulate(Config(**{SETTINGS}))))
"""


def models_of(result) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(result.state.params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_two_processes_have_the_bits_of_one():
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/engine'}", "JAX_PLATFORMS": "cpu"}
    address = free_address()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, address, str(i)], env=env, stdout=-1, stderr=-1, text=True
        )
        for i in range(2)
    ]
    alone = models_of(simulate(Config(**SETTINGS)))
    for process in started:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert out.split()[-1] == alone


def meet_all(monkeypatch, versions, processes=2, wait=5.0):
    """What each of the processes, here threads, is told; None if all is well."""
    monkeypatch.setattr(meeting, "WAIT", wait)
    found = iter(versions)
    monkeypatch.setattr(meeting, "versions", lambda: {"jax": next(found)})
    address = free_address()

    def one(process):
        try:
            return meeting.meet(address, processes, process)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(versions)) as pool:
        return list(pool.map(one, range(len(versions))))


def test_processes_meet(monkeypatch):
    assert meet_all(monkeypatch, ["1"] * 3, processes=3) == [None] * 3


def test_processes_with_different_versions_are_refused(monkeypatch):
    told = meet_all(monkeypatch, ["1", "2"])
    assert told[0] == told[1] and re.match(r"process 1 has jax \d, process 0 \d; install the same", told[0])


def test_a_process_that_does_not_come_is_told(monkeypatch):
    [told] = meet_all(monkeypatch, ["1"], wait=0.3)
    assert "processes [1] did not come" in told and "start all within 0.3 s" in told


def test_a_coordinator_that_cannot_be_reached_is_told(monkeypatch):
    monkeypatch.setattr(meeting, "WAIT", 0.3)
    with pytest.raises(ConfigError, match=r"process 1 of 2 did not meet the others .* did not answer"):
        meeting.meet(free_address(), 2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1", 2, 0), "is not HOST:PORT"),
        (("127.0.0.1:99999", 2, 0), "is not HOST:PORT"),
        (("127.0.0.1:1", 2, 2), "give a number from 0 to 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        use_processes(*arguments)
