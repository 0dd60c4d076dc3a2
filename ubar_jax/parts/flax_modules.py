"""The flax modules of the built-in models; imported with the first model because flax is slow to import."""

import flax.linen as nn
from jax import Array

from ubar_jax.numerics.convolution import conv, max_pool


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
        return conv(x, kernel, bias, self.pad)


class Dense(nn.Module):
    """`flax.linen.Dense` whose bias is added by an explicit broadcast."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = nn.Dense(self.features, use_bias=False, name="linear")(x)
        return y + self.param("bias", nn.initializers.zeros, (self.features,))[None, :]


class Head(nn.Module):
    """Flatten, then dense layers with ReLU between them."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for width in self.widths[:-1]:
            x = nn.relu(Dense(width)(x))
        return Dense(self.widths[-1])(x)


class LeNet(nn.Module):
    """conv 5x5x6 pad 2, pool 2, conv 5x5x16, pool 2, dense 120, 84."""

    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(max_pool(Conv(6, 5, pad=2)(x), 2, 2))
        x = nn.relu(max_pool(Conv(16, 5)(x), 2, 2))
        return Head((120, 84, self.classes))(x)


class CNN(nn.Module):
    """conv 3x3x16 pad 1, pool 3/2, conv 4x4x64 pad 1, pool 4/2, dense 384, 192."""

    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(max_pool(Conv(16, 3, pad=1)(x), 3, 2))
        x = nn.relu(max_pool(Conv(64, 4, pad=1)(x), 4, 2))
        return Head((384, 192, self.classes))(x)
