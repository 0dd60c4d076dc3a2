"""Attacks: what Byzantine nodes send.

`base` defines the registry `attacks` and the interface of an attack. `seen` and `search` are shared by
attacks. Every other module is a family of attacks. The order of the imports is the order in listings and
plots.
"""

# isort: off
from ubar_jax.parts.byzantine.base import Attack, attacks, check_range, first_memory, messages_of
from ubar_jax.parts.byzantine.base import tailored_since
from ubar_jax.parts.byzantine import simple
from ubar_jax.parts.byzantine import moments
from ubar_jax.parts.byzantine import unnoticed
from ubar_jax.parts.byzantine import fang
from ubar_jax.parts.byzantine import imitation
from ubar_jax.parts.byzantine import tailored
from ubar_jax.parts.byzantine import timing
from ubar_jax.parts.byzantine import history

__all__ = [
    "Attack",
    "attacks",
    "check_range",
    "fang",
    "first_memory",
    "history",
    "imitation",
    "messages_of",
    "moments",
    "simple",
    "tailored",
    "tailored_since",
]
__all__ += ["timing", "unnoticed"]
