"""Attacks: what Byzantine nodes send.

`base` defines the registry `attacks` and the interface of an attack. `seen` and `search` are shared by
attacks. Every other module is a family of attacks. The order of the imports is the order in listings and
plots.
"""

# isort: off
from ubar_jax.parts.byzantine.base import Attack, attacks, check_range, tailored_since
from ubar_jax.parts.byzantine import simple
from ubar_jax.parts.byzantine import moments
from ubar_jax.parts.byzantine import unnoticed
from ubar_jax.parts.byzantine import fang
from ubar_jax.parts.byzantine import imitation
from ubar_jax.parts.byzantine import tailored
from ubar_jax.parts.byzantine import timing

__all__ = [
    "Attack",
    "attacks",
    "check_range",
    "fang",
    "imitation",
    "moments",
    "simple",
    "tailored",
    "tailored_since",
]
__all__ += ["timing", "unnoticed"]
