"""Download and prepare tfds sets that are missing, as array_record.

mnist, fashion_mnist and cifar10 need no TensorFlow: tfds's builders download and check the files, NumPy
reads them, and PIL encodes the images. Any other set is prepared by `tfds build` in a separate process, if
TensorFlow is installed. UBAR_DOWNLOAD=false turns downloads off.
"""

import contextlib
import fcntl
import gzip
import importlib.util
import os
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ubar_jax.files import disk_is_full
from ubar_jax.registry import ConfigError

SWITCH = "UBAR_DOWNLOAD"
TIMEOUT = 4.0  # seconds to wait for a server's first answer


def allowed() -> bool:
    """Whether missing sets may be downloaded."""
    return os.environ.get(SWITCH, "").lower() not in ("0", "false", "no", "off")


def prepare(name: str, folder: Path) -> str:
    """Download a set and prepare it in a tfds folder; "" if it is there now, else why it cannot be done.

    A process that finds another one at work waits for it.
    """
    if not allowed():
        return f"Downloads are off (--download=false, --dry_run or {SWITCH}=false)."
    original = _original(name)
    if original is None:
        return "There is no tfds set of this name."
    if name not in BUILDERS and not _has_tensorflow():
        return "It can be prepared only with TensorFlow, which is not installed."
    if unreachable := _unreachable(original):
        return unreachable
    with _locked(name, folder):
        if not prepared(name, folder):  # by the process that had the lock
            with _told(name, original, folder):
                if name in BUILDERS:
                    _prepare_here(BUILDERS[name](original), folder)
                else:
                    _prepare_elsewhere(name, folder)
    return ""


def prepared(name: str, folder: Path) -> list[Path]:
    """The description (dataset_info.json) of every prepared version of a set, oldest first."""
    return sorted(folder.glob(f"{name}/[0-9]*/dataset_info.json"))


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None


def _original(name: str) -> Any:
    """The builder class that tfds has for a name, or None."""
    import tensorflow_datasets as tfds

    try:
        return tfds.builder_cls(name.partition("/")[0])
    except (tfds.core.DatasetNotFoundError, ImportError):
        return None


def _unreachable(original: Any) -> str:
    """Why the first file of a set cannot be downloaded; "" if its server answers.

    tfds itself tries for minutes. The request runs in a thread, because its timeout does not count the time
    that it takes to look up the server's name.
    """
    url = next(iter(original.url_infos), "")
    if not url.startswith("http"):
        return ""
    answer: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT).close()
            answer.append("")
        except urllib.error.HTTPError as error:
            gone = error.code in (403, 404, 410) or error.code >= 500
            answer.append(f"{url} cannot be downloaded ({error}).") if gone else answer.append("")
            error.close()
        except (OSError, ValueError) as error:
            answer.append(f"{url} cannot be reached ({getattr(error, 'reason', error)}).")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return answer[0] if answer else f"{url} cannot be reached (no answer for {TIMEOUT:.0f} s)."


