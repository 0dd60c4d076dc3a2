"""Missing tfds sets are downloaded and prepared, from small stand-in files of a server on this machine."""

import errno
import fcntl
import gzip
import hashlib
import io
import socket
import stat
import sys
import tarfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from ubar_jax.parts import data, download
from ubar_jax.registry import ConfigError

pytestmark = pytest.mark.medium

SIZES = {"train": 12, "t10k": 5}
WORDS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def images_and_labels(seed, n, shape):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.integers(0, 10, n).astype(np.uint8)


def idx_file(values):
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    return gzip.compress(header + values.tobytes())


def idx_files():
    """({split: (images, labels)}, {file name: bytes}) in the format of mnist."""
    sets = {prefix: images_and_labels(n, n, (28, 28)) for prefix, n in SIZES.items()}
    files = {}
    for prefix, (images, labels) in sets.items():
        files[f"{prefix}-images-idx3-ubyte.gz"] = idx_file(images)
        files[f"{prefix}-labels-idx1-ubyte.gz"] = idx_file(labels)
    return sets, files


def cifar_archive():
    """The same for cifar10, whose training set is in five files."""
    sets = {"train": images_and_labels(0, 10, (32, 32, 3)), "t10k": images_and_labels(1, 4, (32, 32, 3))}
    names = {"batches.meta.txt": "\n".join([*WORDS, ""]).encode()}
    for prefix, (images, labels) in sets.items():
        raw = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(-1, 3072)], axis=1)
        if prefix == "t10k":
            names["test_batch.bin"] = raw.tobytes()
        else:
            names |= {f"data_batch_{k + 1}.bin": raw[2 * k : 2 * k + 2].tobytes() for k in range(5)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in names.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return sets, {"cifar-10-binary.tar.gz": packed.getvalue()}


@pytest.fixture
def server(tmp_path):
    """(address, folder, paths that were asked for) of a file server on this machine."""
    folder, asked = tmp_path / "served", []
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            asked.append(f"{self.command} {self.path}")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/", folder, asked
        running.shutdown()
        thread.join()


@pytest.fixture
def tfds_folder(tmp_path, monkeypatch):
    """An empty tfds folder and an empty cache; downloads are on."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(download.SWITCH, "true")
    data._load.cache_clear()
    yield tmp_path / "tfds"
    data._load.cache_clear()


def offer(monkeypatch, name, base, files, checksums=None):
    """tfds expects these files at an address instead of the real ones."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download.checksums import UrlInfo

    infos = {}
    for file, content in files.items():
        checksum = (checksums or {}).get(file, hashlib.sha256(content).hexdigest())
        infos[base + file] = UrlInfo(
            size=tfds.core.utils.Size(len(content)), checksum=checksum, filename=file
        )
    monkeypatch.setattr(tfds.builder_cls(name), "url_infos", infos, raising=False)


@pytest.fixture
def offered(server, monkeypatch):
    """Offers a set's stand-in files on the server; returns them as arrays."""

    def put(name, checksums=None):
        sets, files = cifar_archive() if name == "cifar10" else idx_files()
        for file, content in files.items():
            (server[1] / file).write_bytes(content)
        offer(monkeypatch, name, server[0], files, checksums)
        return sets

    return put


@pytest.mark.parametrize("name", download.BUILDERS)
def test_a_missing_set_is_downloaded_prepared_and_read(name, offered, server, tfds_folder, capsys):
    sets = offered(name)
    found = data.load(name)
    told = capsys.readouterr()
    assert told.out == "" and str(tfds_folder / "downloads") in told.err and "is ready in" in told.err
    for x, y, (images, labels) in (
        (found.train_x, found.train_y, sets["train"]),
        (found.test_x, found.test_y, sets["t10k"]),
    ):
        wanted = {image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
        assert {
            image.tobytes(): int(label) for image, label in zip(x, y, strict=True)
        } == wanted  # tfds shuffles
        assert x.shape[1:3] == images.shape[1:3] and len(x) == len(images)
    assert found.classes == 10
    assert "tensorflow" not in sys.modules
    asked = len(server[2])
    data._load.cache_clear()
    data.load(name)
    assert len(server[2]) == asked and capsys.readouterr().err == ""  # nothing is downloaded twice


def test_the_labels_of_cifar10_have_their_names(offered, tfds_folder):
    import tensorflow_datasets as tfds

    offered("cifar10")
    data.load("cifar10")
    builder = tfds.builder("cifar10", data_dir=str(tfds_folder))
    assert builder.info.features["label"].names == WORDS
    assert {record["id"] for record in builder.as_data_source("test")} == {
        f"test_{i:05d}".encode() for i in range(4)
    }


def test_a_file_with_a_wrong_checksum_is_not_used(offered, tfds_folder):
    offered("mnist", checksums={"t10k-images-idx3-ubyte.gz": "0" * 64})
    with pytest.raises(ConfigError, match="not the one that tfds expects") as error:
        data.load("mnist")
    assert "t10k-images-idx3-ubyte.gz" in str(error.value) and not list(tfds_folder.glob("mnist/*"))
    offered("mnist")  # the next try starts anew
    assert len(data.load("mnist").train_y) == SIZES["train"]


def test_a_full_disk_is_told(offered, tfds_folder, monkeypatch):
    def full(image):
        raise OSError(errno.ENOSPC, "No space left on device")

    offered("mnist")
    monkeypatch.setattr(download, "_as_image", full)
    with pytest.raises(ConfigError, match=f"the disk of {tfds_folder} is full"):
        data.load("mnist")
    assert not list(tfds_folder.glob("mnist/*"))


def test_a_set_prepared_as_tfrecord_is_told(tfds_folder):
    folder = tfds_folder / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text('{"name": "mnist", "fileFormat": "tfrecord"}')
    (folder / "mnist-train.tfrecord-00000-of-00001").write_bytes(b"")
    with pytest.raises(ConfigError, match="as tfrecord, which can be read only with TensorFlow"):
        data.load("mnist")


def test_what_a_killed_process_left_is_not_taken_for_a_set(tfds_folder):
    folder = tfds_folder / "mnist" / "incomplete.ABCDEF_3.0.1"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    assert download.prepared("mnist", tfds_folder) == []


@pytest.mark.parametrize("listening", [False, True])
def test_without_a_network_the_message_comes_within_seconds(listening, tfds_folder, monkeypatch):
    """The server refuses the connection, or accepts it and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        offer(monkeypatch, "mnist", address, idx_files()[1])
        begun = time.perf_counter()
        with pytest.raises(ConfigError, match="cannot be reached") as error:
            data.load("mnist")
        assert time.perf_counter() - begun < 5
    assert address in str(error.value) and str(tfds_folder) in str(error.value)
    assert not tfds_folder.exists()


def test_a_file_that_is_gone_is_told(server, tfds_folder, monkeypatch):
    offer(monkeypatch, "mnist", server[0], idx_files()[1])
    with pytest.raises(ConfigError, match=r"cannot be downloaded \(HTTP Error 404"):
        data.load("mnist")


def test_downloads_can_be_turned_off(offered, server, tfds_folder, monkeypatch):
    offered("mnist")
    monkeypatch.setenv(download.SWITCH, "false")
    with pytest.raises(ConfigError, match="Downloads are off"):
        data.load("mnist")
    assert server[2] == [] and not tfds_folder.exists()


def test_a_folder_that_cannot_be_written_is_told(offered, tfds_folder):
    offered("mnist")
    tfds_folder.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written"):
        data.load("mnist")


def test_two_processes_do_not_prepare_at_once(offered, tfds_folder, capsys, monkeypatch):
    offered("mnist")
    monkeypatch.setattr(download, "_prepare_here", lambda *args: pytest.fail("prepared twice"))
    tfds_folder.mkdir()
    done = []
    with (tfds_folder / ".mnist.lock").open("a") as lock:  # another process is at work
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: done.append(download.prepare("mnist", tfds_folder)))
        thread.start()
        thread.join(1)
        assert thread.is_alive() and not done
        folder = tfds_folder / "mnist" / "3.0.1"
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text("{}")
    thread.join(30)
    assert done == [""] and "waiting for another process" in capsys.readouterr().err


def test_another_set_needs_tensorflow(tfds_folder):
    """Without TensorFlow, or for a name that tfds does not know, nothing is asked of any server."""
    assert "only with TensorFlow" in download.prepare("kmnist", tfds_folder)
    assert "no tfds set of this name" in download.prepare("no_such_set", tfds_folder)


@pytest.mark.parametrize("works", [True, False])
def test_another_set_is_prepared_in_a_process_with_tensorflow(
    works, server, tfds_folder, tmp_path, monkeypatch
):
    """A stand-in for Python records the command and makes the folder, or fails."""
    files = {"train-images-idx3-ubyte.gz": b"any"}
    (server[1] / "train-images-idx3-ubyte.gz").write_bytes(b"any")
    offer(monkeypatch, "kmnist", server[0], files)
    folder = tfds_folder / "kmnist" / "3.0.1"
    program = tmp_path / "python"
    make = f"mkdir -p {folder} && echo '{{}}' > {folder}/dataset_info.json"
    act = make if works else "echo first >&2; echo 'no luck' >&2; exit 1"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{act}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(download, "_has_tensorflow", lambda: True)
    if works:
        assert download.prepare("kmnist", tfds_folder) == ""
    else:
        with pytest.raises(ConfigError, match="tfds build kmnist ended with: no luck"):
            download.prepare("kmnist", tfds_folder)
    words = (tmp_path / "words").read_text().split()
    assert words[2:] == ["build", "kmnist", "--file_format=array_record", f"--data_dir={tfds_folder}"]
