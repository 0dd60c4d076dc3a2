"""Maps a function over stacked models (their leading axis), which may be split over devices.

On the CPU models run one at a time, on accelerators in parallel. `lax.platform_dependent` chooses when the
program is lowered, so a program lowered for CUDA on a CPU machine is the one that runs on CUDA.
"""

import contextvars
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

MEMORY = 4 * 2**30  # bytes that parallel models may use on an accelerator
UNFUSED = ("dot_general", "conv_general_dilated", "concatenate", "gather")

NODES = "nodes"  # the axis of devices
_devices: contextvars.ContextVar[int] = contextvars.ContextVar("devices", default=1)


def over(mesh: Mesh | None, f: Callable) -> Callable:
    """f, run by every device of the mesh on the same arguments; only what `mine` returns is divided.

    So its results have the same bits on any number of devices. None: one device.
    """
    if mesh is None:
        return f

    def traced(*arguments):
        before = _devices.set(mesh.size)
        try:
            return f(*arguments)
        finally:
            _devices.reset(before)

    everywhere = PartitionSpec()
    return jax.shard_map(traced, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)


def mine(stacked):
    """The rows of every leaf that this device computes; `whole` puts those of all devices together again.

    Where the devices do not divide the rows, some belong to two of them.
    """
    devices = _devices.get()
    if devices == 1:
        return stacked
    share, start = _shares(len(jax.tree.leaves(stacked)[0]), devices)
    at = jnp.asarray(start)[lax.axis_index(NODES)]
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, at, share), stacked)


def whole(tree, count: int):
    """All `count` rows of every leaf, of which this device has `mine`."""
    devices = _devices.get()
    if devices == 1:
        return tree
    share, start = _shares(count, devices)
    tree = jax.tree.map(lambda leaf: lax.all_gather(leaf, NODES, tiled=True), tree)
    if count == share * devices:
        return tree
    _, first = np.unique((start[:, None] + np.arange(share)).ravel(), return_index=True)
    return jax.tree.map(lambda leaf: leaf[first], tree)


def _shares(count: int, devices: int) -> tuple[int, np.ndarray]:
    """(rows per device, the first row of every device)."""
    share = -(-count // devices)
    return share, np.minimum(np.arange(devices) * share, count - share)


def split(f: Callable, *stacked):
    """f(*stacked), every device computing some of the rows; f must treat rows independently of each other."""
    return whole(f(*mine(stacked)), len(jax.tree.leaves(stacked)[0]))


def split_sum(part: Callable, count: int, first):
    """first + part(0) + ... + part(count - 1), in this order; every device computes some of the parts."""
    if _devices.get() == 1 or not count:
        return lax.fori_loop(0, count, lambda k, total: jax.tree.map(jnp.add, total, part(k)), first)
    parts = split(lambda which: lax.map(part, which), jnp.arange(count))
    return lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, part), None), first, parts)[0]


def deal(f: Callable, *stacked):
    """`split` with the rows dealt out in turn, so that padding at their end is shared by all devices."""
    devices = _devices.get()
    if devices == 1:
        return f(*stacked)
    count = len(jax.tree.leaves(stacked)[0])
    order = np.argsort(np.arange(count) % devices, kind="stable")
    found = split(f, *jax.tree.map(lambda leaf: leaf[order], stacked))
    return jax.tree.map(lambda leaf: leaf[np.argsort(order)], found)


def each(f, *stacked):
    """Map f over the leading axis, which is split over the devices.

    One at a time on the CPU, elsewhere in batches that fit into MEMORY.
    """
    return split(functools.partial(in_turn, f), *stacked)


def in_turn(f, *stacked):
    """Map f over the leading axis, on one device."""

    def one_by_one(*stacked):
        return lax.map(lambda one: f(*one), stacked)

    def side_by_side(*stacked):
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
        width = max(1, MEMORY // footprint(jax.make_jaxpr(f)(*one)))
        return lax.map(lambda one: f(*one), stacked, batch_size=width)

    return lax.platform_dependent(*stacked, cpu=one_by_one, default=side_by_side)


def footprint(jaxpr: ClosedJaxpr) -> int:
    """Bytes of a program's arguments and of the arrays it must materialise: products, patches, images.

    Elementwise operations are assumed to be fused, and no array is assumed to be freed.
    """

    def size(avals):
        return sum(aval.size * aval.dtype.itemsize for aval in avals)

    total = size(jaxpr.in_avals)
    for equation in jaxpr.eqns:
        if equation.primitive.name in UNFUSED:
            total += size(v.aval for v in equation.outvars)
        inner = [p for p in jax.tree.leaves(equation.params) if isinstance(p, ClosedJaxpr)]
        total += max(map(footprint, inner), default=0)
    return total
