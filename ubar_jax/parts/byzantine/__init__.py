"""Attacks: what Byzantine nodes send.

`base` has the registry `attacks` and says what an attack is; `seen` and `search` are what attacks share;
every other module is a family of attacks. Attacks are listed and drawn in the order of these imports.
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