@contextlib.contextmanager
def _locked(name: str, folder: Path) -> Iterator[None]:
    """Keeps other processes from preparing the same set; the lock ends with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{name.replace('/', '-')}.lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"dataset {name!r} cannot be prepared: {folder.absolute()} cannot be written "
            f"({error.strerror}); set TFDS_DATA_DIR to another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process, which prepares {name} in {folder.absolute()}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _told(name: str, original: Any, folder: Path) -> Iterator[None]:
    """Says what goes where, and what went wrong."""
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

    where = folder.absolute()
    size = sum(int(info.size or 0) for info in original.url_infos.values()) / 1e6
    _say(f"{name} is missing: downloading {size:,.0f} MB to {where / 'downloads'}, preparing {where / name}")
    try:
        yield
    except ConfigError:
        raise
    except NonMatchingChecksumError as error:
        told = " ".join(str(error).partition("To debug")[0].split())
        raise ConfigError(
            f"dataset {name!r}: a downloaded file is not the one that tfds expects, so it is not used. "
            f"{told} Try again; if it stays so, the server or a proxy sends something else"
        ) from error
    except Exception as error:
        if disk_is_full(error) or "Not enough disk space" in str(error):
            raise ConfigError(
                f"dataset {name!r} cannot be prepared: the disk of {where} is full. Free space, or set "
                "TFDS_DATA_DIR to a folder on another disk"
            ) from error
        raise ConfigError(
            f"dataset {name!r} cannot be prepared in {where} ({type(error).__name__}: {error})"
        ) from error
    _say(f"{name} is ready in {where / name}")


def _prepare_here(builder: Any, folder: Path) -> None:
    import tensorflow_datasets as tfds

    from_notebook = "ipykernel" in sys.modules
    tfds.display_progress_bar(sys.stderr.isatty() or from_notebook)
    try:
        made = builder(data_dir=str(folder), file_format="array_record")
        made.download_and_prepare(download_dir=str(folder / "downloads"))
    finally:
        tfds.display_progress_bar(True)


def _prepare_elsewhere(name: str, folder: Path) -> None:
    """`tfds build` in a process of its own: TensorFlow would take the GPU's memory in this one."""
    words = [sys.executable, "-m", "tensorflow_datasets.scripts.cli.main", "build", name]
    words += ["--file_format=array_record", f"--data_dir={folder}"]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode or not prepared(name, folder):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"dataset {name!r} cannot be prepared: tfds build {name} ended with: {last}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _of_idx_files(original: Any) -> Any:
    """mnist and fashion_mnist: two gzipped files per split, each with a header and uint8 values."""

    class Builder(original, skip_registration=True):  # type: ignore[call-arg]
        name = original.name
        url_infos = original.url_infos

        def _split_generators(self, manager):
            files = manager.download({PurePosixPath(url).name: url for url in self.url_infos})

            def examples(prefix):
                images = read_idx(files[f"{prefix}-images-idx3-ubyte.gz"])
                labels = read_idx(files[f"{prefix}-labels-idx1-ubyte.gz"])
                return self._generate_examples(images, labels)

            return {"train": examples("train"), "test": examples("t10k")}

        def _generate_examples(self, images, labels):
            for key, (image, label) in enumerate(zip(images, labels, strict=True)):
                yield key, {"image": _as_image(image), "label": int(label)}

    return _quiet(Builder)


def _of_cifar_archive(original: Any) -> Any:
    """cifar10: an archive of files whose records are a label and 3 x 32 x 32 uint8 values."""

    class Builder(original, skip_registration=True):  # type: ignore[call-arg]
        name = original.name
        url_infos = original.url_infos

        def _split_generators(self, manager):
            (url,) = (url for url in self.url_infos if url.endswith("-binary.tar.gz"))
            archive = manager.download(url)
            inside = self._cifar_info
            with tarfile.open(archive) as tar:
                opened = {PurePosixPath(member.name).name: tar.extractfile(member) for member in tar}
                files = {name: file.read() for name, file in opened.items() if file is not None}
            words = files[inside.label_files[0]].decode().split("\n")
            self.info.features["label"].names = [word for word in words if word]

            def examples(prefix, names):
                raw = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, 3073)
                images = raw[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                return self._generate_examples(prefix, images, raw[:, 0])

            return {
                "train": examples("train_", inside.train_files),
                "test": examples("test_", inside.test_files),
            }

        def _generate_examples(self, prefix, images, labels):
            for key, (image, label) in enumerate(zip(images, labels, strict=True)):
                yield key, {"id": f"{prefix}{key:05d}", "image": _as_image(image), "label": int(label)}

    return _quiet(Builder)


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "mnist": _of_idx_files,
    "fashion_mnist": _of_idx_files,
    "cifar10": _of_cifar_archive,
}


def _quiet(builder: Any) -> Any:
    """The builder without tfds's own messages: `_told` says the same in one form for all sets."""
    builder._log_download_bytes = builder._log_download_done = lambda self: None
    return builder


def _as_image(values: np.ndarray) -> Any:
    """A PIL image, which tfds encodes without TensorFlow."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(values))


def read_idx(path: str | os.PathLike) -> np.ndarray:
    """The uint8 array in a gzipped IDX file: two zeros, the type, the number of axes, their sizes, values."""
    with gzip.open(path) as f:
        raw = f.read()
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
