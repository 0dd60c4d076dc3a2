"""Convolutions and pools of one model that are fast when mapped over stacked models.

A vmapped convolution over stacked weights is a grouped convolution, which is slow on the CPU and in its
CUDA backward pass; autodiff's gradients of convolutions and pools are slower still. Both are therefore
written out here with their gradients, once for the CPU and once for accelerators. On the CPU images are
stored batch last, so that pools are vectorised over the batch and a convolution is a loop of matrix
products: over output pixels, or over rows of them if a batch is small. On accelerators a convolution is one
matrix product over all patches, batched over models.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

SMALL = 64  # most images in a batch that goes by rows: one pixel of so few is too little work for a step


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def conv(x: Array, w: Array, bias: Array, pad: int) -> Array:
    """Convolution of one model: [b, H, W, C], [k, k, C, O], [O] -> [b, H + 2 pad - k + 1, ..., O]."""

    def cpu(x, w, bias):
        value = _rows if _small(x) else _pixels
        return _batch_first(value(_batch_last(x), w, bias, pad))

    def accelerator(x, w, bias):
        return _patches(x, len(w), pad) @ w.reshape(-1, w.shape[-1]) + bias[None, None, None, :]

    return lax.platform_dependent(x, w, bias, cpu=cpu, default=accelerator)


def _conv_forward(x, w, bias, pad):
    return conv(x, w, bias, pad), (x, w)


def _conv_backward(pad, saved, g):
    x, w = saved

    def dx_cpu(x, w, g):
        dx = _rows_dx if _small(x) else _pixels_dx
        return _batch_first(dx(_batch_last(g), w, x.shape[1:3], pad))

    def dx_accelerator(x, w, g):
        k, _, c, o = w.shape
        parts = (g @ w.reshape(-1, o).T).reshape(*g.shape[:3], k, k, c)
        edges = [(i, k - 1 - i) for i in range(k)]
        padded = [
            jnp.pad(parts[:, :, :, i, j], ((0, 0), edges[i], edges[j], (0, 0)))
            for i in range(k)
            for j in range(k)
        ]
        return _cropped(functools.reduce(jnp.add, padded), (1, 2), pad)

    def dw_cpu(x, w, g):
        dw = _rows_dw if _small(x) else _pixels_dw
        return dw(_batch_last(x), _batch_last(g), len(w), pad)

    def dw_accelerator(x, w, g):
        patches = _patches(x, len(w), pad)
        return jnp.tensordot(patches, g, axes=((0, 1, 2), (0, 1, 2))).reshape(w.shape), g.sum((0, 1, 2))

    # Two calls, so that XLA can drop the gradient of the input images, which is not needed.
    return (
        lax.platform_dependent(x, w, g, cpu=dx_cpu, default=dx_accelerator),
        *lax.platform_dependent(x, w, g, cpu=dw_cpu, default=dw_accelerator),
    )


conv.defvjp(_conv_forward, _conv_backward)


def _patches(x: Array, k: int, pad: int) -> Array:
    """[b, H, W, C] -> [b, H', W', k k C]: the receptive field of each output pixel, row by row."""
    x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = (side - k + 1 for side in x.shape[1:3])
    shifted = [x[:, i : i + height, j : j + width] for i in range(k) for j in range(k)]
    return jnp.concatenate(shifted, axis=-1)


def _small(x: Array) -> bool:
    """Whether the CPU stores images [b, H, W, C] for loops over rows."""
    return len(x) <= SMALL


def _batch_last(x: Array) -> Array:
    """[b, H, W, C] -> [H, W, C, b] for loops over pixels, [H, C, W, b] for loops over rows."""
    return _in_order(x.transpose(1, 3, 2, 0) if _small(x) else x.transpose(1, 2, 3, 0))


def _batch_first(x: Array) -> Array:
    """Undoes `_batch_last`."""
    x = _in_order(x).transpose(3, 0, 1, 2)
    return x.swapaxes(2, 3) if _small(x) else x


def _in_order(x: Array) -> Array:
    """x with row-major layout; otherwise XLA may choose another layout and access memory with strides."""
    return with_layout_constraint(jnp.asarray(x), Layout(tuple(range(x.ndim))))


def _cropped(x: Array, axes: tuple[int, int], pad: int) -> Array:
    return _part(x, axes, (pad, pad), [x.shape[axis] - 2 * pad for axis in axes])


def _part(x: Array, axes: tuple[int, int], starts, sizes, stride: int = 1) -> Array:
    """`sizes` pixels from `starts`, every `stride`-th; `axes` are those of height and width."""
    for axis, start, size in zip(axes, starts, sizes, strict=True):
        x = lax.slice_in_dim(x, start, start + stride * (size - 1) + 1, stride, axis)
    return x


def _padded(x: Array, pad: int) -> Array:
    return jnp.pad(x, ((pad, pad), (pad, pad), *((0, 0),) * (x.ndim - 2)))


def _positions(height: int, width: int) -> Array:
    """[height width, 4] start index of each pixel in an array [height, width, ., .], row by row."""
    row, column = jnp.divmod(jnp.arange(height * width), width)
    return jnp.stack([row, column, jnp.zeros_like(row), jnp.zeros_like(row)], axis=1)


def _window(x: Array, at: Array, k: int) -> Array:
    """[H, W, C, b] -> [k k C, b]: the k x k window that starts at `at`."""
    return lax.dynamic_slice(x, at, (k, k, *x.shape[2:])).reshape(-1, x.shape[3])


def _pixels(x: Array, w: Array, bias: Array, pad: int) -> Array:
    """Convolution by pixels: [H, W, C, b], [k, k, C, O], [O] -> [H', W', O, b]."""
    x, k, o = _padded(x, pad), len(w), w.shape[3]
    height, width = (side - k + 1 for side in x.shape[:2])
    kernel = w.reshape(-1, o).T
    y = lax.map(lambda at: kernel @ _window(x, at, k) + bias[:, None], _positions(height, width))
    return y.reshape(height, width, o, x.shape[3])


def _pixels_dx(g: Array, w: Array, side: tuple[int, ...], pad: int) -> Array:
    """[H', W', O, b], [k, k, C, O] -> [H, W, C, b]: each output pixel adds to its window."""
    k, _, c, o = w.shape
    kernel = w.reshape(-1, o)

    def add(dx, at):
        seen = (kernel @ _window(g, at, 1)).reshape(k, k, c, -1)
        return lax.dynamic_update_slice(dx, lax.dynamic_slice(dx, at, seen.shape) + seen, at), None

    zero = jnp.zeros((*(length + 2 * pad for length in side), c, g.shape[3]), g.dtype)
    return _cropped(lax.scan(add, zero, _positions(*g.shape[:2]))[0], (0, 1), pad)


def _pixels_dw(x: Array, g: Array, k: int, pad: int) -> tuple[Array, Array]:
    """[H, W, C, b], [H', W', O, b] -> [k, k, C, O], [O]: sums over output pixels.

    The bias is summed over the batch at the end: XLA adds up along rows one value at a time.
    """
    x, c, o = _padded(x, pad), x.shape[2], g.shape[2]

    def add(total, at):
        dw, dbias = total
        here = _window(g, at, 1)
        return (dw + _window(x, at, k) @ here.T, dbias + here), None

    zero = (jnp.zeros((k * k * c, o), g.dtype), jnp.zeros((o, g.shape[3]), g.dtype))
    (dw, dbias), _ = lax.scan(add, zero, _positions(*g.shape[:2]))
    return dw.reshape(k, k, c, o), dbias.sum(axis=1)


def _shifted(x: Array, k: int, pad: int) -> Array:
    """[H, C, W, b] -> [H + 2 pad, C, k, W', b]: the padded images, shifted by 0 to k - 1 pixels to the left.

    The receptive fields of a row of output pixels are k rows of it, which lie side by side in memory.
    """
    zero, rows, none = jnp.zeros((), x.dtype), (pad, pad, 0), (0, 0, 0)
    edges = [(pad - j, pad - (k - 1 - j), 0) for j in range(k)]  # negative: cropped
    return jnp.stack([lax.pad(x, zero, (rows, none, edge, none)) for edge in edges], axis=2)


def _fields(shifted: Array, row: Array, k: int) -> Array:
    """[k C k, W' b]: the receptive fields of a row of output pixels."""
    return lax.dynamic_slice_in_dim(shifted, row, k).reshape(-1, shifted.shape[3] * shifted.shape[4])


def _kernel(w: Array) -> Array:
    """[k, k, C, O] -> [k C k, O], the order of `_fields`."""
    return w.swapaxes(1, 2).reshape(-1, w.shape[3])


def _rows(x: Array, w: Array, bias: Array, pad: int) -> Array:
    """Convolution by rows: [H, C, W, b], [k, k, C, O], [O] -> [H', O, W', b]."""
    k, kernel, shifted = len(w), _kernel(w).T, _shifted(x, len(w), pad)
    rows = jnp.arange(len(shifted) - k + 1)
    y = lax.map(lambda row: kernel @ _fields(shifted, row, k) + bias[:, None], rows)
    return y.reshape(len(rows), len(kernel), *shifted.shape[3:])


def _rows_dx(g: Array, w: Array, side: tuple[int, ...], pad: int) -> Array:
    """[H', O, W', b], [k, k, C, O] -> [H, C, W, b]: each row adds to its receptive fields."""
    k, _, c, o = w.shape
    kernel, (height, width) = _kernel(w), (length + 2 * pad for length in side)

    def add(dx, here):
        row, g = here
        seen = (kernel @ g.reshape(o, -1)).reshape(k, c, k, *g.shape[1:])
        shifts = [((0, 0), (0, 0), (j, k - 1 - j), (0, 0)) for j in range(k)]
        seen = functools.reduce(jnp.add, (jnp.pad(seen[:, :, j], shifts[j]) for j in range(k)))
        return lax.dynamic_update_slice_in_dim(dx, lax.dynamic_slice_in_dim(dx, row, k) + seen, row, 0), None

    zero = jnp.zeros((height, c, width, g.shape[3]), g.dtype)
    return _cropped(lax.scan(add, zero, (jnp.arange(len(g)), g))[0], (0, 2), pad)


def _rows_dw(x: Array, g: Array, k: int, pad: int) -> tuple[Array, Array]:
    """[H, C, W, b], [H', O, W', b] -> [k, k, C, O], [O]: sums over rows of output pixels."""
    shifted, c, o = _shifted(x, k, pad), x.shape[1], g.shape[1]

    def add(total, here):
        (dw, dbias), (row, g) = total, here
        g = g.reshape(o, -1)
        return (dw + _fields(shifted, row, k) @ g.T, dbias + g), None

    zero = (jnp.zeros((k * c * k, o), g.dtype), jnp.zeros((o, g.shape[2] * g.shape[3]), g.dtype))
    (dw, dbias), _ = lax.scan(add, zero, (jnp.arange(len(g)), g))
    return dw.reshape(k, c, k, o).swapaxes(1, 2), dbias.sum(axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def max_pool(x: Array, window: int, stride: int) -> Array:
    """[b, H, W, C] -> maxima of square windows, no padding; in a tie the first gets the gradient."""

    def pool(axes, x):
        return functools.reduce(jnp.maximum, _views(x, window, stride, axes))

    return _over_images(pool, x)


def _over_images(f, *arrays):
    """f(axes, *arrays), the arrays [b, H, W, C] as they are stored, and the axes of H and W in them."""

    def cpu(*arrays):
        axes = (0, 2) if _small(arrays[0]) else (0, 1)
        return jax.tree.map(_batch_first, f(axes, *map(_batch_last, arrays)))

    return lax.platform_dependent(*arrays, cpu=cpu, default=functools.partial(f, (1, 2)))


def _views(x: Array, window: int, stride: int, axes: tuple[int, int]) -> list[Array]:
    """Strided views of the images, one per offset within the window, row by row."""
    sizes = [(x.shape[axis] - window) // stride + 1 for axis in axes]
    return [_part(x, axes, (i, j), sizes, stride) for i in range(window) for j in range(window)]


def _pool_forward(x, window, stride):
    def pool(axes, x):
        views = _views(x, window, stride, axes)
        best, where = views[0], jnp.zeros(views[0].shape, jnp.int32)  # same width as x, for SIMD
        for index, view in enumerate(views[1:], 1):
            where = jnp.where(view > best, index, where)
            best = jnp.where(view > best, view, best)  # faster than maxima, which propagate NaN
        return functools.reduce(jnp.maximum, views), where

    best, where = _over_images(pool, x)
    return best, (where, x.shape[1:3])


def _pool_backward(window, stride, saved, g):
    where, (height, width) = saved
    before = (window - 1) // stride
    sizes = rows, columns = -(-height // stride), -(-width // stride)

    def spread(axes, where, g):
        # Input (stride a + p, stride b + q) lies at (a, p, b, q). Each window that covers it starts at most
        # `before` strides earlier.
        edges = [(0, 0)] * g.ndim
        for axis, size in zip(axes, sizes, strict=True):
            edges[axis] = (before, size - g.shape[axis])
        where, g = jnp.pad(where, edges, constant_values=-1), jnp.pad(g, edges)
        phases = [axis + place for place, axis in enumerate(axes, 1)]  # axes p and q
        total, offset = jnp.zeros((), g.dtype), np.arange(stride)
        for i, j in itertools.product(range(before + 1), repeat=2):
            starts = (before - i, before - j)
            row, column = offset[:, None] + stride * i, offset[None, :] + stride * j
            index = np.where((row < window) & (column < window), row * window + column, -2)
            index = np.expand_dims(index, [axis for axis in range(g.ndim + 2) if axis not in phases])
            here, there = (jnp.expand_dims(_part(part, axes, starts, sizes), phases) for part in (where, g))
            total += jnp.where(here == index, there, 0)
        shape = list(g.shape)
        shape[axes[0]], shape[axes[1]] = rows * stride, columns * stride
        return _part(total.reshape(shape), axes, (0, 0), (height, width))

    return (_over_images(spread, where, g),)


max_pool.defvjp(_pool_forward, _pool_backward)
