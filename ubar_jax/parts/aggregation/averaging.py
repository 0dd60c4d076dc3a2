"""The undefended mean."""

from ubar_jax.numerics import linalg
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.types import Inbox


@rules.register(alpha=lambda degree: 1 / (degree + 1), defends=False)
def average(inbox: Inbox):
    """Undefended mean of the neighbours; alpha 1 / (|N_i| + 1) makes the update the mean of N_i and i."""
    return linalg.undefended_mean(inbox), {"selected": inbox.graph.mask}
