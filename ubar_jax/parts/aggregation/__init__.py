"""Aggregation rules: how a node combines the messages it receives.

`base` defines the registry `rules` and the interface of a rule. `counts` computes how many neighbours a rule
takes for benign or Byzantine. Every other module is a family of rules. The order of the imports is the order
in listings and plots.
"""

# isort: off
from ubar_jax.parts.aggregation.base import Rule, aggregate, make_inbox, rules
from ubar_jax.parts.aggregation.counts import count_neighbours
from ubar_jax.parts.aggregation import averaging
from ubar_jax.parts.aggregation import two_stage
from ubar_jax.parts.aggregation import krum
from ubar_jax.parts.aggregation import coordinatewise
from ubar_jax.parts.aggregation import bulyan
from ubar_jax.parts.aggregation import bridging
from ubar_jax.parts.aggregation import geometric

__all__ = [
    "Rule",
    "aggregate",
    "averaging",
    "bridging",
    "bulyan",
    "coordinatewise",
    "count_neighbours",
    "geometric",
]
__all__ += ["krum", "make_inbox", "rules", "two_stage"]
