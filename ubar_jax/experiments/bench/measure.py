"""Time functions in turns, and measure the limits of the machine."""

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from ubar_jax.engine import devices
from ubar_jax.engine.compilation import executable
from ubar_jax.installed import processor
from ubar_jax.numerics import nn

BUDGET = 12  # seconds after which a comparison is not repeated
SIZES = (512, 1024, 2048)  # sides of the square matrices; the fastest product is the peak
COPIED = 2**28  # bytes of the array that is copied


def seconds(
    functions: Sequence[Callable],
    repeats: int,
    clock: Callable[[], float] = time.process_time,
    choose: Callable[[Sequence[float]], float] = statistics.median,
    least: float = 0,
) -> list[float]:
    """The median time of `repeats` calls per function, made in turns, after one call to warm up.

    More calls until all together take `least` seconds; fewer, but at least one, if they take longer than
    BUDGET.
    """
    seen: list[list[float]] = [[] for _ in functions]

    def enough() -> bool:
        taken = sum(map(sum, seen))
        return len(seen[0]) > 1 and (taken >= BUDGET or (len(seen[0]) > repeats and taken >= least))

    while not enough():
        for function, taken in zip(functions, seen, strict=True):
            start = clock()
            function()
            taken.append(clock() - start)
    return [choose(taken[1:]) for taken in seen]


def ready(function: Callable, arguments: tuple, count: int = 1) -> Callable[[], Any]:
    """A function that runs the compiled program over `count` devices and waits.

    Arrays are arguments, not constants.
    """
    whole = devices.whole(count)
    arguments = jax.device_put(arguments, whole)
    spread = jax.jit(nn.over(devices.mesh(count), function), in_shardings=whole, out_shardings=whole)
    call = executable(spread.lower(*arguments))
    return lambda: jax.block_until_ready(call(*arguments))


@functools.cache
def limits(repeats: int, clock: Callable[[], float], torch: ModuleType | None) -> dict[str, Any]:
    """The fastest matrix product of jax and torch, in GFLOP/s, and copy, in GB/s read and written.

    Measured once per process.
    """
    rng = np.random.default_rng(0)
    products: dict[str, dict[int, float]] = {name: {} for name in (("jax", "torch") if torch else ("jax",))}
    for size in SIZES:
        pair = [rng.standard_normal((size, size), np.float32) for _ in range(2)]
        both: list[Callable[[], Any]] = [ready(lambda a, b: a @ b, tuple(pair))]
        if torch:
            tensors = [torch.from_numpy(a) for a in (*pair, np.empty_like(pair[0]))]
            both.append(functools.partial(torch.mm, *tensors[:2], out=tensors[2]))
        for name, taken in zip(products, seconds(both, repeats, clock, min), strict=True):
            products[name][size] = 2 * size**3 / taken / 1e9
    source = np.ones(COPIED // 4, np.float32)
    target = np.zeros_like(source)
    copies: dict[str, Callable[[], Any]] = {"numpy": functools.partial(np.copyto, target, source)}
    if torch:
        copies["torch"] = functools.partial(torch.from_numpy(target).copy_, torch.from_numpy(source))
    times = seconds(list(copies.values()), repeats, clock, min)
    copied = {name: 2 * COPIED / s / 1e9 for name, s in zip(copies, times, strict=True)}
    peak = max(max(of.values()) for of in products.values())
    return {
        "products": products,
        "copies": copied,
        "peak_gflops": peak,
        "bandwidth_gbs": max(copied.values()),
    }


def machine(torch: ModuleType | None) -> dict[str, Any]:
    """The machine and versions that the numbers come from."""
    versions = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    if torch:
        versions["torch"] = torch.__version__
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return {"cpu": processor(), "cores": cores, "load_before": load, "versions": versions}
