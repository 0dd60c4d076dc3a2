"""Whole decentralized-learning networks under Byzantine attack, as one compiled JAX program."""

import os

# Before JAX is imported: XLA calls every program that a CPU takes from the cache one made for another
# machine, in lines of 3,000 characters (openxla/xla issue 44565). What does go wrong is raised as well.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from ubar_jax import linalg, targeted  # noqa: F401 (targeted registers attacks)
from ubar_jax.attacks import attacks
from ubar_jax.config import Config
from ubar_jax.data import datasets
from ubar_jax.models import models
from ubar_jax.registry import ConfigError
from ubar_jax.rules import rules
from ubar_jax.simulate import Result, simulate
from ubar_jax.topology import topologies

__all__ = [
    "Config",
    "ConfigError",
    "Result",
    "attacks",
    "datasets",
    "linalg",
    "models",
    "rules",
    "simulate",
    "topologies",
]
