"""Memory limits of host and device, and a check that refuses runs that exceed them."""

import contextlib
import os
from pathlib import Path

from ubar_jax.registry import ConfigError

COPIES = 3  # of all nodes' models held at once in a round, a lower bound; measured: 3 to 6
EDGE = 140  # bytes per edge in networkx, measured


def host_memory() -> int:
    """Bytes that this process may use on the host."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no limit, or the word "max"
        limit = min(limit, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return limit


def device_memory() -> int:
    """Bytes of memory of the device that runs use."""
    import jax

    device = jax.local_devices()[0]
    return (device.memory_stats() or {}).get("bytes_limit") or host_memory()


def check_fits(what: str, parts: dict[str, float], limit: int, advice: str) -> None:
    """Raise ConfigError if `parts`, {purpose: bytes}, sum to more than `limit` bytes."""
    if (total := sum(parts.values())) <= limit:
        return
    shares = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in parts.items() if size >= total / 100)
    raise ConfigError(
        f"{what} needs at least {int(total):,} bytes of memory ({shares}), the limit is {limit:,}; {advice}"
    )
