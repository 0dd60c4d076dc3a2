"""Decentralized learning under Byzantine attack: a whole network as one compiled JAX program.

Names are imported on first use, so that drawing a figure does not load the engine.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Set before JAX is imported. On a CPU, XLA logs 3,000 characters per cached program, which say that it was
# compiled for another machine, even if it was not (openxla/xla issue 44565). Real errors are still raised.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if TYPE_CHECKING:
    from ubar_jax.config import Config
    from ubar_jax.engine.devices import use_devices, use_processes
    from ubar_jax.engine.simulation import simulate
    from ubar_jax.experiments.drawing import animate
    from ubar_jax.experiments.notebook import sweep
    from ubar_jax.numerics import linalg, order_statistics
    from ubar_jax.parts.aggregation import rules
    from ubar_jax.parts.byzantine import attacks
    from ubar_jax.parts.data import datasets
    from ubar_jax.parts.tasks import models
    from ubar_jax.parts.topology import topologies
    from ubar_jax.registry import ConfigError
    from ubar_jax.sweeps import results
    from ubar_jax.types import Result

__all__ = [
    "Config",
    "ConfigError",
    "Result",
    "animate",
    "attacks",
    "datasets",
    "linalg",
    "models",
    "order_statistics",
    "results",
    "rules",
    "simulate",
    "sweep",
    "topologies",
    "use_devices",
    "use_processes",
]

_HOMES = {
    "Config": "config",
    "ConfigError": "registry",
    "Result": "types",
    "animate": "experiments.drawing",
    "attacks": "parts.byzantine",
    "datasets": "parts.data",
    "linalg": "numerics",
    "models": "parts.tasks",
    "order_statistics": "numerics",
    "results": "sweeps",
    "rules": "parts.aggregation",
    "simulate": "engine.simulation",
    "sweep": "experiments.notebook",
    "topologies": "parts.topology",
    "use_devices": "engine.devices",
    "use_processes": "engine.devices",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ubar_jax' has no attribute {name!r}")
    home = importlib.import_module(f"ubar_jax.{_HOMES[name]}")
    if not hasattr(home, name):  # a module inside a package
        return importlib.import_module(f"{home.__name__}.{name}")
    return getattr(home, name)
