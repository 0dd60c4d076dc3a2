"""Atomic file writes, the user's cache folder, and detection of a full disk."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def cache_dir() -> Path:
    """The user's cache folder for this project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ubar_jax"


def atomic_write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write atomically: call write(file) on a temporary file next to `path`, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".part-{path.name}-{os.getpid()}")
    try:
        with part.open("wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically."""
    atomic_write(path, lambda f: f.write(f"{json.dumps(value, indent=1)}\n".encode()))


def disk_is_full(error: BaseException | None) -> bool:
    """Whether the error, or one of its causes, reports that no disk space is left."""
    if error is None:
        return False
    reasons = (errno.ENOSPC, errno.EDQUOT)
    full = isinstance(error, OSError) and error.errno in reasons
    full = full or any(os.strerror(reason) in str(error) for reason in reasons)
    return full or disk_is_full(error.__cause__ or error.__context__)
