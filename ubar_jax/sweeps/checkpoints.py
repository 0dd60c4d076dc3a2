"""Checkpoints of runs that go side by side, so that a killed sweep continues where it was.

Orbax writes them, each whole or not at all, in one folder per pack of runs; the last one is kept. Orbax takes
seconds to import, so that is done only when a checkpoint is read or written.
"""

import contextlib
import hashlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from ubar_jax.engine.simulation import Checkpointing, Snapshot
from ubar_jax.sweeps import results

FOLDER = ".checkpoints"


def writing(folder: Path, digests: Sequence[str], every: float) -> Checkpointing:
    """Callbacks that write a checkpoint of these runs at most once in `every` seconds."""
    last = time.monotonic()

    def due(ahead: float) -> bool:
        return time.monotonic() + ahead - last >= every

    def save(now: Snapshot) -> None:
        nonlocal last
        state = now.state._replace(key=jax.random.key_data(now.state.key))
        tree = {**now._asdict(), "state": jax.device_get(jax.tree.leaves(state))}
        meta = {"digests": list(digests), "made_by": _made_by(), "checksum": _checksum(tree)}
        with _finishing(), _manager(_path(folder, digests)) as manager:
            args = _orbax().args
            saved = args.Composite(batch=args.StandardSave(tree), meta=args.JsonSave(meta))
            manager.save(now.done, args=saved)
        last = time.monotonic()

    return Checkpointing(due, save)


@contextlib.contextmanager
def _finishing() -> Iterator[None]:
    """Ctrl-C waits until a checkpoint is written: in the middle of one, orbax's threads may abort."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, caught = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda *_: caught.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):  # not if Ctrl-C is ignored, as in a background script
            before(signal.SIGINT, None)


def found(folder: Path) -> tuple[list[list[str]], list[str]]:
    """(the runs of every checkpoint from which these versions on this device can go on, notices)."""
    packs, notices = [], []
    for path in sorted((folder / FOLDER).glob("*")):
        try:
            with _manager(path.absolute()) as manager:
                args = _orbax().args
                if (step := manager.latest_step()) is not None:
                    meta = manager.restore(step, args=args.Composite(meta=args.JsonRestore())).meta
                    if meta["made_by"] == _made_by():
                        packs.append(meta["digests"])
        except Exception as error:  # orbax raises many kinds
            notices.append(damaged(path, error))
            shutil.rmtree(path, ignore_errors=True)
    return packs, notices


def load(folder: Path, digests: Sequence[str], first: Snapshot) -> Snapshot:
    """The last checkpoint of these runs; `first` is their snapshot before the first round."""
    with _manager(_path(folder, digests)) as manager:
        args = _orbax().args
        saved = args.Composite(batch=args.StandardRestore(), meta=args.JsonRestore())
        kept = manager.restore(manager.latest_step(), args=saved)
    if _checksum(kept.batch) != kept.meta["checksum"]:
        raise ValueError("its checksum is wrong")
    keyless = first.state._replace(key=jax.random.key_data(first.state.key))
    state = jax.device_put(jax.tree.unflatten(jax.tree.structure(keyless), kept.batch["state"]))
    state = state._replace(key=jax.random.wrap_key_data(state.key))
    return Snapshot(**{**kept.batch, "state": state})


def damaged(path: Path, error: Exception) -> str:
    """How a checkpoint that cannot be used is told."""
    return f"checkpoint {path} is damaged ({type(error).__name__}); its runs begin anew"


def _checksum(tree) -> str:
    """Of all arrays and numbers in it."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def remove(folder: Path, digests: Sequence[str]) -> None:
    """Forgets the checkpoints of these runs."""
    shutil.rmtree(_path(folder, digests), ignore_errors=True)


def _path(folder: Path, digests: Sequence[str]) -> Path:
    return folder.absolute() / FOLDER / hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


def _made_by() -> dict:
    return {**results.versions(), "device": results.device()}


def _orbax():
    import orbax.checkpoint

    return orbax.checkpoint


def _manager(path: Path):
    options = _orbax().CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    return _orbax().CheckpointManager(path, options=options)
