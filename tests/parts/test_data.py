import time

import numpy as np
import pytest

from ubar_jax.parts import data
from ubar_jax.registry import ConfigError


def test_digits_are_real_and_whole():
    digits = data.load("digits")
    assert digits.train_x.shape == (1437, 8, 8, 1) and digits.test_x.shape == (360, 8, 8, 1)
    assert digits.train_x.dtype == np.uint8 and digits.train_x.max() == 255
    assert set(digits.train_y) == set(range(10))


@pytest.mark.slow  # tfds decodes 3,000 images per second
@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [("mnist", (60000, 10000), (28, 28, 1)), ("cifar10", (50000, 10000), (32, 32, 3))],
)
def test_prepared_tfds_sets_are_read(name, sizes, shape, tfds_dir):
    found = data.load(name)  # through the user's cache folder
    assert (len(found.train_x), len(found.test_x)) == sizes
    assert found.train_x.shape[1:] == shape and found.train_x.dtype == np.uint8
    assert found.classes == 10 and np.bincount(found.test_y).min() >= 800


@pytest.mark.slow
def test_the_cached_arrays_are_what_tfds_reads(tfds_dir, tmp_path, monkeypatch):
    """The first read fills an empty cache folder, the second reads from it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = data.from_tfds("mnist"), data.from_tfds("mnist")
    assert len(list((tmp_path / "ubar_jax" / "data").iterdir())) == 1
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_channel_statistics_are_mean_and_deviation():
    x = np.random.default_rng(0).integers(0, 256, (50, 6, 7, 3), np.uint8)
    mean, std = data.channel_statistics(x)
    np.testing.assert_allclose(mean, x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(std, x.std((0, 1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["mnist", "no_such_set", "imagenet_resized/8x8", "imagenet_v2/matched-frequency"]
)
def test_a_set_that_is_not_there_is_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    data._load.cache_clear()
    begun = time.perf_counter()
    with pytest.raises(ConfigError) as error:
        data.load(name)
    assert time.perf_counter() - begun < 5
    assert str(tmp_path) in str(error.value)
    assert "TFDS_DATA_DIR" in str(error.value) and f"tfds build {name}" in str(error.value)


def test_a_misspelled_set_is_suggested(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        data.load("digist")


@pytest.mark.parametrize("spec", ["iid", "dirichlet(a=0.1)", "dirichlet(a=100)", "by_label"])
def test_shares_are_equal_and_disjoint(spec):
    y = data.load("digits").train_y
    shards = data.shardings.parse(spec)(np.random.default_rng(0), y, 20)
    assert shards.shape[0] == 20 and shards.shape[1] >= 70
    assert len(np.unique(shards)) == shards.size and shards.min() >= 0 and shards.max() < len(y)


def test_skewed_shares_are_skewed():
    y = data.load("digits").train_y

    def largest_class(spec):
        shards = data.shardings.parse(spec)(np.random.default_rng(0), y, 20)
        return np.mean([np.bincount(y[s], minlength=10).max() / len(s) for s in shards])

    assert largest_class("iid") < 0.25
    assert largest_class("dirichlet(a=0.1)") > 0.5 > largest_class("dirichlet(a=10)")
    assert largest_class("by_label(pieces=1)") > 0.7


def test_a_cache_that_breaks_off_leaves_nothing(tmp_path):
    def write(f):
        f.write(b"half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        data.atomic_write(tmp_path / "x.npz", write)
    assert not list(tmp_path.iterdir())
