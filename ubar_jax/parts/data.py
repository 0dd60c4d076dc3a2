"""Data sets as uint8 arrays, and their split over the nodes.

`digits` comes with scikit-learn and `synthetic` is generated. Every other name is read from a prepared tfds
folder, which `download` fills if the set is missing, and then cached as plain arrays in the user's cache
folder (tfds takes about 0.3 ms per image).
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from ubar_jax.files import atomic_write, cache_dir
from ubar_jax.memory import check_fits, host_memory
from ubar_jax.parts import download
from ubar_jax.registry import ConfigError, NoTraits, Number, Registry, listed, nearest

datasets = Registry("dataset", given=0, traits=NoTraits)
shardings = Registry("sharding", given=3, traits=NoTraits)


class Dataset(NamedTuple):
    """A labelled image set on the host."""

    train_x: np.ndarray  # [N, H, W, C] uint8
    train_y: np.ndarray  # [N] int32
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int


@datasets.register
def digits() -> Dataset:
    """1,797 real handwritten digits of 8x8 pixels, bundled with scikit-learn; 1,437 for training."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.images * (255 / 16)).round().astype(np.uint8)[..., None]
    y = bunch.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[360:], order[:360]
    return Dataset(x[train], y[train], x[test], y[test], 10)


@datasets.register
def synthetic(
    examples: Annotated[int, Number(20, integer=True)] = 2000,
    size: Annotated[int, Number(1, integer=True)] = 8,
    classes: Annotated[int, Number(2, integer=True)] = 10,
    noise: Annotated[float, Number(0)] = 64.0,
) -> Dataset:
    """One random image per class plus Gaussian noise, for tests; the test set has examples / 5 more."""
    values = size * size * (25 * (examples + examples // 5) + 8 * classes)  # bytes: 3 float64 + 1 uint8
    advice = "take fewer or smaller images"
    check_fits(f"synthetic(examples={examples}, size={size})", {"images": values}, host_memory(), advice)
    rng = np.random.default_rng(0)
    centres = rng.uniform(64, 192, (classes, size, size, 1))
    y = rng.integers(0, classes, examples + examples // 5).astype(np.int32)
    x = np.clip(centres[y] + rng.normal(0, noise, (len(y), size, size, 1)), 0, 255)
    x = x.astype(np.uint8)
    return Dataset(x[:examples], y[:examples], x[examples:], y[examples:], classes)


def mnist() -> Dataset:
    """Handwritten digits, 28x28: 60,000 training and 10,000 test images (from tfds)."""
    return from_tfds("mnist")


def fashion_mnist() -> Dataset:
    """Clothes, 28x28: 60,000 training and 10,000 test images (from tfds)."""
    return from_tfds("fashion_mnist")


def cifar10() -> Dataset:
    """Photographs of ten classes, 32x32x3: 50,000 training and 10,000 test images (from tfds)."""
    return from_tfds("cifar10")


_BY_TFDS = (mnist, fashion_mnist, cifar10)
for _function in _BY_TFDS:
    datasets.register(_function)


def load(spec: str) -> Dataset:
    """A registered data set, or any tfds image-classification set by its name; the last four are cached."""
    return _load(_source(spec), spec)[0]


def statistics(spec: str) -> tuple[np.ndarray, np.ndarray]:
    """`channel_statistics` of the training images of a data set."""
    return _load(_source(spec), spec)[1]


def _source(spec: str):
    return from_tfds if is_tfds(spec) else datasets.parse(spec)


@functools.lru_cache(maxsize=4)
def _load(source, spec: str) -> tuple[Dataset, tuple[np.ndarray, np.ndarray]]:
    dataset = source(spec) if source is from_tfds else source()
    return dataset, channel_statistics(dataset.train_x)


def channel_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([C], [C]) mean and standard deviation per channel of images [N, H, W, C], for `round.normalise`.

    Computed from counts of the 256 values: exact and much faster than summing floats.
    """
    counts = np.stack([np.bincount(x[..., c].ravel(), minlength=256) for c in range(x.shape[-1])])
    values = np.arange(256)
    mean = counts @ values / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    return mean.astype(np.float32), np.maximum(np.sqrt(variance), 1e-3).astype(np.float32)


def check(spec: str) -> str:
    """The canonical form of a data set's spec; does not check that the data exist (`load` does)."""
    return spec if is_tfds(spec) else str(datasets.parse(spec))


def is_tfds(spec: str) -> bool:
    """Whether the spec is not a registered data set but may be the name of a tfds set."""
    return spec not in datasets.parts and bool(re.fullmatch(r"[a-z][\w-]*(/[\w.-]+)?", spec))


def data_dir() -> Path:
    """The folder in which prepared tfds sets are expected."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def from_tfds(name: str) -> Dataset:
    """Read a tfds set, without TensorFlow, from the cache if possible; a missing one is prepared first."""
    if not download.prepared(name, data_dir()) and (why_not := download.prepare(name, data_dir())):
        raise ConfigError(
            f"dataset {name!r} was not found: looked in {data_dir().absolute()} for a prepared tfds "
            f"set{nearest(name, datasets.parts)}. {why_not} Either set TFDS_DATA_DIR to a folder that "
            f"contains it, or prepare it once with\n"
            f"    pip install 'ubar_jax[prepare]' && tfds build {name} --file_format=array_record\n"
            f"Available without a download: {listed(set(datasets.parts) - {f.__name__ for f in _BY_TFDS})}"
        )
    info = download.prepared(name, data_dir())[-1]
    stamp = f"{info.absolute()} {info.stat().st_mtime_ns}"
    digest = hashlib.sha256(stamp.encode()).hexdigest()[:12]
    kept = cache_dir() / "data" / f"{name.replace('/', '-')}-{info.parent.name}-{digest}.npz"
    if kept.exists():
        with np.load(kept) as arrays:
            return Dataset(**{k: arrays[k] for k in Dataset._fields[:4]}, classes=int(arrays["classes"]))
    if not any(info.parent.glob("*array_record*")):
        found = json.loads(info.read_text()).get("fileFormat", "tfrecord")
        raise ConfigError(
            f"dataset {name!r} is prepared in {info.parent.absolute()} as {found}, which can be read only "
            "with TensorFlow; it must be array_record. Remove that folder and run the same command, or set "
            "TFDS_DATA_DIR to another folder: the set is then prepared anew"
        )
    dataset = _read_tfds(name)
    with contextlib.suppress(OSError):  # without a cache the next read only takes longer
        atomic_write(kept, lambda f: np.savez(f, **dataset._asdict()))
    return dataset


def _read_tfds(name: str) -> Dataset:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=str(data_dir()))
        features, splits = builder.info.features, builder.info.splits
        held_out = next((s for s in ("test", "validation") if s in splits), None)
        if held_out is None or not {"image", "label"} <= set(features):
            raise ConfigError(
                f"dataset {name!r} is not an image-classification set with a train and a test "
                f"split: it has {listed(features)} and the splits {listed(splits)}"
            )
        parts: list[np.ndarray] = []
        for split in ("train", held_out):
            source = builder.as_data_source(split=split)
            records = [source[i] for i in range(len(source))]
            parts += [
                np.stack([r["image"] for r in records]).astype(np.uint8),
                np.array([r["label"] for r in records], np.int32),
            ]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"dataset {name!r} in {data_dir().absolute()} cannot be read ({error}); it must be in "
            f"array_record format with images of one size: tfds build {name} "
            "--file_format=array_record"
        ) from error
    train_x, train_y, test_x, test_y = parts
    return Dataset(train_x, train_y, test_x, test_y, classes=features["label"].num_classes)


@shardings.register
def iid(rng: np.random.Generator, y: np.ndarray, n: int) -> np.ndarray:
    """Equal random shares (the paper)."""
    return rng.permutation(len(y))[: len(y) // n * n].reshape(n, -1)


@shardings.register
def dirichlet(
    rng: np.random.Generator, y: np.ndarray, n: int, a: Annotated[float, Number(0, open_low=True)] = 0.5
) -> np.ndarray:
    """Equal shares whose class mix is drawn from Dirichlet(a); the smaller a, the more skewed."""
    share = len(y) // n
    pools = [list(rng.permutation(np.flatnonzero(y == c))) for c in np.unique(y)]
    shards = np.empty((n, share), int)
    for i in range(n):
        mix = np.maximum(rng.dirichlet(np.full(len(pools), a)), 1e-12)
        wanted = share
        while wanted:  # examples missing in an exhausted class are drawn from the others
            left = np.array([len(p) for p in pools])
            p = mix * (left > 0)
            drawn = np.minimum(rng.multinomial(wanted, p / p.sum()), left)
            for pool, count in zip(pools, drawn, strict=True):
                for _ in range(count):
                    shards[i, share - wanted] = pool.pop()
                    wanted -= 1
    return shards


@shardings.register
def by_label(
    rng: np.random.Generator, y: np.ndarray, n: int, pieces: Annotated[int, Number(1, integer=True)] = 2
) -> np.ndarray:
    """Examples sorted by label and cut into equal pieces; each node gets `pieces` random ones."""
    if not (size := len(y) // (n * pieces)):
        raise ConfigError(
            f"by_label(pieces={pieces}): {n} nodes and {len(y)} examples allow {len(y) // n} pieces"
        )
    order = rng.permutation(len(y))[: n * pieces * size]
    order = order[np.argsort(y[order], kind="stable")]
    return rng.permutation(order.reshape(n * pieces, size)).reshape(n, -1)
