"""Aggregation rules: how a node combines the messages it receives.

`base` defines the registry `rules` and the interface of a rule. `counts` computes how many neighbours a rule
takes for benign or Byzantine. Every other module is a family of rules. The order of the imports is the order
in listings and plots.
"""

# isort: off
from ubar_jax.parts.aggregation.base import Rule, aggregate, first_memory, losses_per_round, make_inbox, rules
from ubar_jax.parts.aggregation.counts import count_neighbours
from ubar_jax.parts.aggregation import averaging
from ubar_jax.parts.aggregation import two_stage
from ubar_jax.parts.aggregation import krum
from ubar_jax.parts.aggregation import coordinatewise
from ubar_jax.parts.aggregation import bulyan
from ubar_jax.parts.aggregation import bridging
from ubar_jax.parts.aggregation import geometric
from ubar_jax.parts.aggregation import clipping
from ubar_jax.parts.aggregation import proximity
from ubar_jax.parts.aggregation import validation
from ubar_jax.parts.aggregation import history

__all__ = [
    "Rule",
    "aggregate",
    "averaging",
    "bridging",
    "bulyan",
    "clipping",
    "coordinatewise",
    "count_neighbours",
    "first_memory",
    "geometric",
    "losses_per_round",
]
__all__ += ["history", "krum", "make_inbox", "proximity", "rules", "two_stage", "validation"]
