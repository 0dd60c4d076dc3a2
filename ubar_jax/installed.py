"""What is installed here."""

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """Versions of everything that the numbers may depend on."""
    packages = ("ubar_jax", "jax", "jaxlib", "flax", "optax", "numpy", "networkx")
    return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages}
