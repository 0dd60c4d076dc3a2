"""Convolutions and pools of one model that are fast when mapped over stacked models.

A vmapped convolution over stacked weights is a grouped convolution, which is slow on the CPU and in its
CUDA backward pass; autodiff's gradients of convolutions and pools are slower still. Both are therefore
written out here with their gradients, once for the CPU and once for accelerators. On the CPU images are
stored batch last, [H, W, C, b]: the receptive field of an output pixel is a matrix [k k C, b] with
contiguous rows, a convolution is a loop of matrix products over pixels, and pools are vectorised over the
batch. On accelerators a convolution is one matrix product over all patches, batched over models.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def conv(x: Array, w: Array, bias: Array, pad: int) -> Array:
    """Convolution of one model: [b, H, W, C], [k, k, C, O], [O] -> [b, H + 2 pad - k + 1, ..., O]."""

    def cpu(x, w, bias):
        return _batch_first(_pixels(_padded(_batch_last(x), pad), w, bias))

    def accelerator(x, w, bias):
        return _patches(x, len(w), pad) @ w.reshape(-1, w.shape[-1]) + bias[None, None, None, :]

    return lax.platform_dependent(x, w, bias, cpu=cpu, default=accelerator)


def _conv_forward(x, w, bias, pad):
    return conv(x, w, bias, pad), (x, w)


def _conv_backward(pad, saved, g):
    x, w = saved

    def dx_cpu(x, w, g):
        side = [length + 2 * pad for length in x.shape[1:3]]
        return _batch_first(_cropped(_pixels_dx(_batch_last(g), w, side), pad))

    def dx_accelerator(x, w, g):
        k, _, c, o = w.shape
        parts = (g @ w.reshape(-1, o).T).reshape(*g.shape[:3], k, k, c)
        edges = [(i, k - 1 - i) for i in range(k)]
        padded = sum(
            jnp.pad(parts[:, :, :, i, j], ((0, 0), edges[i], edges[j], (0, 0)))
            for i in range(k)
            for j in range(k)
        )
        return jax.vmap(lambda image: _cropped(image, pad))(padded)

    def dw_cpu(x, w, g):
        return _pixels_dw(_padded(_batch_last(x), pad), _batch_last(g), len(w))

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


def _batch_last(x: Array) -> Array:
    """[b, H, W, C] -> [H, W, C, b]."""
    return _in_order(x.transpose(1, 2, 3, 0))


def _batch_first(x: Array) -> Array:
    """[H, W, C, b] -> [b, H, W, C]."""
    return _in_order(x).transpose(3, 0, 1, 2)


def _in_order(x: Array) -> Array:
    """x with row-major layout; otherwise XLA may choose another layout and access memory with strides."""
    return with_layout_constraint(jnp.asarray(x), Layout(tuple(range(x.ndim))))


def _padded(x: Array, pad: int) -> Array:
    return jnp.pad(x, ((pad, pad), (pad, pad), *((0, 0),) * (x.ndim - 2)))


def _cropped(x: Array, pad: int) -> Array:
    return x[pad : x.shape[0] - pad, pad : x.shape[1] - pad]


def _positions(height: int, width: int) -> Array:
    """[height width, 4] start index of each pixel in an array [height, width, ., .], row by row."""
    row, column = jnp.divmod(jnp.arange(height * width), width)
    return jnp.stack([row, column, jnp.zeros_like(row), jnp.zeros_like(row)], axis=1)


def _window(x: Array, at: Array, k: int) -> Array:
    """[H, W, C, b] -> [k k C, b]: the k x k window that starts at `at`."""
    return lax.dynamic_slice(x, at, (k, k, *x.shape[2:])).reshape(-1, x.shape[3])


def _pixels(x: Array, w: Array, bias: Array) -> Array:
    """Convolution, batch last: [H, W, C, b], [k, k, C, O], [O] -> [H', W', O, b]."""
    k, o = len(w), w.shape[3]
    height, width = (side - k + 1 for side in x.shape[:2])
    kernel = w.reshape(-1, o).T
    y = lax.map(lambda at: kernel @ _window(x, at, k) + bias[:, None], _positions(height, width))
    return y.reshape(height, width, o, x.shape[3])


def _pixels_dx(g: Array, w: Array, side: list[int]) -> Array:
    """[H', W', O, b], [k, k, C, O] -> [H, W, C, b]: each output pixel adds to its window."""
    k, _, c, o = w.shape
    kernel = w.reshape(-1, o)

    def add(dx, at):
        seen = (kernel @ _window(g, at, 1)).reshape(k, k, c, -1)
        return lax.dynamic_update_slice(dx, lax.dynamic_slice(dx, at, seen.shape) + seen, at), None

    return lax.scan(add, jnp.zeros((*side, c, g.shape[3]), g.dtype), _positions(*g.shape[:2]))[0]


def _pixels_dw(x: Array, g: Array, k: int) -> tuple[Array, Array]:
    """[H, W, C, b], [H', W', O, b] -> [k, k, C, O], [O]: sums over output pixels."""
    c, o = x.shape[2], g.shape[2]

    def add(total, at):
        dw, dbias = total
        here = _window(g, at, 1)
        return (dw + _window(x, at, k) @ here.T, dbias + here.sum(axis=1)), None

    zero = (jnp.zeros((k * k * c, o), g.dtype), jnp.zeros(o, g.dtype))
    (dw, dbias), _ = lax.scan(add, zero, _positions(*g.shape[:2]))
    return dw.reshape(k, k, c, o), dbias


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def max_pool(x: Array, window: int, stride: int) -> Array:
    """[b, H, W, C] -> maxima of square windows, no padding; in a tie the first gets the gradient."""

    def pool(x):
        return functools.reduce(jnp.maximum, _views(x, window, stride))

    return _over_images(pool, x)


def _over_images(f, *arrays):
    """Apply f, defined on [H, W, ...], to arrays [b, H, W, C]: batch last on the CPU, vmapped elsewhere."""

    def cpu(*arrays):
        return jax.tree.map(_batch_first, f(*map(_batch_last, arrays)))

    return lax.platform_dependent(*arrays, cpu=cpu, default=jax.vmap(f))


def _views(x: Array, window: int, stride: int) -> list[Array]:
    """Strided views of [H, W, ...], one per offset within the window, row by row."""
    rows, columns = ((side - window) // stride + 1 for side in x.shape[:2])
    return [
        x[i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (columns - 1) + 1 : stride]
        for i in range(window)
        for j in range(window)
    ]


def _pool_forward(x, window, stride):
    def pool(x):
        views = _views(x, window, stride)
        best, where = views[0], jnp.zeros(views[0].shape, jnp.int32)  # same width as x, for SIMD
        for index, view in enumerate(views[1:], 1):
            where = jnp.where(view > best, index, where)
            best = jnp.maximum(best, view)
        return best, where

    best, where = _over_images(pool, x)
    return best, (where, x.shape[1:3])


def _pool_backward(window, stride, saved, g):
    where, (height, width) = saved
    before = (window - 1) // stride
    rows, columns = -(-height // stride), -(-width // stride)

    def spread(where, g):
        # Input (stride a + p, stride b + q) is entry (a, b) of phase (p, q). It is covered by windows
        # that start up to `before` strides earlier.
        edges = ((before, rows - g.shape[0]), (before, columns - g.shape[1]), *((0, 0),) * (g.ndim - 2))
        where, g = jnp.pad(where, edges, constant_values=-1), jnp.pad(g, edges)

        def phase(p, q):
            total = jnp.zeros((rows, columns, *g.shape[2:]), g.dtype)
            for i in range(p, window, stride):
                for j in range(q, window, stride):
                    up, left = before - i // stride, before - j // stride
                    here = (slice(up, up + rows), slice(left, left + columns))
                    total += jnp.where(where[here] == i * window + j, g[here], 0)
            return total

        lines = [jnp.stack([phase(p, q) for q in range(stride)], axis=2) for p in range(stride)]
        full = jnp.stack(lines, axis=1).reshape(rows * stride, columns * stride, *g.shape[2:])
        return full[:height, :width]

    return (_over_images(spread, where, g),)


max_pool.defvjp(_pool_forward, _pool_backward)
