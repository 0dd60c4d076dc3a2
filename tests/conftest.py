import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
os.environ["UBAR_DOWNLOAD"] = "false"  # tests of downloads turn it on, with a server of their own


@pytest.fixture
def tfds_dir(monkeypatch):
    """A folder with prepared tfds sets: TFDS_DATA_DIR, or ../shared/tfds next to the checkout."""
    beside = Path(__file__).parents[2] / "shared" / "tfds"
    folder = Path(os.environ.get("TFDS_DATA_DIR") or beside)
    if not (folder / "mnist").is_dir() or not (folder / "cifar10").is_dir():
        pytest.skip(f"needs mnist and cifar10 prepared by tfds; {folder} lacks one (set TFDS_DATA_DIR)")
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    return folder


def slowly(*values):
    """Values of a parameter whose tests are slow; several numbers per test are given as a tuple."""
    return _marked(values, pytest.mark.slow)


def not_quickly(*values):
    """Values of a parameter whose tests are not among the quick ones, given as to `slowly`."""
    return _marked(values, pytest.mark.medium)


def _marked(values, mark):
    given = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=mark) for value in given]
