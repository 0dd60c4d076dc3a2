"""Aggregation rules: what a node makes of the messages it received.

`base` has the registry `rules` and says what a rule is; `counts` what rules assume of their neighbours;
every other module is a family of rules. Rules are listed and drawn in the order of these imports.
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
