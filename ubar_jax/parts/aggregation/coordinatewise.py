"""Rules that combine the values of all messages per coordinate."""

from ubar_jax.numerics import order_statistics
from ubar_jax.parts.aggregation.base import rules
from ubar_jax.types import Inbox


@rules.register(selects=lambda: False)
def dmedian(inbox: Inbox):
    """Dmedian: coordinate-wise median of the neighbours."""
    return order_statistics.coordinate_median(inbox, inbox.graph.mask), {}
