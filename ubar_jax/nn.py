"""Work over stacked models: how nodes are laid out, and convolutions and pools made for it.

A vmapped convolution over stacked weights is a grouped convolution, slow on CPU and in its CUDA
backward pass. So on the CPU models run one at a time inside `lax.map` with gradients written by hand
(autodiff's are up to 30 times slower there), and elsewhere in batched matrix products. One
`custom_vjp`, the choice in `_conv` alone.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

GPU_WIDTH = 16  # models side by side on an accelerator


def each(f, *stacked):
    """f over the leading axis of `stacked`: one at a time on the CPU, side by side elsewhere."""
    width = None if jax.default_backend() == "cpu" else GPU_WIDTH
    return lax.map(lambda one: f(*one), stacked, batch_size=width)


def _conv(x: Array, w: Array, pad: tuple[int, int]) -> Array:
    """[b, H, W, C] * [k, k, C, O], stride 1, rows and columns padded by `pad` before and after."""
    if jax.default_backend() == "cpu":
        return lax.conv_general_dilated(x, w, (1, 1), (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    patches = jnp.concatenate(list(_shifts(x, w.shape[:2], pad)), axis=-1)
    return patches @ w.reshape(-1, w.shape[-1])


def _shifts(x: Array, window: tuple[int, int], pad: tuple[int, int]):
    """The input as every offset of the window sees it, row by row."""
    x = jnp.pad(x, ((0, 0), pad, pad, (0, 0)))
    height, width = x.shape[1] - window[0] + 1, x.shape[2] - window[1] + 1
    for i in range(window[0]):
        for j in range(window[1]):
            yield x[:, i : i + height, j : j + width]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv(x: Array, w: Array, pad: int) -> Array:
    """Convolution of one model: [b, H, W, C], [k, k, C, O] -> [b, H + 2 pad - k + 1, ..., O]."""
    return _conv(x, w, (pad, pad))


def _conv_forward(x, w, pad):
    return conv(x, w, pad), (x, w)


def _conv_backward(pad, saved, g):
    x, w = saved
    k, _, c, o = w.shape
    flipped = w[::-1, ::-1].swapaxes(2, 3)
    # The gradient of the input is cropped by what padding added, hence k - 1 - pad on either side.
    dx = _conv(g, flipped, (k - 1 - pad, k - 1 - pad))
    flat = g.reshape(-1, o)
    dw = jnp.stack([s.reshape(-1, c).T @ flat for s in _shifts(x, (k, k), (pad, pad))])
    return dx, dw.reshape(w.shape)


conv.defvjp(_conv_forward, _conv_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def max_pool(x: Array, window: int, stride: int) -> Array:
    """[b, H, W, C] -> maxima of square windows, no padding; ties send their gradient to the first."""
    return functools.reduce(jnp.maximum, _windows(x, window, stride))


def _windows(x: Array, window: int, stride: int) -> list[Array]:
    rows, cols = ((side - window) // stride + 1 for side in x.shape[1:3])
    return [
        x[:, i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (cols - 1) + 1 : stride]
        for i in range(window)
        for j in range(window)
    ]


def _pool_forward(x, window, stride):
    views = _windows(x, window, stride)
    best, where = views[0], jnp.zeros(views[0].shape, jnp.uint8)
    for index, view in enumerate(views[1:], 1):
        where = jnp.where(view > best, jnp.uint8(index), where)
        best = jnp.maximum(best, view)
    return best, (where, x.shape)


def _pool_backward(window, stride, saved, g):
    where, (b, height, width, c) = saved
    rows, cols = -(-height // stride), -(-width // stride)
    # Input (stride a + p, stride b + q) is phase (p, q) at (a, b): sum each phase's shifted masks.
    phases = [[jnp.zeros((b, rows, cols, c), g.dtype)] * stride for _ in range(stride)]
    for i in range(window):
        for j in range(window):
            up, left = i // stride, j // stride
            part = jnp.where(where == i * window + j, g, 0)
            edge = ((0, 0), (up, rows - up - g.shape[1]), (left, cols - left - g.shape[2]), (0, 0))
            phases[i % stride][j % stride] += lax.pad(
                part, jnp.zeros((), g.dtype), [(lo, hi, 0) for lo, hi in edge]
            )
    full = jnp.stack([jnp.stack(line, axis=3) for line in phases], axis=2)
    return (full.reshape(b, rows * stride, cols * stride, c)[:, :height, :width],)


max_pool.defvjp(_pool_forward, _pool_backward)


class Conv(nn.Module):
    """`flax.linen.Conv` for stacked weights: stride 1, square window, symmetric padding."""

    features: int
    window: int
    pad: int = 0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (self.window, self.window, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return conv(x, kernel, self.pad) + bias[None, None, None, :]
