"""The devices that one run is spread over: a mesh with one axis, the nodes."""

import contextlib
import functools
import os
import warnings

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ubar_jax.numerics.nn import NODES
from ubar_jax.registry import ConfigError

# XLA aborts a process in which a CPU device waits for another for 40 s; a slow round may take longer.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=604800"
PATIENCE += " --xla_cpu_collective_call_warn_stuck_timeout_seconds=604800"
HAS_PATIENCE = jax.__version_info__ >= (0, 10, 1)  # jax 0.7.2 does not know the flag

_used = 1


def use_devices(count: int | None = None) -> int:
    """Spreads every run that is prepared from now on over `count` devices, with the same bits on any number.

    By default over all of them: the cores of a CPU, or all accelerators. Devices of a CPU are made when JAX
    starts, so call it first: a process that has used JAX already keeps the devices that it has. Returns their
    number.
    """
    global _used
    wanted = count or (cores() if HAS_PATIENCE else 1)
    if wanted > 1 and HAS_PATIENCE and PATIENCE not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENCE}".strip()
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", min(wanted, cores()))
    there, on_cpu = len(jax.devices()), jax.default_backend() == "cpu"
    if count is not None and on_cpu and cores() >= count > there:
        warnings.warn(
            f"JAX has started with {there} CPU device(s) in this process; runs use {there} instead of "
            f"{count}. Call use_devices before anything else uses JAX",
            stacklevel=2,
        )
        count = there
    if count is not None and not 1 <= count <= (cores() if on_cpu else there):
        has = f"{cores()} cores" if on_cpu else f"{there} {jax.default_backend()} devices"
        raise ConfigError(f"devices={count}: this machine has {has}; give a number from 1 to that")
    _used = count or (wanted if on_cpu and wanted < there else there)
    return _used


def used() -> int:
    """The number of devices that a run is spread over."""
    return _used


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return int(os.environ.get("NPROC") or len(os.sched_getaffinity(0)))


@functools.cache
def mesh(count: int) -> Mesh | None:
    """The mesh of the first `count` devices; None for a single device."""
    return None if count == 1 else Mesh(np.array(jax.devices()[:count]), (NODES,))


def whole(count: int) -> NamedSharding | None:
    """Whole on each of `count` devices; None for a single device."""
    found = mesh(count)
    return None if found is None else NamedSharding(found, PartitionSpec())
