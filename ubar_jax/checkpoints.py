"""Checkpoints of a batch of runs, so that a killed sweep goes on where it was.

Orbax writes them, each whole or not at all, in one folder a batch; the last one is kept. Orbax takes
seconds to import, so that is done only when a checkpoint is read or written.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from ubar_jax import results
from ubar_jax.simulate import Batch

FOLDER = ".checkpoints"


def keeper(folder: Path, digests: Sequence[str], every: float) -> Callable[[Batch], None]:
    """A function that writes the batch of these runs, at most once in `every` seconds."""
    last = time.monotonic()

    def keep(batch: Batch) -> None:
        nonlocal last
        if time.monotonic() - last < every:
            return
        state = batch.state._replace(key=jax.random.key_data(batch.state.key))
        tree = {**batch._asdict(), "state": jax.device_get(jax.tree.leaves(state))}
        meta = {"digests": list(digests), "made_by": _made_by()}
        with _manager(_path(folder, digests)) as manager:
            args = _orbax().args
            manager.save(
                batch.done, args=args.Composite(batch=args.StandardSave(tree), meta=args.JsonSave(meta))
            )
        last = time.monotonic()

    return keep


def found(folder: Path) -> list[list[str]]:
    """The runs of every checkpoint from which these versions on this device can go on."""
    batches = []
    for path in sorted((folder / FOLDER).glob("*")):
        with _manager(path) as manager:
            args = _orbax().args
            if (step := manager.latest_step()) is not None:
                meta = manager.restore(step, args=args.Composite(meta=args.JsonRestore())).meta
                if meta["made_by"] == _made_by():
                    batches.append(meta["digests"])
    return batches


def load(folder: Path, digests: Sequence[str], first: Batch) -> Batch:
    """The last checkpoint of these runs; `first` is their batch before the first round."""
    with _manager(_path(folder, digests)) as manager:
        args = _orbax().args
        saved = args.Composite(batch=args.StandardRestore())
        tree = manager.restore(manager.latest_step(), args=saved).batch
    keyless = first.state._replace(key=jax.random.key_data(first.state.key))
    state = jax.device_put(jax.tree.unflatten(jax.tree.structure(keyless), tree["state"]))
    state = state._replace(key=jax.random.wrap_key_data(state.key))
    return Batch(**{**tree, "state": state})


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
