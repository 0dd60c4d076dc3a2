"""Checkpoints of runs side by side, from which a killed sweep continues.

Orbax writes them atomically, in one folder per pack of runs; only the last one is kept. Orbax takes seconds
to import, so it is imported only when a checkpoint is read or written.
"""

import contextlib
import hashlib
import shutil
import signal
import threading
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from ubar_jax.engine.simulation import Checkpointing, Snapshot
from ubar_jax.installed import versions
from ubar_jax.sweeps import results

FOLDER = ".checkpoints"


def writing(folder: Path, digests: Sequence[str], every: float) -> Checkpointing:
    """Callbacks that write a checkpoint of these runs at most once per `every` seconds."""
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
    """Delays Ctrl-C until the checkpoint is written: interrupted, orbax's threads may abort the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, caught = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda *_: caught.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):  # not callable if Ctrl-C is ignored, as in a background script
            before(signal.SIGINT, None)


def found(folder: Path, runs: Container[str], anywhere: bool = False) -> tuple[list[list[str]], list[str]]:
    """(the packs with a checkpoint of these runs, notices).

    Those made by other versions or on another kind of device are left out, unless `anywhere`. Those of other
    runs are not opened: another worker may be writing them. A checkpoint that cannot be read is removed.
    Names of older checkpoints do not begin with a run; they are renamed.
    """
    packs, notices = [], []
    for path in sorted((folder / FOLDER).glob("*")):
        digest, dash, _ = path.name.partition("-")
        if dash and digest not in runs:
            continue
        try:
            with _manager(path.absolute()) as manager:
                args = _orbax().args
                if (step := manager.latest_step()) is None:
                    continue
                meta = manager.restore(step, args=args.Composite(meta=args.JsonRestore())).meta
            if meta["digests"][0] not in runs:
                continue
            if not dash:
                path.rename(_path(folder, meta["digests"]))
            if anywhere or meta["made_by"] == _made_by():
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
    """The notice for a checkpoint that cannot be used."""
    return f"checkpoint {path} is damaged ({type(error).__name__}); its runs start again from round 0"


def _checksum(tree) -> str:
    """A checksum of all arrays and numbers in a tree."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def remove(folder: Path, digests: Sequence[str]) -> None:
    """Deletes the checkpoints of these runs."""
    shutil.rmtree(_path(folder, digests), ignore_errors=True)


def _path(folder: Path, digests: Sequence[str]) -> Path:
    """The folder of a pack: its name begins with the first run, which is in one pack only."""
    pack = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]
    return folder.absolute() / FOLDER / f"{digests[0]}-{pack}"


def _made_by() -> dict:
    return {**versions(), "device": results.device()}


def _orbax():
    import orbax.checkpoint

    return orbax.checkpoint


def _manager(path: Path):
    options = _orbax().CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    return _orbax().CheckpointManager(path, options=options)
