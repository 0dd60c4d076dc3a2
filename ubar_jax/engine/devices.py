"""The devices that one run is spread over: a mesh with one axis, the nodes."""

import contextlib
import functools
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ubar_jax.engine import meeting
from ubar_jax.numerics.nn import NODES
from ubar_jax.registry import ConfigError

# XLA aborts a process in which a CPU device waits for another for 40 s; a slow round may take longer.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=604800"
PATIENCE += " --xla_cpu_collective_call_warn_stuck_timeout_seconds=604800"
HAS_PATIENCE = jax.__version_info__ >= (0, 10, 1)  # jax 0.7.2 does not know the flag

_used = 1


def use_devices(count: int | None = None) -> int:
    """Spreads every run that is prepared from now on over `count` devices.

    By default over all of them: the cores of a CPU, or all accelerators. Models have the same bits on any
    number of devices; with Adam up to the last digit. Devices of a CPU are made when JAX starts, so call it
    first: a process that has used JAX already keeps the devices that it has. Returns their number.
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


def use_processes(coordinator: str, processes: int, process: int) -> int:
    """Makes this process one of several, on one machine or more, that run the same script together.

    Call it before anything else uses JAX, in every process with its own number `process`, from 0; then every
    run is spread over the devices of all of them, one CPU device or all accelerators per process. The
    coordinator is process 0, as HOST:PORT. All must simulate the same configs in the same order, and each
    gets all results; let process 0 write files. Returns the number of devices.
    """
    global _used
    if not 0 <= process < processes:
        raise ConfigError(f"process={process} of {processes}; give a number from 0 to {processes - 1}")
    once = "call use_processes once, before anything else uses JAX"
    if jax.distributed.is_initialized():
        raise ConfigError(f"this process is one of several already; {once}")
    with contextlib.suppress(RuntimeError):  # JAX has started; initialize says so
        jax.config.update("jax_num_cpu_devices", 1)
    meeting.meet(coordinator, processes, process)
    try:
        jax.distributed.initialize(coordinator, processes, process, initialization_timeout=meeting.WAIT)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{error}; {once}") from error
    _used = jax.device_count()
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


def put(tree: Any, count: int) -> Any:
    """A tree of arrays, whole on each of `count` devices, which may belong to several processes."""
    sharding = whole(count)
    if sharding is None or jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.jit(jax.random.wrap_key_data, out_shardings=sharding)(one(jax.random.key_data(leaf)))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])

    return jax.tree.map(one, tree)
