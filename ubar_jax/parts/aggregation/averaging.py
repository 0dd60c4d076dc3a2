"""The undefended mean."""

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.types import Inbox


@rules.register(alpha=lambda degree: 1 / (degree + 1), defends=False)
def average(inbox: Inbox):
    """Plain mean of the neighbours, undefended; alpha 1 / (|N_i| + 1) makes it the mean with x_i."""
    return linalg.undefended_mean(inbox), {"selected": inbox.graph.mask}
