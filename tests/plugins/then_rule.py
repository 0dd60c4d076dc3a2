"""A rule of the order then: nodes send their models after the step, and mix them."""

from ubar_jax import linalg, rules


@rules.register(orders=("then",), alpha=lambda degree: 0.0)
def near_half(inbox):
    """The mean of own model and the closer half of the neighbours, after the step."""
    order = linalg.ranks(linalg.own_distances(inbox))
    near = (order < (inbox.degree[:, None] + 1) // 2) & inbox.graph.mask
    return linalg.mean_with_own(inbox, near), {"selected": near}
