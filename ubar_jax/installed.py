"""What is installed here, and on what machine."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of everything that the numbers may depend on."""
    packages = ("ubar_jax", "jax", "jaxlib", "flax", "optax", "numpy", "networkx")
    return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages}


def commit() -> str | None:
    """The commit of the checkout that this package is in, with + if files were changed; None elsewhere."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git
        return None


def processor() -> str:
    """The processor's model name, from Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(": ")[1] for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
