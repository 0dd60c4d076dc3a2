"""Several processes meet before JAX connects them: have all come, and with the same versions?

JAX itself ends a process without a helpful message if another one does not come.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator

from ubar_jax.installed import versions
from ubar_jax.registry import ConfigError, shown

WAIT = 50  # seconds for the other processes


def meet(coordinator: str, processes: int, process: int) -> None:
    """Returns once all processes have told process 0, at HOST:PORT, their versions, and all are equal."""
    address = host_and_port("coordinator", coordinator, "give an address of process 0")
    told = {"process": process, "processes": processes, "versions": versions()}
    try:
        verdict = (_gather if process == 0 else _tell)(address, told)
    except OSError as error:
        raise ConfigError(
            f"process {process} of {processes} did not meet the others at {coordinator} ({error}); start all "
            f"within {WAIT} s and give them the same coordinator, an address of process 0 that all can reach"
        ) from error
    if verdict:
        raise ConfigError(verdict)


def host_and_port(name: str, address: str, what_to_do: str) -> tuple[str, int]:
    """HOST:PORT as (host, port); `name` is what the user calls it."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{name}={shown(address)} is not HOST:PORT, such as 192.168.0.1:6379; {what_to_do}")
    return host.strip("[]"), int(port)


def _gather(address: tuple[str, int], told: dict) -> str:
    """What process 0 does: hears all others and sends them its verdict, which is empty if all is well."""
    heard, others = {0: told}, []
    end = time.monotonic() + WAIT
    host, port = address  # the host's own name may mean loopback; others could not reach it there
    here = address if host in ("127.0.0.1", "localhost") else ("", port)
    with socket.create_server(here) as server:
        try:
            while len(heard) < told["processes"]:
                server.settimeout(max(end - time.monotonic(), 0.01))
                connection, _ = server.accept()
                connection.settimeout(5)
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not one of ours
                    theirs = json.loads(connection.makefile().readline())
                    heard[theirs["process"]] = {name: theirs[name] for name in told}
                    others.append(connection)
            verdict = _verdict(heard)
        except TimeoutError as error:
            missing = sorted(set(range(told["processes"])) - heard.keys())
            raise TimeoutError(f"processes {missing} did not come") from error
        for connection in others:
            connection.sendall(f"{json.dumps(verdict)}\n".encode())
            connection.close()
    return verdict


def _verdict(heard: dict[int, dict]) -> str:
    first = heard[0]
    for number, theirs in sorted(heard.items()):
        if theirs["processes"] != first["processes"]:
            return f"process {number} expects {theirs['processes']} processes, process 0 {first['processes']}"
        for name, version in first["versions"].items():
            if theirs["versions"].get(name) != version:
                other = theirs["versions"].get(name)
                return f"process {number} has {name} {other}, process 0 {version}; install the same versions"
    return ""


def _tell(address: tuple[str, int], told: dict) -> str:
    """What the others do: tell process 0, and wait for its verdict."""
    for connection in _connections(address):
        with connection, contextlib.suppress(OSError):  # tried anew
            connection.sendall(f"{json.dumps(told)}\n".encode())
            if line := connection.makefile().readline():
                return json.loads(line)
    raise TimeoutError("process 0 did not answer")


def _connections(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Connections to process 0, tried anew until the time is over."""
    end = time.monotonic() + WAIT
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=left)
            connection.settimeout(left)
            yield connection
        except OSError:
            time.sleep(0.2)
